"""What is told of a request: every group's part in it, as values and in words."""

from types import SimpleNamespace

import pytest

from hybridkv.connector.scheduler.requests import (
    RequestLoad,
    RequestLookup,
    TrackedRequest,
    explain_request,
)
from hybridkv.core.audit import AuditOutcome, AuditVerdict
from hybridkv.core.hints import Hints
from hybridkv.core.keys import HASH_BYTES
from hybridkv.observe.status import DECLINES, outcome_of, sentences_of
from hybridkv.wire.messages import Decline, Found, GroupPresence, RequestExplanation
from hybridkv.wire.status import Outcome
from tests.layouts import LAYOUTS

GEMMA3 = LAYOUTS["gemma3"]
ASKED = bytes(4 * HASH_BYTES)


def request_of_600_tokens(declined: Decline | None = None, detail: str = "") -> TrackedRequest:
    """Return a request that ended without a lookup."""
    request = SimpleNamespace(num_prompt_tokens=600)
    return TrackedRequest(request, declined=declined, decline_detail=detail)


def test_each_group_is_told_of_and_the_one_that_lacks_something_is_named() -> None:
    """A29: no group speaks for the others; B35, B36: a disagreement is the least of them."""
    masks = [b"\1\1\1\1", b"\1\1\1\0", b"\1\1\1\1"]
    found = Found(1, 1, 3, masks, b"", {"disk": 2}, "")
    tracked = request_of_600_tokens()
    tracked.lookup = RequestLookup(ASKED, answer=found)
    tracked.local_seen, tracked.progress.objects = 128, 2
    tracked.load = RequestLoad(loaded_tokens=256, loaded_bytes=4096)
    tracked.hints = Hints(retain_seconds=600.0, low_priority=True, prefetch_in_seconds=1.5)
    explanation = explain_request(GEMMA3, tracked)
    assert explanation.groups == [
        GroupPresence(group.gid, group.kind, objects, lacks)
        for group, objects, lacks in zip(GEMMA3.groups, (4, 3, 4), (None, 3, None), strict=True)
    ]
    facts = sentences_of(explanation)
    assert facts["found"] == (
        "a hit of 3 chunks; objects there: group 0 (sliding) 4 of 4, group 1 (sliding) 3 of 4, "
        "group 2 (full) 4 of 4"
    )
    assert facts["not more because"] == "group 1 (sliding) lacks chunk 3"
    asked = "retain it for 600 s, low priority, prefetch it in 1.5 s"
    assert facts["asked of the cache"] == asked
    assert facts["came up"] == "2 chunks from disk"
    assert facts["loaded"] == "256 tokens, 4KiB"
    assert facts["stored"] == "2 objects"
    assert outcome_of(explanation) == (Outcome.LOADED, "256 tokens, 4KiB")


def test_what_came_of_an_audit_is_told() -> None:
    tracked = request_of_600_tokens()
    found = Found(1, 1, 1, [b"\1", b"\1", b"\1"], b"")
    tracked.lookup, tracked.local_seen = RequestLookup(bytes(HASH_BYTES), answer=found), 0
    tracked.audited = AuditVerdict(AuditOutcome.DIFFERED, "layers.3", 1.4, 0.06)
    facts = sentences_of(explain_request(GEMMA3, tracked))
    assert facts["live audit"] == (
        "differed: the engine computed something else: "
        "layer layers.3 differs by 1.4, 0.06 is allowed"
    )
    assert facts["nothing loaded because"] == "its only chunk was computed for the live audit"
    tracked.audited = AuditVerdict(AuditOutcome.PASSED)
    facts = sentences_of(explain_request(GEMMA3, tracked))
    assert facts["live audit"] == "passed: the engine computed what is stored"


def test_a_miss_says_why() -> None:
    explanation = explain_request(GEMMA3, request_of_600_tokens(Decline.NO_DAEMON))
    assert explanation.declined is Decline.NO_DAEMON
    facts = sentences_of(explanation)
    assert facts["nothing loaded because"] == "no daemon was connected"
    assert "found" not in facts


def test_a_detail_says_more_than_its_reason() -> None:
    explanation = explain_request(
        GEMMA3, request_of_600_tokens(Decline.PLAN_FAILED, "a block is missing")
    )
    assert outcome_of(explanation) == (Outcome.FAILED, "a block is missing")


@pytest.mark.parametrize(
    ("explanation", "word"),
    [
        (RequestExplanation(600, 0, 128, 4, hit_chunks=0, local_tokens=0), Outcome.MISS),
        (RequestExplanation(600, 0, 128, 4, hit_chunks=2, local_tokens=256), Outcome.LOCAL),
        (RequestExplanation(600, 0, 128, 4, hit_chunks=0, local_tokens=256), Outcome.LOCAL),
        (RequestExplanation(600, 0, 128, 4, hit_chunks=4, local_tokens=256), Outcome.UNUSED),
        (RequestExplanation(600, 0, declined=Decline.LATE_WORKERS), Outcome.DECLINED),
        (RequestExplanation(600, 0, declined=Decline.LOAD_FAILED), Outcome.FAILED),
    ],
    ids=lambda word: str(word) if isinstance(word, Outcome) else "",
)
def test_each_outcome_is_one_word(explanation: RequestExplanation, word: Outcome) -> None:
    """What computed a prompt is told apart: a cold miss, a local hit, a fault."""
    assert outcome_of(explanation)[0] is word


def test_every_reason_has_words() -> None:
    assert set(DECLINES) == set(Decline)
