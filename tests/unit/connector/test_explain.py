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
from hybridkv.core.keys import HASH_BYTES
from hybridkv.observe.status import DECLINES, outcome_of, sentences_of
from hybridkv.wire.messages import Decline, Found, GroupPresence, RequestExplanation
from hybridkv.wire.status import Outcome
from tests.layouts import LAYOUTS

GEMMA3 = LAYOUTS["gemma3"]
ASKED = bytes(4 * HASH_BYTES)


def asked_for(why: tuple[str, str]) -> TrackedRequest:
    """A request of 600 tokens that ended without a lookup."""
    return TrackedRequest(SimpleNamespace(num_prompt_tokens=600), why=why)


def test_each_group_is_told_of_and_the_one_that_lacks_something_is_named() -> None:
    """A29: no group speaks for the others; B35, B36: a disagreement is the least of them."""
    masks = [b"\1\1\1\1", b"\1\1\1\0", b"\1\1\1\1"]
    found = Found(1, 1, 3, masks, b"", b"", {"disk": 2}, "")
    tracked = asked_for(("", ""))
    tracked.lookup = RequestLookup(ASKED, answer=found)
    tracked.local_seen, tracked.load, tracked.stored = 128, RequestLoad(total=(256, 4096)), 2
    told = explain_request(GEMMA3, tracked)
    assert told.groups == [
        GroupPresence(group.gid, group.kind, objects, lacks)
        for group, objects, lacks in zip(GEMMA3.groups, (4, 3, 4), (None, 3, None), strict=True)
    ]
    facts = sentences_of(told)
    assert facts["found"] == (
        "a hit of 3 chunks; objects there: group 0 (sliding) 4 of 4, group 1 (sliding) 3 of 4, "
        "group 2 (full) 4 of 4"
    )
    assert facts["not more because"] == "group 1 (sliding) lacks chunk 3"
    assert facts["came up"] == "2 chunks from disk"
    assert facts["loaded"] == "256 tokens, 4KiB"
    assert facts["stored"] == "2 objects"
    assert outcome_of(told) == (Outcome.LOADED, "256 tokens, 4KiB")


def test_what_came_of_an_audit_is_told() -> None:
    tracked = asked_for(("", ""))
    found = Found(1, 1, 1, [b"\1", b"\1", b"\1"], b"", b"")
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
    told = explain_request(GEMMA3, asked_for(("lookups_no_daemon", "")))
    assert told.declined is Decline.NO_DAEMON
    facts = sentences_of(told)
    assert facts["nothing loaded because"] == "no daemon was connected"
    assert "found" not in facts


def test_a_detail_says_more_than_its_reason() -> None:
    told = explain_request(GEMMA3, asked_for(("plan_failed", "a block is missing")))
    assert outcome_of(told) == (Outcome.FAILED, "a block is missing")


@pytest.mark.parametrize(
    ("told", "word"),
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
def test_each_outcome_is_one_word(told: RequestExplanation, word: Outcome) -> None:
    """What computed a prompt is told apart: a cold miss, a local hit, a fault."""
    assert outcome_of(told)[0] is word


def test_every_reason_has_words() -> None:
    assert set(DECLINES) == set(Decline)
