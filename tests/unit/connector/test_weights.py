"""Which weights the engine's identity names, and what is refused while nobody knows."""

import random
from collections import Counter, deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybridkv.connector.scheduler.weights import WeightsWatch
from hybridkv.vllm.weights import WeightsAnswer

pytestmark = pytest.mark.engine

SEED = 20261123


def said(
    question: int, *digests: str, version: int = 0, era: int | None = None
) -> dict[int, WeightsAnswer]:
    """What ranks answer; `era` is that of the version by default."""
    era = version if era is None else era
    return {
        rank: WeightsAnswer(question, digest, version, era) for rank, digest in enumerate(digests)
    }


def test_after_a_reset_all_ranks_are_heard_before_anything_is_offered() -> None:
    watch = WeightsWatch(("a", "b"))
    assert watch.is_current
    watch.planned()
    watch.reset(True)
    assert not watch.is_current
    assert watch.heard(said(0, "a", "b")) is None, "an answer to an older question"
    assert not watch.is_current
    assert watch.heard({0: WeightsAnswer(1, "a", 0, 0)}) is None
    assert not watch.is_current, "the other rank has not answered"
    watch.heard({1: WeightsAnswer(1, "b", 0, 0)})
    assert watch.is_current, "the same weights, and so the same identity"
    watch.reset(True)
    assert watch.heard(said(2, "a", "c")) == ("a", "c")
    assert watch.is_current
    assert watch.named == ("a", "c")


def test_blocks_of_other_weights_are_cached_by_nobody() -> None:
    watch = WeightsWatch(("a",))
    watch.planned()
    watch.heard(said(0, ""))
    assert not watch.is_current, "they changed, and are being read"
    watch.heard(said(0, "a"))
    assert watch.is_current, "to the same"
    assert watch.heard(said(0, "b")) is None
    assert watch.is_stale
    assert watch.heard(said(0, "a")) is None
    assert watch.is_stale, "steps may have run in between"
    watch.reset(False)
    watch.heard(said(1, "a"))
    assert watch.is_stale, "blocks were in use, so they are still there"
    watch.reset(True)
    assert watch.heard(said(2, "b")) == ("b",)


@pytest.mark.parametrize(
    ("eras", "is_known"), [((0, 0), True), ((0, 1), False), ((1, 1), False), ((1, 2), False)]
)
def test_two_resets_in_a_row_while_requests_run(eras: tuple[int, int], is_known: bool) -> None:
    """What ran between them is the identity's if the workers saw one weight in all these steps."""
    watch = WeightsWatch(("a",))
    watch.planned()
    watch.heard(said(0, "a"))
    watch.reset(False)
    watch.planned()
    watch.heard(said(1, "", era=eras[0]))
    watch.reset(False)
    watch.planned()
    assert watch.is_doubtful, "the answer to the last question will tell"
    watch.heard(said(2, "", era=eras[1]))
    assert watch.heard(said(2, "a", era=eras[1])) is None
    assert (watch.is_current, watch.is_stale) == (is_known, not is_known)
    watch.reset(True)
    watch.heard(said(3, "a", era=eras[1]))
    assert watch.is_current, "nothing of what was computed in doubt is left"


def test_two_resets_in_a_row_before_the_first_report() -> None:
    """As with steps that are planned ahead: the doubt begins before anything was heard."""
    watch = WeightsWatch(("a",))
    watch.planned()
    for _ in range(2):
        watch.reset(False)
        watch.planned()
    for question in range(3):
        watch.heard(said(question, "a" if question == 0 else ""))
    assert watch.is_doubtful
    watch.heard(said(2, "a"))
    assert watch.is_current, "nobody saw other weights"


@pytest.mark.parametrize("changed", [False, True])
def test_steps_that_nobody_heard_of(changed: bool) -> None:
    """The role was switched off, and begins anew."""
    watch = WeightsWatch(("a",))
    watch.planned()
    watch.missed()
    assert not watch.is_current
    assert watch.heard(said(0, "a", version=int(changed))) is None
    assert watch.is_current != changed, "weights that changed meanwhile may have been others"


@pytest.mark.parametrize("way", ["while they were read", "between two changes"])
def test_steps_of_unknown_weights(way: str) -> None:
    watch = WeightsWatch(("a",))
    watch.reset(True)
    watch.planned()
    watch.heard(said(1, ""))
    if way == "between two changes":
        assert watch.heard(said(1, "b", version=1)) is None
        assert watch.is_stale
        return
    assert watch.heard(said(1, "b")) == ("b",), "the step that was asked ran with what was read"
    watch.reset(False)
    watch.heard(said(2, "c"))
    assert watch.is_stale


