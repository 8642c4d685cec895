"""The requests that the scheduler role tracks, and their states.

    PREFETCHING --allocated--> WAITING_FOR_LOAD --planned--> LOADING --loaded--> READY
         |  lookup sent on arrival; "no answer yet" = ask again               |
         +-- renewed: its chunks have other names now --> PREFETCHING         |
         +-- settled: miss, deadline passed, nothing to load --> READY        |
         +-- outrun: no answer can add a token --> OUTRUN --settled--> READY  |
         any state --failed--> BYPASS: never offered to the cache again <-----+
         finished --> DONE, but while a load waits or runs:
             --finished--> DRAINING --loaded/failed--> DONE

TRANSITIONS is the table. An event that it does not list for a state is counted and ignored.

A request's record is written here alone. The parts of the scheduler role read it, and say in a
Change what they want: `RequestRegistry.advance` writes it, and does what the event asks for.
"""

import logging
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any, NamedTuple, Protocol

from hybridkv.connector.messages import LoadPlan
from hybridkv.connector.metrics import Shed, declined, transition_ignored
from hybridkv.connector.scheduler.listeners import Listener
from hybridkv.core.audit import AuditVerdict
from hybridkv.core.coverage import lacking
from hybridkv.core.geometry import Geometry
from hybridkv.core.hints import NO_HINTS, Hints
from hybridkv.core.keys import HASH_BYTES, adapter_hashes, lookahead_hashes, pack_hashes
from hybridkv.core.metrics import Metric
from hybridkv.core.tails import tail_tokens
from hybridkv.vllm.adapters import Adapter, AdapterWeights
from hybridkv.vllm.block_room import BlockRoom
from hybridkv.vllm.hashing import ChunkHashChain, extra_keys_at
from hybridkv.vllm.media import RequestMedia
from hybridkv.vllm.prometheus import StatsCollector
from hybridkv.wire import messages as wire

logger = logging.getLogger("vllm.hybridkv")

STORY_MAX = 32  # Events of a request that are kept, the last ones.


class RequestState(StrEnum):
    """The states of a request in the connector. The drawing above has their order."""

    PREFETCHING = "prefetching"
    WAITING_FOR_LOAD = "waiting_for_load"
    LOADING = "loading"
    READY = "ready"
    BYPASS = "bypass"
    OUTRUN = "outrun"  # It runs, and its lookup's answer says later what need not be stored.
    DRAINING = "draining"
    DONE = "done"


class RequestEvent(StrEnum):
    """An event in a request's life, from the engine, the daemon or the workers."""

    SETTLED = "settled"
    """Nothing is loaded: a miss, a late answer, or nothing beyond the engine's own hit."""
    OUTRUN = "outrun"  # The engine runs it, because no answer could add to its own hit.
    ALLOCATED = "allocated"  # The engine has blocks for an external hit.
    PLANNED = "planned"  # The load plan left for the workers.
    LOADED = "loaded"
    FAILED = "failed"
    FINISHED = "finished"
    """The request ended. Its blocks are the engine's again, unless a load is in flight."""
    RESUMED = "resumed"  # The engine asks again about a request that it preempted.
    RENEWED = "renewed"  # It is looked up anew, because its chunks have other names now.


