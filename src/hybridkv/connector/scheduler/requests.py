"""The requests that the scheduler role tracks, and their life inside the connector.

    PREFETCHING --allocated--> WAITING_FOR_LOAD --planned--> LOADING --loaded--> READY
         |  lookup sent on arrival; "no answer yet" = ask again               |
         +-- settled: miss, deadline passed, nothing to load --> READY        |
         any state --failed--> BYPASS: never offered to the cache again <-----+
         finished --> DONE, but while a load waits or runs:
             --finished--> DRAINING --loaded/failed--> DONE

An event that the table does not list for a state changes nothing.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from hybridkv.connector.messages import LoadPlan
from hybridkv.connector.scheduler.session import DaemonSession
from hybridkv.connector.stats import StatsCollector
from hybridkv.core.audit import AuditVerdict
from hybridkv.core.coverage import lacking
from hybridkv.core.geometry import Geometry
from hybridkv.core.keys import HASH_BYTES, adapter_hashes, lookahead_hashes, pack_hashes
from hybridkv.core.tails import tail_tokens
from hybridkv.vllm.adapters import Adapter, AdapterWeights
from hybridkv.vllm.block_room import BlockRoom
from hybridkv.vllm.hashing import ChunkHashChain, extra_keys_at
from hybridkv.wire import messages as wire


class RequestState(StrEnum):
    """Where a request stands."""

    PREFETCHING = "prefetching"
    WAITING_FOR_LOAD = "waiting_for_load"
    LOADING = "loading"
    READY = "ready"
    BYPASS = "bypass"
    DRAINING = "draining"
    DONE = "done"


class RequestEvent(StrEnum):
    """What the engine or the workers report."""

    SETTLED = "settled"  # The answer is no: a miss, too late, or nothing beyond the local hit.
    ALLOCATED = "allocated"  # The engine has blocks for an external hit.
    PLANNED = "planned"  # The load plan left for the workers.
    LOADED = "loaded"
    FAILED = "failed"
    FINISHED = "finished"
    """The request ended; its blocks are the engine's again, unless a load is in flight."""
    RESUMED = "resumed"  # The engine asks again about a request that it preempted.


TRANSITIONS: dict[tuple[RequestState, RequestEvent], RequestState] = {
    (RequestState.PREFETCHING, RequestEvent.SETTLED): RequestState.READY,
    (RequestState.PREFETCHING, RequestEvent.ALLOCATED): RequestState.WAITING_FOR_LOAD,
    (RequestState.PREFETCHING, RequestEvent.FAILED): RequestState.BYPASS,
    (RequestState.PREFETCHING, RequestEvent.FINISHED): RequestState.DONE,
    (RequestState.WAITING_FOR_LOAD, RequestEvent.PLANNED): RequestState.LOADING,
    (RequestState.WAITING_FOR_LOAD, RequestEvent.FAILED): RequestState.BYPASS,
    # The engine holds the request until the workers report it, whatever happens to the lease.
    (RequestState.WAITING_FOR_LOAD, RequestEvent.FINISHED): RequestState.DRAINING,
    (RequestState.LOADING, RequestEvent.LOADED): RequestState.READY,
    (RequestState.LOADING, RequestEvent.FAILED): RequestState.BYPASS,
    (RequestState.LOADING, RequestEvent.FINISHED): RequestState.DRAINING,
    (RequestState.DRAINING, RequestEvent.LOADED): RequestState.DONE,
    (RequestState.DRAINING, RequestEvent.FAILED): RequestState.DONE,
    (RequestState.READY, RequestEvent.RESUMED): RequestState.PREFETCHING,
    (RequestState.READY, RequestEvent.FINISHED): RequestState.DONE,
    (RequestState.BYPASS, RequestEvent.FINISHED): RequestState.DONE,
}
LEASELESS = (RequestState.READY, RequestState.BYPASS, RequestState.DONE)
"""A request that comes to one of these states lets go of its lease."""


def hit_chunks_max(geometry: Geometry) -> int:
    """The most chunks of a hit: the daemon looks at no more of a lookup (wire.Found)."""
    return wire.BATCH_MAX // len(geometry.groups)


@dataclass(eq=False, slots=True)
class RequestLookup:
    """A request's last lookup. Times are monotonic seconds."""

    hashes: bytes = b""  # The chunk hashes that were looked up; empty until a lookup was sent.
    tails: bytes = b""  # The names of tails that were looked up (core.tails),
    tails_from: int = 0  # and the chunk that the first of them ends inside.
    adapter: AdapterWeights | None = None  # The LoRA adapter that the names are of.
    sent: bool = False
    sent_at: float = 0.0
    deadline: float = 0.0
    lease: int = 0  # The lease that the answer opens; 0 = none.
    pending: wire.Pending | None = None  # The daemon's first reply where its answer takes longer.
    found: wire.Found | None = None  # The answer, until it is found out to be wrong.
    answer: wire.Found | None = None  # The last answer of all, for `hybridkv explain`.

    def hit_tokens(self, geometry: Geometry) -> int:
        """The tokens of the hit that was found; 0 = none."""
        if self.found is None:
            return 0
        if self.found.tail:
            return tail_tokens(geometry, self.tails_from, self.found.tail - 1)
        return self.found.chunks * geometry.chunk_tokens

    def tail_found(self) -> bytes:
        """The name of the tail that the hit ends with; empty = it ends with a chunk."""
        tail = self.found.tail if self.found is not None else 0
        return self.tails[(tail - 1) * HASH_BYTES : tail * HASH_BYTES] if tail else b""


