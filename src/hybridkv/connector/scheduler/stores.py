"""Stores: which objects a step completes, which slots they go to, and what is committed.

Nothing is sent from here: messages to the daemon are returned.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

from hybridkv.client.credits import SlotCredits
from hybridkv.connector.messages import StepReport
from hybridkv.connector.scheduler.tracked import TrackedRequest
from hybridkv.core.copies import NULL_BLOCK, CopyRun, ObjectSpan, storable_spans
from hybridkv.core.coverage import SlotShape, needed_chunks, slot_shapes
from hybridkv.core.geometry import Geometry, GroupKind
from hybridkv.core.keys import HASH_BYTES
from hybridkv.core.packed import U64, batches, consecutive, pack_u64
from hybridkv.wire.messages import CHANGES_MAX, Commit, Free

# A step runs this with cold caches: its cost is how much different code and data it touches.


@dataclass(slots=True)
class _StoreRun:
    """A run that workers are writing."""

    run: CopyRun
    hashes: bytes
    """The hash of the chunk before the run (zeros: there is none), then those of its chunks."""
    tracked: TrackedRequest
    ranks_done: frozenset[int] = frozenset()
    unstored: frozenset[int] = frozenset()
    """Places in the run of objects that some rank did not write."""
    aborted: bool = False


class StoredObjects(NamedTuple):
    """Objects of one request and group that are committed."""

    tracked: TrackedRequest
    group_index: int
    chunks: Sequence[int]


class StorePlanner:
    """Every store of one engine, from the step that completes an object to its commit."""

    def __init__(
        self,
        geometry: Geometry,
        tokens_per_step: int,
        store_generated: bool,
        counters: Counter[str],
    ) -> None:
        self._geometry = geometry
        self._store_generated = store_generated
        self._counters = counters
        kinds = [group.kind for group in geometry.groups]
        recurrent = GroupKind.RECURRENT
        self._attention_groups = [i for i, kind in enumerate(kinds) if kind is not recurrent]
        self._recurrent_groups = {
            geometry.groups[i].gid: i for i, kind in enumerate(kinds) if kind is recurrent
        }
        self._packed_indices = [pack_u64([index]) for index in range(len(kinds))]
        self._block_bytes = [group.block_bytes for group in geometry.groups]
        self._parts = [geometry.parts(group) for group in geometry.groups]
        self.credits = SlotCredits(_slot_targets(geometry, tokens_per_step))
        self._numbers = count(1)
        self._storing: dict[int, _StoreRun] = {}
        """By the number under which the workers report the run; no number is given twice."""
        self.committed: list[StoredObjects] = []
        """The objects that the last `reported` committed."""

    def lost(self) -> None:
        """The daemon is gone, and every slot with it."""
        self.credits.reset()
        self._storing.clear()

    def abort(self) -> None:
        """Objects that are being written now must not be committed."""
        for storing in self._storing.values():
            storing.aborted = True

    def planned(
        self,
        output: Any,
        requests: dict[str, TrackedRequest],
        tables: Callable[[str], Sequence[Sequence[int]]],
    ) -> dict[int, CopyRun]:
        """Copies of the objects that this step completes, as far as there are slots for them."""
        runs: dict[int, CopyRun] = {}
        offers = (
            output.kv_connector_block_state.boundary_state_offloads
            if self._recurrent_groups
            else {}
        )
        attention = self._attention_groups
        for request_id, scheduled in output.num_scheduled_tokens.items():
            tracked = requests.get(request_id)
            if tracked is None or not tracked.storable or not tracked.has_hashes():
                continue
            request = tracked.request
            tokens = min(request.num_computed_tokens + scheduled, request.num_tokens)
            if not self._store_generated:
                tokens = min(tokens, request.num_prompt_tokens)
            chunks = self._geometry.whole_chunks(tokens)
            completed: list[CopyRun] = []
            if attention and min(tracked.next_chunk[i] for i in attention) < chunks:
                completed += self._attention(tracked, chunks, tables(request_id))
            for gid, block, boundary in offers.get(request_id, ()):
                completed += self._state(tracked, gid, block, boundary, tokens)
            if completed:
                runs.update(self._begin(tracked, completed))
        return runs

    def reported(self, report: StepReport) -> list[Commit | Free]:
        """Messages for the slots that every rank is done with.

        Slots become objects, or are freed where a rank did not write its part.
        """
        for number, places in report.unstored.items():
            if number in self._storing:
                self._storing[number].unstored |= places
        self.committed = []
        messages: list[Commit | Free] = []
        for number, ranks in report.done.items():
            storing = self._storing.get(number)
            if storing is None:
                continue
            storing.ranks_done |= ranks
            if len(storing.ranks_done) < self._geometry.ranks:
                continue
            del self._storing[number]
            if storing.unstored or storing.aborted:
                messages += self._commit_some(storing)
            else:
                messages += self._commit(storing, 0, storing.run.objects)
        return messages

    def _commit_some(self, storing: _StoreRun) -> Iterator[Commit | Free]:
        """For a run whose objects were not all written, or must not be committed."""
        run = storing.run
        bad = range(run.objects) if storing.aborted else sorted(storing.unstored)
        self._counters["stores_failed"] += len(bad)
        slots = (_select(run.offsets, bad), U64), (_select(run.generations, bad), U64)
        for offsets, generations in batches(CHANGES_MAX, *slots):
            yield Free(offsets, generations)
        for good in consecutive(sorted({*range(run.objects)} - {*bad})):
            yield from self._commit(storing, good.start, good.stop)

    def _commit(self, storing: _StoreRun, start: int, stop: int) -> list[Commit]:
        """For the run's objects from `start` on, before `stop`."""
        run, tracked, hashes = storing.run, storing.tracked, storing.hashes
        span, objects = run.span, stop - start
        chunks = range(span.first_chunk + start, span.first_chunk + stop)
        self.committed.append(StoredObjects(tracked, span.group_index, chunks))
        self._counters["objects_stored"] += objects
        part_bytes, parts = self._shape(span)
        self._counters["bytes_stored"] += part_bytes * parts * objects
        inner = self._interior(tracked, span)
        interior = b"\1" * inner + bytes(run.objects - inner)
        group = self._packed_indices[span.group_index]
        tenant = pack_u64([tracked.tenant]) if tracked.tenant else b""
        return [
            Commit(
                run.offsets[at * U64 : end * U64],
                run.generations[at * U64 : end * U64],
                group,
                hashes[(1 + at) * HASH_BYTES : (1 + end) * HASH_BYTES],
                0,
                hashes[at * HASH_BYTES : (1 + at) * HASH_BYTES],
                interior[at:end],
                tenant,
            )
            for at in range(start, stop, CHANGES_MAX)
            for end in (min(stop, at + CHANGES_MAX),)
        ]

    def _attention(
        self, tracked: TrackedRequest, chunks: int, tables: Sequence[Sequence[int]]
    ) -> Iterator[CopyRun]:
        """Attention objects in the first `chunks` chunks that are not settled, prefix first."""
        found = tracked.lookup.found
        for index in self._attention_groups:
            first = tracked.next_chunk[index]
            if first >= chunks:
                continue
            group = self._geometry.groups[index]
            table = tables[group.gid]
            reached = min(chunks, len(table) // self._geometry.blocks_per_chunk(group))
            mask = found.masks[index] if found is not None else b""
            spans, holes = storable_spans(self._geometry, index, range(first, reached), mask, table)
            if holes:
                self._counters["stores_hole"] += holes
            for span in spans:
                offsets, generations = self.credits.take(self._shape(span), span.objects)
                taken = len(offsets) // U64
                if taken:
                    yield CopyRun(span.part(0, taken), offsets, generations)
                if taken < span.objects:
                    # The blocks are still this request's in the next step, where it goes on.
                    self._counters["stores_no_slot"] += 1
                    reached = span.first_chunk + taken
                    break
            tracked.next_chunk[index] = max(first, reached)

    def _state(
        self, tracked: TrackedRequest, gid: int, block: int, boundary: int, tokens: int
    ) -> Iterator[CopyRun]:
        """A recurrent state that the engine offers; the block id is valid in this step only."""
        index = self._recurrent_groups.get(gid)
        chunk, rest = divmod(boundary, self._geometry.chunk_tokens)
        if index is None or block == NULL_BLOCK or rest or boundary > tokens:
            self._counters["states_unaligned"] += 1
            return
        chunk -= 1
        if (index, chunk) in tracked.stored_states or _is_present(tracked, index, chunk):
            return
        span = ObjectSpan(index, chunk, 1, (block,))
        offsets, generations = self.credits.take(self._shape(span), 1)
        if not offsets:
            self._counters["stores_no_slot"] += 1
            return
        tracked.stored_states.add((index, chunk))
        yield CopyRun(span, offsets, generations)

    def _begin(self, tracked: TrackedRequest, completed: list[CopyRun]) -> dict[int, CopyRun]:
        """The runs by the numbers under which the workers will report them."""
        runs: dict[int, CopyRun] = {}
        first = objects = -1
        hashes = b""
        for run in completed:
            if first != run.span.first_chunk or objects != run.objects:
                first, objects = run.span.first_chunk, run.objects
                hashes = self._hashes(tracked, first, objects)
            number = next(self._numbers)
            self._storing[number] = _StoreRun(run, hashes, tracked)
            tracked.stored += objects
            runs[number] = run
        return runs

    def _hashes(self, tracked: TrackedRequest, first: int, count: int) -> bytes:
        """The hashes of _StoreRun."""
        if first:
            return tracked.chunk_hashes(self._geometry, first - 1, count + 1)
        return bytes(HASH_BYTES) + tracked.chunk_hashes(self._geometry, 0, count)

    def _interior(self, tracked: TrackedRequest, span: ObjectSpan) -> int:
        """How many objects at the start of a span only a shorter hit needs.

        No hit at the prompt's end needs them, nor one that ends a chunk before that.
        """
        group = self._geometry.groups[span.group_index]
        before_end = max(0, self._geometry.whole_chunks(tracked.request.num_prompt_tokens) - 1)
        needed = needed_chunks(self._geometry, group, before_end)
        return min(span.objects, max(0, needed.start - span.first_chunk))

    def _shape(self, span: ObjectSpan) -> SlotShape:
        return span.count * self._block_bytes[span.group_index], self._parts[span.group_index]


def _select(packed: bytes, places: Sequence[int]) -> bytes:
    """The integers at some places of a packed array."""
    return b"".join(packed[place * U64 : (place + 1) * U64] for place in places)


def _slot_targets(geometry: Geometry, tokens_per_step: int) -> dict[SlotShape, int]:
    """Slots to hold of each shape: as many as two full steps can complete objects."""
    chunks = 2 * -(-tokens_per_step // geometry.chunk_tokens) + 2
    targets: Counter[SlotShape] = Counter()
    for group in geometry.groups:
        wanted = max(4, chunks // 4) if group.kind is GroupKind.RECURRENT else chunks
        for shape in slot_shapes(geometry, group):
            targets[shape] += wanted
    return dict(targets)


def _is_present(tracked: TrackedRequest, index: int, chunk: int) -> bool:
    found = tracked.lookup.found
    return found is not None and chunk < len(found.masks[index]) and bool(found.masks[index][chunk])