TRANSITIONS: dict[tuple[RequestState, RequestEvent], RequestState] = {
    (RequestState.PREFETCHING, RequestEvent.SETTLED): RequestState.READY,
    (RequestState.PREFETCHING, RequestEvent.RENEWED): RequestState.PREFETCHING,
    (RequestState.PREFETCHING, RequestEvent.OUTRUN): RequestState.OUTRUN,
    (RequestState.OUTRUN, RequestEvent.SETTLED): RequestState.READY,
    (RequestState.OUTRUN, RequestEvent.FINISHED): RequestState.DONE,
    (RequestState.PREFETCHING, RequestEvent.ALLOCATED): RequestState.WAITING_FOR_LOAD,
    (RequestState.PREFETCHING, RequestEvent.FAILED): RequestState.BYPASS,
    (RequestState.PREFETCHING, RequestEvent.FINISHED): RequestState.DONE,
    (RequestState.WAITING_FOR_LOAD, RequestEvent.PLANNED): RequestState.LOADING,
    (RequestState.WAITING_FOR_LOAD, RequestEvent.FAILED): RequestState.BYPASS,
    # The engine holds the request until the workers report it, whatever happens to the lease.
    (RequestState.WAITING_FOR_LOAD, RequestEvent.FINISHED): RequestState.DRAINING,
    (RequestState.DRAINING, RequestEvent.PLANNED): RequestState.DRAINING,
    (RequestState.LOADING, RequestEvent.LOADED): RequestState.READY,
    (RequestState.LOADING, RequestEvent.FAILED): RequestState.BYPASS,
    (RequestState.LOADING, RequestEvent.FINISHED): RequestState.DRAINING,
    (RequestState.DRAINING, RequestEvent.LOADED): RequestState.DONE,
    (RequestState.DRAINING, RequestEvent.FAILED): RequestState.DONE,
    (RequestState.READY, RequestEvent.RESUMED): RequestState.PREFETCHING,
    (RequestState.READY, RequestEvent.FINISHED): RequestState.DONE,
    (RequestState.BYPASS, RequestEvent.FINISHED): RequestState.DONE,
    # The engine reports blocks without a load for every request that is computed.
    (RequestState.READY, RequestEvent.SETTLED): RequestState.READY,
    (RequestState.BYPASS, RequestEvent.SETTLED): RequestState.BYPASS,
}


STATES_WITHOUT_LEASE = (RequestState.READY, RequestState.BYPASS, RequestState.DONE)
"""A request that enters one of these states releases its lease."""


def hit_chunks_max(geometry: Geometry) -> int:
    """Return the most chunks that a hit can have: the daemon looks at no more (wire.Found)."""
    return wire.BATCH_MAX // len(geometry.groups)


def longest_hit_tokens(geometry: Geometry, tokens: int, with_tails: bool) -> int:
    """Return the tokens of the longest hit that a lookup of a prompt of `tokens` can find.

    It ends before the prompt's last token, at the end of a chunk or, `with_tails`, of a match unit.
    """
    unit = geometry.hash_tokens if with_tails else geometry.chunk_tokens
    return min(tokens - 1, hit_chunks_max(geometry) * geometry.chunk_tokens) // unit * unit


class RequestLookup(NamedTuple):
    """A request's last lookup. Times are monotonic seconds."""

    hashes: bytes = b""  # The chunk hashes that were looked up; empty until a lookup was sent.
    tails: bytes = b""  # The names of tails that were looked up (core.tails).
    tails_from: int = 0  # The chunk that the first of these tails ends inside.
    adapter: AdapterWeights | None = None  # The LoRA adapter that the names are of.
    sent: bool = False
    lost: bool = False  # True once its connection was lost. It is sent once more.
    outrun: bool = False  # True once the engine did not wait: no answer could add to its own hit.
    must_wait: bool = False  # True if it waits all the same, so that objects are stored again.
    sent_at: float = 0.0
    deadline: float = 0.0
    lease: int = 0  # The lease that the answer opens; 0 = none.
    pending: wire.Pending | None = None  # The daemon's first reply where its answer takes longer.
    found: wire.Found | None = None  # The answer, as long as it is known to hold.
    answer: wire.Found | None = None  # The last answer that came, for `hybridkv explain`.

    def hit_tokens(self, geometry: Geometry) -> int:
        """Return the tokens of the hit that was found. 0 = none."""
        if self.found is None:
            return 0
        if self.found.tail:
            return tail_tokens(geometry, self.tails_from, self.found.tail - 1)
        return self.found.chunks * geometry.chunk_tokens

    def tail_found(self) -> bytes:
        """Return the name of the tail that the hit ends with. Empty = it ends with a chunk."""
        tail = self.found.tail if self.found is not None else 0
        return self.tails[(tail - 1) * HASH_BYTES : tail * HASH_BYTES] if tail else b""


