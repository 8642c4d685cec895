"""When a live audit is due, and which of several verdicts stands for all."""

from hybridkv.core.audit import (
    AUDIT_SHARE,
    FIRST_AUDITS_MAX,
    AuditBudget,
    AuditOutcome,
    AuditVerdict,
    worst,
)

HERE, THERE = b"h" * 32, b"t" * 32
CHUNK = 128


def audited(budget: AuditBudget, identity: bytes, outcome: AuditOutcome) -> None:
    budget.spent_tokens += CHUNK
    budget.on_outcome(identity, outcome)


def test_the_first_hit_of_a_start_is_audited_and_then_one_in_a_thousand_chunks() -> None:
    budget = AuditBudget(AUDIT_SHARE)
    assert budget.is_due(HERE)
    audited(budget, HERE, AuditOutcome.PASSED)
    audits, computed = 1, 0
    for _ in range(20_000):
        computed += CHUNK
        budget.prefilled_tokens += CHUNK
        if budget.is_due(HERE):
            audits += 1
            audited(budget, HERE, AuditOutcome.PASSED)
    assert 19 <= audits <= 21
    assert (audits - 1) * CHUNK <= AUDIT_SHARE * computed + CHUNK


def test_after_a_change_of_weights_the_next_hit_is_audited() -> None:
    budget = AuditBudget(AUDIT_SHARE)
    audited(budget, HERE, AuditOutcome.PASSED)
    assert not budget.is_due(HERE)
    budget.forget_audited()
    assert budget.is_due(HERE)


def test_what_differs_is_never_audited_again_and_other_weights_are() -> None:
    budget = AuditBudget(1.0)
    audited(budget, HERE, AuditOutcome.DIFFERED)
    budget.forget_audited()
    budget.prefilled_tokens = 1 << 40
    assert not budget.is_due(HERE)
    assert budget.is_due(THERE)


def test_an_engine_whose_numbers_are_not_known_does_not_lose_a_chunk_of_every_hit() -> None:
    budget = AuditBudget(AUDIT_SHARE)
    for _ in range(FIRST_AUDITS_MAX):
        assert budget.is_due(HERE)
        audited(budget, HERE, AuditOutcome.INCONCLUSIVE)
    assert not budget.is_due(HERE)


def test_audits_may_be_off() -> None:
    budget = AuditBudget(0.0)
    budget.prefilled_tokens = 1 << 40
    assert not budget.is_due(HERE)


def test_the_worst_verdict_is_one_that_differs_and_then_the_farthest_off() -> None:
    unmade = AuditVerdict(AuditOutcome.INCONCLUSIVE)
    near = AuditVerdict(AuditOutcome.PASSED, "near", 0.01, 0.1)
    far = AuditVerdict(AuditOutcome.PASSED, "far", 0.05, 0.1)
    wrong = AuditVerdict(AuditOutcome.DIFFERED, "wrong", 0.2, 0.1)
    assert worst([near, wrong, far, unmade]) == wrong
    assert worst([near, far, unmade]) == far
    assert worst([unmade]) == unmade
    assert wrong.sentence == "layer wrong differs by 0.2, 0.1 is allowed"
    assert not unmade.sentence