@dataclass(eq=False, slots=True)
class RequestLoad:
    """A request's last load."""

    plan: LoadPlan = LoadPlan("", ())
    local_tokens: int = 0  # Tokens of the engine's own hit, behind which the load begins.
    tokens: int = 0
    allocated_at: float = 0.0  # When the engine had blocks for the load, in monotonic seconds.
    handed_over: bool = False  # Whether the workers know of the load and will report its end.
    is_overdue: bool = False  # Whether the log has said that it does not end.
    restored: tuple[int, int] = (0, 0)
    """The tokens [first, end) of a load that succeeded, until the request runs."""
    total: tuple[int, int] = (0, 0)  # (tokens, bytes) of all loads of the request that succeeded.


@dataclass(eq=False, slots=True)
class DraftedTokens:
    """How far a request's blocks hold its drafter's KV, between two preemptions. All in tokens."""

    preemptions: int  # The engine's count of them when this began.
    proven: int  # Behind this the drafter's KV is not that of the request's tokens.
    storable: int = 0  # What was computed, is proven, and has hashes that are known.
    marked: int = 0  # Up to here whole blocks have their marks (`drafted.DraftedBlocks`).
    begun: int = 0  # Up to here blocks have lost the marks of what they held before.


@dataclass(eq=False, slots=True)
class TrackedRequest:
    """One request of the engine."""

    request: Any
    chain: ChunkHashChain | None = None  # Makes the hashes where the engine's own cannot be used.
    adapter: Adapter | None = None
    """The LoRA adapter; the request's chunks have no hashes while its weights are not known."""
    adapter_hash: bytes = b""  # The identity of the weights that the last hashes were of.
    tenant: int = 0  # The number of `core.keys.tenant_of`.
    state: RequestState = RequestState.PREFETCHING
    lookup: RequestLookup = field(default_factory=RequestLookup)
    load: RequestLoad = field(default_factory=RequestLoad)
    preemptions: int = 0  # The engine's count when the request was last looked up.
    local_seen: int | None = None
    """Tokens of the engine's own hit when it last asked; None = it has not asked."""
    why: tuple[str, str] = ("", "")
    """The counter of the last decline or failure, and what is known besides."""
    next_chunk: list[int] = field(default_factory=list)
    """For each group, the first chunk whose store is not settled; unused for recurrent groups."""
    stored_states: set[tuple[int, int]] = field(default_factory=set)
    """(group index, chunk) of recurrent states whose store has begun."""
    stored_tail: int = 0  # The tokens of the tail whose store has begun last; 0 = none has.
    stored: int = 0  # Objects whose store has begun.
    shed: dict[str, int] = field(default_factory=dict)
    """By counter, the chunk before which objects that are not stored for that reason are counted.
    """
    drafted: DraftedTokens | None = None  # None = it has not run, or no drafter has layers.
    audited: AuditVerdict | None = None  # What came of its live audit; None = nothing did.

    @property
    def is_prefetching(self) -> bool:
        """Whether the request waits for its lookup, or for what the answer offers."""
        return self.state is RequestState.PREFETCHING

    def has_hashes(self) -> bool:
        """Whether the chunks have hashes now: not while its adapter is not known."""
        if self.adapter is None:
            return True
        weights = self.adapter.weights
        if weights is not None:
            self.adapter_hash = weights.identity
        return weights is not None

    def tail_hashes(self, names: Sequence[bytes]) -> bytes:
        """HASH_BYTES for each of some fine hashes of the engine; only where `has_hashes`."""
        hashes = pack_hashes(names)
        return adapter_hashes(hashes, self.adapter_hash) if self.adapter_hash else hashes

    def chunk_hashes(self, geometry: Geometry, first: int, count: int) -> bytes:
        """HASH_BYTES for each of `count` chunks from `first` on; only where `has_hashes`.

        The request has the tokens of these chunks, and those behind them that their hashes cover.
        """
        if self.chain is not None:
            hashes = self.chain.names(first, count)
        else:
            start, stop = geometry.hash_index(first), geometry.hash_index(first + count)
            step = geometry.chunk_tokens // geometry.hash_tokens
            hashes = pack_hashes(self.request.block_hashes[start:stop:step])
        if geometry.lookahead_tokens:
            step = geometry.chunk_tokens
            ends = range((first + 1) * step, (first + count + 1) * step, step)
            tokens = self.request.all_token_ids[ends.start : ends.stop : step]
            extras = extra_keys_at(self.request, ends) if self.request.mm_features else ()
            hashes = lookahead_hashes(hashes, tokens, extras)
        return adapter_hashes(hashes, self.adapter_hash) if self.adapter_hash else hashes