class RequestLoad(NamedTuple):
    """A request's last load, and the sums of all its loads."""

    plan: LoadPlan = LoadPlan("", ())
    local_tokens: int = 0  # Tokens of the engine's own hit; the load begins after them.
    tokens: int = 0
    bytes: int = 0  # Known once it has succeeded.
    allocated_at: float = 0.0  # When the engine had blocks for the load, in monotonic seconds.
    restored: range = range(0)
    """The tokens of a load that succeeded, by their numbers. Empty once the engine asks again."""
    loaded_tokens: int = 0  # Tokens of all loads of the request that succeeded.
    loaded_bytes: int = 0  # Bytes of the same loads.


class DraftedTokens(NamedTuple):
    """How far a request's blocks hold the KV of its tokens, between two preemptions.

    Each length is the number of tokens from the request's first token on.
    """

    preemptions: int  # The engine's count of preemptions when this began.
    proven: int  # After these tokens the KV may be that of other tokens.
    storable: int = 0  # Tokens that were computed, are proven, and have hashes that are known.
    marked: int = 0  # Tokens whose whole blocks have their marks (`drafted.DraftedBlocks`).
    begun: int = 0  # Tokens whose blocks have lost the marks of what they held before.


class StoredState(NamedTuple):
    """A recurrent state whose store has begun."""

    group_index: int
    chunk: int  # The chunk at whose end the state stands.


@dataclass(eq=False, slots=True)
class StoreProgress:
    """What of a request is stored, or has begun to be."""

    next_chunk: list[int] = field(default_factory=list)
    """The first chunk whose store is not settled, by group. Recurrent groups do not use theirs."""
    states: set[StoredState] = field(default_factory=set)
    tail: int = 0  # The tokens of the last tail whose store has begun; 0 = none has.
    objects: int = 0  # Objects whose store has begun.
    shed_chunks: dict[Shed, int] = field(default_factory=dict)
    """For each reason not to store objects, the chunk up to which its counter has counted."""

    def forget(self) -> None:
        """Let everything be stored that `RequestLookup.found` does not have."""
        self.next_chunk = [0] * len(self.next_chunk)
        self.states.clear()
        self.tail = 0

    def settle(self, group_index: int, chunk: int) -> None:
        """Note that nothing of a group is left to be stored before this chunk."""
        self.next_chunk[group_index] = max(chunk, self.next_chunk[group_index])

    def note_begun(
        self, *, objects: int = 0, state: StoredState | None = None, tail: int = 0
    ) -> None:
        """Note that the store of objects, of a state or of a tail has begun."""
        self.objects += objects
        self.tail = tail or self.tail
        if state is not None:
            self.states.add(state)

    def shed(self, reason: Shed, chunk: int) -> None:
        """Note that chunks before this one are counted as not stored, for this reason."""
        self.shed_chunks[reason] = max(chunk, self.shed_chunks.get(reason, 0))


class Change(NamedTuple):
    """What is to change of a request. A part that is None stays as it is."""

    event: RequestEvent | None = None
    lookup: RequestLookup | None = None
    load: RequestLoad | None = None
    forgets_stored: bool = False
    """True if everything is to be stored again that `lookup.found` does not have."""
    drafted: DraftedTokens | None = None
    audited: AuditVerdict | None = None
    declined: wire.Decline | None = None
    """Why the request, or what it waits for, is not served. It is counted."""
    detail: str = ""  # A sentence that says more than `declined`, or nothing.
    message: wire.Request | None = None  # It is queued for the daemon once the change is written.


NO_CHANGE = Change()


