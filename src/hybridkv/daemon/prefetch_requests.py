"""Requests about prefetches: by an engine, which expects a prompt, and by commands."""

from hybridkv.core.keys import HASH_BYTES
from hybridkv.daemon.sessions import ClientConnection, check_names
from hybridkv.daemon.state import DaemonState
from hybridkv.tiers.prefetches import PromptNames
from hybridkv.wire import messages as wire
from hybridkv.wire.messages import BATCH_MAX, PREFETCHED_MAX


def prefetch(state: DaemonState, connection: ClientConnection, request: wire.Prefetch) -> None:
    """Expect a prompt of the session's identity. Raises RequestError."""
    session = connection.session
    check_names(session.geometry, request.hashes, request.tails)
    hashes = request.hashes[: BATCH_MAX // len(session.geometry.groups) * HASH_BYTES]
    # No hit ends inside a chunk after those that are named.
    tails = request.tails if request.tails_from <= len(hashes) // HASH_BYTES else b""
    prompt = PromptNames(
        session.namespace, session.geometry, hashes, tails, request.tails_from if tails else 0
    )
    state.prefetches.ask(prompt, connection.number, request.in_ms, state.now)


def start(
    state: DaemonState, connection: ClientConnection, request: wire.StartPrefetch
) -> wire.Prefetching:
    """Prefetch the prompts of a request or of a family, as far as the daemon knows them."""
    recent, prompts = state.recent_prompts, list[PromptNames]()
    if request.family:
        prompts = recent.find_family(request.family, PREFETCHED_MAX)
    elif outcome := state.history.find_request(request.request_id):
        explanation = outcome.explanation
        prompts = recent.find_asked(
            outcome.identity, explanation.first_chunk, explanation.asked_chunks, PREFETCHED_MAX
        )
    prefetches = [
        state.prefetches.ask(prompt, connection.number, request.in_ms, state.now)
        for prompt in prompts
    ]
    return wire.Prefetching(request.id, prefetches, is_known=bool(prompts))


def read(state: DaemonState, _: ClientConnection, request: wire.ReadPrefetches) -> wire.Prefetching:
    """Return what became of prefetches that are known."""
    found = (state.prefetches.status_of(number, state.now) for number in request.numbers)
    return wire.Prefetching(request.id, [status for status in found if status is not None])