@dataclass
class RequestRegistry:
    """Every request from its arrival to its end, by its id and by its lease."""

    geometry: Geometry
    session: DaemonSession
    room: BlockRoom
    meter: StatsCollector
    counters: Counter[str]
    by_id: dict[str, TrackedRequest] = field(default_factory=dict)
    by_lease: dict[int, TrackedRequest] = field(default_factory=dict)
    last_lease: int = 0

    def advance(self, tracked: TrackedRequest, event: RequestEvent, now: float) -> None:
        """Take the request to its next state, if the table has one, and do what that asks for."""
        state = TRANSITIONS.get((tracked.state, event))
        if state is None:
            return
        tracked.state = state
        if state in LEASELESS:
            self.release(tracked, now)
        if state is RequestState.DONE:
            self.report(tracked, now)
            self.by_id.pop(tracked.request.request_id, None)
            self.room.ran((tracked.request.request_id,))

    def decline(self, tracked: TrackedRequest, reason: str, detail: str = "") -> None:
        """Count why a request is not served, and keep the reason and what is known besides."""
        self.counters[reason] += 1
        tracked.why = reason, detail

    def settle(self, tracked: TrackedRequest, reason: str, now: float, detail: str = "") -> None:
        """Decline a request that waits for its lookup: it is computed."""
        self.decline(tracked, reason, detail)
        self.advance(tracked, RequestEvent.SETTLED, now)

    def settle_all(self, reason: str, now: float) -> None:
        """Settle every request that waits for its lookup."""
        for tracked in [one for one in self.by_id.values() if one.is_prefetching]:
            self.settle(tracked, reason, now)

    def next_lease(self) -> int:
        """The number of a new lease."""
        self.last_lease += 1
        return self.last_lease

    def open_lease(self, tracked: TrackedRequest) -> int:
        """The number of a new lease, under which the request is found."""
        lease = tracked.lookup.lease = self.next_lease()
        self.by_lease[lease] = tracked
        return lease

    def release(
        self, tracked: TrackedRequest, now: float, loaded: tuple[int, int] | None = (0, 0)
    ) -> None:
        """End the request's lease, if any; `loaded` are (tokens, bytes), None for a failed load."""
        lease, tracked.lookup.lease = tracked.lookup.lease, 0
        if lease:
            self.by_lease.pop(lease, None)
            self.session.send(wire.Release(lease, *(loaded or (0, 0)), loaded is None), now)

    def lost(self, now: float) -> None:
        """The connection is lost, with which the daemon has ended every lease."""
        self.by_lease.clear()
        for tracked in self.by_id.values():
            tracked.lookup.lease = 0
        self.settle_all("lookups_lost", now)

    def report(self, tracked: TrackedRequest, now: float) -> None:
        """Send the daemon what became of a request that ended, for `hybridkv explain`."""
        if self.session.is_connected:
            explanation = explain_request(self.geometry, tracked)
            self.session.send(wire.ReportRequest(wire_name(tracked), explanation), now)


def wire_name(tracked: TrackedRequest) -> str:
    """The request's id as messages have it; a client may choose one that is no UTF-8."""
    request_id = str(tracked.request.request_id).encode("utf-8", "replace").decode()
    return request_id[: wire.TEXT_MAX]


def explain_request(geometry: Geometry, tracked: TrackedRequest) -> wire.RequestExplanation:
    """The explanation of a request that ended."""
    asked, answer = tracked.lookup.hashes, tracked.lookup.answer
    chunks = len(asked) // HASH_BYTES
    found = answer or wire.Found(0, 0, 0, [], b"", b"")
    whole = found.chunks - bool(found.tail)
    lacks: dict[int, int] = {}
    if answer is not None and whole < chunks:
        missing = lacking(geometry, found.masks, whole + 1)
        lacks = {group.gid: chunk for group, chunk in missing}
    declined, detail = tracked.why
    return wire.RequestExplanation(
        tracked.request.num_prompt_tokens,
        tracked.stored,
        geometry.chunk_tokens,
        chunks,
        asked[:HASH_BYTES],
        None if answer is None else whole,
        len(found.masks[0]) if found.masks else 0,
        [
            wire.GroupPresence(group.gid, group.kind, mask.count(1), lacks.get(group.gid))
            for group, mask in zip(geometry.groups, found.masks, strict=False)
        ],
        found.tiers,
        found.why,
        tracked.local_seen,
        *tracked.load.total,
        wire.Decline(declined) if declined else None,
        detail[: wire.FACT_MAX],
        tracked.audited.outcome if tracked.audited is not None else None,
        tracked.audited.sentence[: wire.FACT_MAX] if tracked.audited is not None else "",
    )


class BlockTable(Sequence[int]):
    """One group's block ids, read from the engine's blocks when they are needed.

    A slice keeps the blocks that the table has now. With blocks of 16 tokens a hit of 128k tokens
    has 8,192 of them in one group, which are too many to be read in a hook.
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
        """A pickled table is a list, because another process uses the ids alone."""
        return list, ([*self],)


def block_tables(blocks: Any) -> list[BlockTable]:
    """The table of each of the engine's groups, from its KVCacheBlocks."""
    return [*map(BlockTable, blocks.blocks)]