@dataclass(eq=False, slots=True)
class TrackedRequest:
    """One request of the engine, and everything that the connector knows of it."""

    request: Any  # vLLM's Request, which grows as the engine generates.
    chain: ChunkHashChain | None = None  # Makes the hashes where the engine's own cannot be used.
    adapter: Adapter | None = None
    """The LoRA adapter. The request's chunks have no hashes while its weights are not known."""
    adapter_hash: bytes = b""  # The identity of the weights that the last hashes were of.
    media: RequestMedia | None = None  # None = it has no media, and gets none.
    tenant: int = 0  # The number of `core.keys.tenant_of`.
    hints: Hints = NO_HINTS  # What it asks of the cache.
    state: RequestState = RequestState.PREFETCHING
    story: deque[RequestEvent] = field(default_factory=partial(deque, (), STORY_MAX))
    """The events that led to its state, the last one last. TRANSITIONS says how."""
    lookup: RequestLookup = RequestLookup()
    load: RequestLoad = RequestLoad()
    preemptions: int = 0  # The engine's count when the request was last looked up.
    local_seen: int | None = None
    """Tokens of the engine's own hit when it last asked. None = it has not asked."""
    declined: wire.Decline | None = None
    """The reason of the last decline or failure. None = there was none."""
    decline_detail: str = ""  # A sentence that says more than the reason, or nothing.
    progress: StoreProgress = field(default_factory=StoreProgress)
    drafted: DraftedTokens | None = None  # None = it has not run, or the KV is always proven.
    audited: AuditVerdict | None = None  # The verdict of its live audit; None = there is none.

    @property
    def is_prefetching(self) -> bool:
        """True while the request waits for its lookup, or for blocks for the hit that was found."""
        return self.state is RequestState.PREFETCHING

    def has_hashes(self) -> bool:
        """Return True if the chunks have hashes.

        They lack them while the adapter is unknown, and where the content of a medium is.
        """
        if self.media is not None and not self.media.is_known():
            return False
        if self.adapter is None:
            return True
        weights = self.adapter.weights
        if weights is not None:
            self.adapter_hash = weights.content_hash
        return weights is not None

    def tail_hashes(self, names: Sequence[bytes], ends: Sequence[int]) -> bytes:
        """Return the names of tails, made of the engine's hashes of match units.

        There are HASH_BYTES for each. `ends` are the tokens before the end of each. Only for a
        request that `has_hashes`.
        """
        hashes = pack_hashes(names)
        if self.media is not None:
            hashes = self.media.cover_hashes(hashes, ends)
        return adapter_hashes(hashes, self.adapter_hash) if self.adapter_hash else hashes

    def chunk_hashes(self, geometry: Geometry, first: int, count: int) -> bytes:
        """Return the hashes of `count` chunks from `first` on, HASH_BYTES for each.

        Only for a request that `has_hashes`, and that has the tokens of these chunks and the
        tokens after them that their hashes cover.
        """
        if self.chain is not None:
            hashes = self.chain.names(first, count)
        else:
            start, stop = geometry.hash_index(first), geometry.hash_index(first + count)
            step = geometry.chunk_tokens // geometry.hash_tokens
            hashes = pack_hashes(self.request.block_hashes[start:stop:step])
        step = geometry.chunk_tokens
        ends = range((first + 1) * step, (first + count + 1) * step, step)
        if self.media is not None:
            ahead = geometry.lookahead_tokens
            covered = range(ends.start + ahead, ends.stop + ahead, step)
            hashes = self.media.cover_hashes(hashes, covered)
        if geometry.lookahead_tokens:
            tokens = self.request.all_token_ids[ends.start : ends.stop : step]
            extras = extra_keys_at(self.request, ends) if self.request.mm_features else ()
            hashes = lookahead_hashes(hashes, tokens, extras)
        return adapter_hashes(hashes, self.adapter_hash) if self.adapter_hash else hashes


class Outbox(Protocol):
    """What the daemon is told through (`session.DaemonSession`)."""

    boot: str

    @property
    def is_connected(self) -> bool: ...

    def queue_message(self, message: wire.Request, now: float) -> bool: ...


