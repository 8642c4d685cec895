"""A request's explanation in sentences, for `hybridkv explain`, `hybridkv top` and the page."""

from collections.abc import Mapping

from hybridkv.core.sizes import format_size
from hybridkv.wire.messages import Decline, Explained, RequestExplanation
from hybridkv.wire.status import Outcome

DECLINES: Mapping[Decline, str] = {
    Decline.UNHASHABLE: "requests with prompt embeddings are not served: the engine's hashes do "
    "not name them",
    Decline.ADAPTER: "the LoRA adapter's weights are not known for sure",
    Decline.LATE_ADAPTER: "the LoRA adapter's files were not read in time",
    Decline.TOO_SHORT: "the prompt has no whole chunk before its last token",
    Decline.UNWANTED: "the request asked not to use cached prefixes",
    Decline.NO_DAEMON: "no daemon was connected",
    Decline.BREAKER_OPEN: "the daemon did not answer other requests in time and is left alone "
    "for a moment",
    Decline.LATE_ANSWER: "the daemon's answer was late (lookup_timeout_ms)",
    Decline.LATE_WORKERS: "the workers were not attached to the daemon yet",
    Decline.LATE_ROOM: "other loads left no room in the engine's block pool",
    Decline.LOST: "the connection to the daemon was lost meanwhile",
    Decline.IDENTITY: "the engine's weights changed meanwhile",
    Decline.LOAD_FAILED: "the load failed, and the request was computed",
    Decline.PLAN_FAILED: "the load could not be planned",
}
"""Each reason in words."""


def outcome_of(told: RequestExplanation) -> tuple[Outcome, str]:
    """The outcome, and what was loaded or why nothing was."""
    if told.loaded_tokens:
        return Outcome.LOADED, f"{told.loaded_tokens} tokens, {format_size(told.loaded_bytes)}"
    if told.declined is not None:
        return Outcome.COMPUTED, told.detail or DECLINES[told.declined]
    if told.hit_chunks is not None:
        return Outcome.COMPUTED, "the engine's own cache reached as far, or nothing was found"
    return Outcome.COMPUTED, "nothing was said"


def limit_of(told: RequestExplanation) -> str:
    """Why the hit was not longer; empty where it could not be."""
    return ", ".join(
        f"group {group.gid} ({group.kind}) lacks chunk {group.lacks}"
        for group in told.groups
        if group.lacks is not None
    )


def sentences_of(told: RequestExplanation) -> dict[str, str]:
    """Sentences by name, in the order in which things happened."""
    facts = {"prompt": f"{told.prompt_tokens} tokens"}
    if told.asked_chunks:
        facts["looked up"] = f"{told.asked_chunks} chunks of {told.chunk_tokens} tokens"
    if told.hit_chunks is not None:
        present = ", ".join(
            f"group {group.gid} ({group.kind}) {group.objects} of {told.looked_chunks}"
            for group in told.groups
        )
        facts["found"] = f"a hit of {told.hit_chunks} chunks; objects there: {present}"
    if told.tiers:
        given = (f"{count} chunks from {name}" for name, count in told.tiers.items())
        facts["came up"] = ", ".join(given)
    if told.not_read:
        facts["not read from below RAM because"] = told.not_read
    if limit := limit_of(told):
        facts["not more because"] = limit
    if told.local_tokens is not None:
        facts["engine's own cache"] = f"{told.local_tokens} tokens"
    outcome, text = outcome_of(told)
    if outcome is Outcome.LOADED:
        facts["loaded"] = text
    elif told.declined is not None or told.hit_chunks is not None:
        facts["nothing loaded because"] = text
    return facts | {"stored": f"{told.stored_objects} objects"}


def sentences_of_reply(told: Explained) -> dict[str, str]:
    """As `sentences_of`, with the identity and where else the prefix is; empty if not known."""
    if told.explanation is None:
        return {}
    facts = sentences_of(told.explanation) | {"identity": told.identity.hex()}
    for other in told.others:
        differences = "; ".join(
            f"{one.name}: {one.here} here, {one.there} there" for one in other.differences
        )
        facts[f"also under {other.identity.hex()[:12]}"] = (
            differences or "in what they differ was not told"
        )
    return facts