def test_no_order_of_events_names_blocks_after_other_weights() -> None:
    """An engine of one rank, step by step, that knows of each of its blocks who computed it."""
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    counts = Counter[str]()
    for _ in range(2000):
        watch, weights, blocks = WeightsWatch(("a",)), "a", set[str]()
        question, read, version, ran = 0, ("a", 0, 0), 0, (-1, -1)
        seen, era = (0, "a"), 0  # What the worker's last sample was of.
        lag, reports = rng.choice((0, 0, 1, 3)), deque[tuple[dict[int, Any], set[str]]]()
        held: list[set[str]] = []  # Objects, each as the weights of the blocks that it is of.
        for _ in range(rng.randrange(2, 25)):
            event = rng.choice(
                ("step", "step", "step", "reading", "watched", "reset", "failed", "failed")
            )
            if event == "watched":
                version, weights = version + 1, rng.choice("ab")
            elif event in ("reset", "failed"):
                # Weights that change without a word do so before a reset, and no step is between.
                weights = rng.choice((weights, weights, weights, "a", "b"))
                if event == "reset":
                    blocks.clear()
                watch.reset(event == "reset")
                counts["aborted"] += abort(held, reports)
            elif event == "reading" and ran == (question, version) != read[1:]:
                read = weights, question, version
            elif event == "step":
                plan = watch.question, watch.versions if watch.is_current else ()
                stores = not watch.is_stale
                watch.planned()
                question = max(question, plan[0])
                ran = question, version
                blocks.add(weights)
                if read[1:] != (question, version) and seen != (version, weights):
                    seen, era = (version, weights), era + 1
                known = read[0] if read[1:] == (question, version) else ""
                agrees = plan == (question, ((known, version),)) if known else False
                if agrees:
                    counts["loaded"] += 1
                    assert blocks == {known}, "a block that is loaded here would be a lie"
                is_stored = stores and (agrees or plan == (question, ()))
                reports.append(
                    (
                        {0: WeightsAnswer(question, known, version, era)},
                        set(blocks) if is_stored else set(),
                    )
                )
                if len(reports) <= lag:
                    continue
                # As the scheduler role does.
                answers, written = reports.popleft()
                was_stale = watch.is_stale
                in_doubt = watch._in_doubt
                is_other = watch.heard(answers) is not None
                counts["settled"] += in_doubt and not (watch._in_doubt or watch.is_stale)
                held += [written] if written else []
                if is_other or (watch.is_stale and not was_stale):
                    counts["aborted"] += abort(held, reports)
                if watch.is_doubtful:
                    counts["held"] += len(held)
                    continue
                counts["committed"] += len(held)
                assert all(content == set(watch.named) for content in held), "a lie"
                held = []
    print(dict(counts))
    assert counts.pop("settled") > 20
    assert min(counts.values()) > 500


def abort(held: list[set[str]], reports: "deque[tuple[dict[int, Any], set[str]]]") -> int:
    """Nothing that is being written, or was, is committed; returns how many objects that is."""
    aborted = len(held) + sum(bool(written) for _, written in reports)
    held.clear()
    for _, written in reports:
        written.clear()
    return aborted


class Model(torch.nn.Module):
    """One parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4), requires_grad=False)


class Runner:
    """What vLLM's model runner is to the worker role."""

    def __init__(self, role: Any) -> None:
        self.model, self.role = Model(), role

    def register(self) -> str:
        """As vLLM registers KV caches; returns the digest."""
        from hybridkv.vllm.weights import EngineWeights

        self.role._weights = EngineWeights.of_caller()
        digest: str = self.role._weights.read().digest
        return digest

    def update_weights(self) -> None:
        """Nothing but being one of vLLM's methods."""


def test_a_worker_does_nothing_for_other_weights() -> None:
    """A plan that was made before a change is carried out after it: its loads and stores fail."""
    from hybridkv.connector.messages import LoadPlan, StepPlan
    from hybridkv.connector.worker.role import WorkerRole
    from hybridkv.core.copies import CopyRun, ObjectSpan

    class Copier:
        def store(self, ops: Any, done: Any) -> None:
            """At once."""
            for op in ops:
                done(op, True)

        def load(self, ops: Any, done: Any) -> None:
            """At once."""
            done(None)

        def close(self) -> None:
            """Nothing to free."""

    config: Any = SimpleNamespace(kv_cache_groups=[], prefix_cacheable_group_ids=[])
    role: Any = WorkerRole(config, "/nowhere/daemon.sock", "e", 0, 1, "on")
    role._copiers["b"], role._boot = (None, Copier()), "b"
    runner = Runner(role)
    digest = runner.register()

    def step(number: int, question: int, *weights: tuple[str, int]) -> tuple[bool, bool]:
        """Whether a load and a store went well."""
        run = CopyRun(ObjectSpan(0, 0, 1, (1,)), bytes(8), bytes(8))
        plan = StepPlan(boot="b", session=1, loads={"r": LoadPlan("b", ())}, stores={number: run})
        plan.question, plan.weights = question, weights
        role.start_loads(plan)
        role.start_stores(plan)
        finished, failed = role.collect()
        report = role.report()
        assert finished == {"r"}
        assert report.done == {number: {0}}
        return not failed, not report.unstored

    assert step(1, 0, (digest, 0)) == (True, True)
    assert step(2, 0, ("of others", 0)) == (False, False)
    assert step(3, 0) == (False, True), "the scheduler role commits once it knows them"
    runner.update_weights()
    assert role.report().weights == {0: WeightsAnswer(0, "", 1, era=0)}
    role.start_loads(StepPlan())
    role._weights._reader[0].join()
    assert step(5, 0, (digest, 1)) == (True, True), "they were changed to the same"
    assert step(6, 0, (digest, 0)) == (False, False), "a plan from before the change"
    role.start_loads(StepPlan(question=1))
    role._weights._reader[0].join()
    assert step(7, 0, (digest, 1)) == (False, False), "an older question"
    assert step(8, 1, (digest, 1)) == (True, True)
    role.close()