@dataclass
class RequestRegistry(Listener):
    """All requests from their arrival to their end, by id and by lease."""

    geometry: Geometry
    daemon: Outbox
    room: BlockRoom
    meter: StatsCollector
    counters: Counter[Metric]
    by_id: dict[str, TrackedRequest] = field(default_factory=dict)
    by_lease: dict[int, TrackedRequest] = field(default_factory=dict)
    last_lease: int = 0

    def advance(self, tracked: TrackedRequest, change: Change, now: float) -> None:
        """Write a change, take the request to the state after its event, and do what that asks for.

        An event that TRANSITIONS does not list for the present state is counted and ignored. The
        first of its kind is logged with the request's story.
        """
        lookup = change.lookup
        if lookup is not None:
            if lookup.lease != tracked.lookup.lease:
                self.by_lease.pop(tracked.lookup.lease, None)
                if lookup.lease:
                    self.by_lease[lookup.lease] = tracked
            tracked.lookup = lookup
        if change.load is not None:
            tracked.load = change.load
        if change.forgets_stored:
            tracked.progress.forget()
        if change.drafted is not None:
            tracked.drafted = change.drafted
        if change.audited is not None:
            tracked.audited = change.audited
        if change.declined is not None:
            self.counters[declined(change.declined)] += 1
            tracked.declined, tracked.decline_detail = change.declined, change.detail
        if change.event is not None:
            self._take_event(tracked, change.event, now, is_declined=change.declined is not None)
        if change.message is not None:
            self.daemon.queue_message(change.message, now)

    def _take_event(
        self, tracked: TrackedRequest, event: RequestEvent, now: float, is_declined: bool
    ) -> None:
        state = tracked.state
        next_state = TRANSITIONS.get((state, event))
        if next_state is None:
            metric = transition_ignored(state, event)
            self.counters[metric] += 1
            if self.counters[metric] == 1:
                story = ", ".join(tracked.story) or "nothing"
                text = "hybridkv: %s: event %s is ignored in state %s, after: %s"
                logger.warning(text, tracked.request.request_id, event, state, story)
            return
        tracked.state = next_state
        tracked.story.append(event)
        lease = tracked.lookup.lease
        if lease and (next_state in STATES_WITHOUT_LEASE or event is RequestEvent.RENEWED):
            load = tracked.load if event is RequestEvent.LOADED else RequestLoad()
            release = wire.Release(
                lease,
                load.tokens,
                load.bytes,
                event is RequestEvent.FAILED,
                # It is computed although the daemon may have a hit.
                is_declined and state is RequestState.PREFETCHING,
            )
            del self.by_lease[lease]
            tracked.lookup = tracked.lookup._replace(lease=0)
            self.daemon.queue_message(release, now)
        if next_state is RequestState.DONE:
            self.send_explanation(tracked, now)
            self.by_id.pop(tracked.request.request_id, None)
            self.room.on_running((tracked.request.request_id,))

    def on_asked(self, tracked: TrackedRequest, local_tokens: int, now: float) -> bool:
        """Note that the engine asks, and has `local_tokens` tokens itself. True = it resumes it.

        The engine asks while a request has no blocks. So it has lost all that a load restored.
        """
        tracked.local_seen = local_tokens
        if tracked.load.restored:
            tracked.load = tracked.load._replace(restored=range(0))
        preemptions = tracked.request.num_preemptions
        if preemptions > tracked.preemptions and tracked.state is RequestState.OUTRUN:
            self.advance(tracked, Change(RequestEvent.SETTLED), now)
        if preemptions > tracked.preemptions and tracked.state is RequestState.READY:
            tracked.preemptions = preemptions
            self.advance(tracked, Change(RequestEvent.RESUMED), now)
            return True
        return False

    def story(self, request_id: str) -> list[RequestEvent]:
        """Return the last events of a request that is tracked. Empty for any other."""
        tracked = self.by_id.get(request_id)
        return [*tracked.story] if tracked is not None else []

    def next_lease(self) -> int:
        """Return the number of a new lease."""
        self.last_lease += 1
        return self.last_lease

    def on_connection_lost(self, now: float) -> None:
        """Let each request that waits be looked up once more, in the time that it has left."""
        for tracked in [*self.by_id.values()]:
            lookup, event, reason = tracked.lookup._replace(lease=0), None, None
            if tracked.state is RequestState.OUTRUN:
                event = RequestEvent.SETTLED
            elif tracked.is_prefetching and lookup.lost:
                event, reason = RequestEvent.SETTLED, wire.Decline.LOST
            elif tracked.is_prefetching:
                lookup = lookup._replace(found=None, pending=None, sent=False, lost=True)
            self.advance(tracked, Change(event, lookup, declined=reason), now)

    def send_explanation(self, tracked: TrackedRequest, now: float) -> None:
        """Send the daemon the explanation of a request that ended, for `hybridkv explain`."""
        if self.daemon.is_connected:
            explanation = explain_request(self.geometry, tracked)
            self.daemon.queue_message(wire.ReportRequest(wire_name(tracked), explanation), now)


def wire_name(tracked: TrackedRequest) -> str:
    """Return the request's id as messages have it. A client may choose an id that is no UTF-8."""
    request_id = str(tracked.request.request_id).encode("utf-8", "replace").decode()
    return request_id[: wire.TEXT_MAX]


def explain_request(geometry: Geometry, tracked: TrackedRequest) -> wire.RequestExplanation:
    """Return the explanation of a request that ended, for `hybridkv explain`."""
    hashes, answer, audited = tracked.lookup.hashes, tracked.lookup.answer, tracked.audited
    asked_chunks = len(hashes) // HASH_BYTES
    found = answer or wire.Found(0, 0, 0, [], b"")
    lacks: dict[int, int] = {}
    if answer is not None and found.chunks < asked_chunks:
        missing = lacking(geometry, found.masks, found.chunks + 1)
        lacks = {group.gid: chunk for group, chunk in missing}
    return wire.RequestExplanation(
        prompt_tokens=tracked.request.num_prompt_tokens,
        stored_objects=tracked.progress.objects,
        chunk_tokens=geometry.chunk_tokens,
        asked_chunks=asked_chunks,
        first_chunk=hashes[:HASH_BYTES],
        hit_chunks=None if answer is None else found.chunks,
        looked_chunks=len(found.masks[0]) if found.masks else 0,
        groups=[
            wire.GroupPresence(group.gid, group.kind, mask.count(1), lacks.get(group.gid))
            for group, mask in zip(geometry.groups, found.masks, strict=False)
        ],
        tiers=found.tiers,
        not_read=found.why,
        local_tokens=tracked.local_seen,
        loaded_tokens=tracked.load.loaded_tokens,
        loaded_bytes=tracked.load.loaded_bytes,
        declined=tracked.declined,
        detail=tracked.decline_detail[: wire.FACT_MAX],
        audit=audited.outcome if audited is not None else None,
        audit_detail=audited.sentence[: wire.FACT_MAX] if audited is not None else "",
        junctions=[
            chunks * geometry.chunk_tokens
            for chunks in found.junctions
            if any(state.chunk == chunks - 1 for state in tracked.progress.states)
        ],
        last_chunk=hashes[-HASH_BYTES:],
        hints=tracked.hints,
    )


class BlockTable(Sequence[int]):
    """One group's block ids, read from the engine's blocks when they are needed.

    A slice keeps the blocks that the table has now. With blocks of 16 tokens a hit of 128k tokens
    has 8,192 blocks in one group. These are too many to be read in a hook.
    """

    def __init__(self, blocks: Sequence[Any]) -> None:
        self._blocks = blocks

    def __len__(self) -> int:
        return len(self._blocks)

    def __getitem__(self, at: Any) -> Any:
        return BlockTable(self._blocks[at]) if isinstance(at, slice) else self._blocks[at].block_id

    def __iter__(self) -> Iterator[int]:
        return iter([block.block_id for block in self._blocks])

    def __reduce__(self) -> tuple[type[list[int]], tuple[Sequence[int]]]:
        """Pickle the table as a list, because another process uses the ids alone."""
        return list, ([*self],)


def block_tables(blocks: Any) -> list[BlockTable]:
    """Return the table of each of the engine's groups, from vLLM's KVCacheBlocks."""
    return [*map(BlockTable, blocks.blocks)]
