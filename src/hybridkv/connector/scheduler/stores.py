"""Stores: which objects a step completes, which slots they go to, and what is committed.

Nothing is sent from here: messages to the daemon are returned.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, starmap
from typing import Any, NamedTuple

from hybridkv.client.credits import SlotCredits
from hybridkv.connector.messages import StepReport
from hybridkv.connector.scheduler.requests import TrackedRequest
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
    """Places in the run of objects that some rank did not write, or that must not be committed."""


class StoredObjects(NamedTuple):
    """Objects of one request and group that are committed."""

    tracked: TrackedRequest
    group_index: int
    chunks: Sequence[int]


class StorePlanner:
    """Every store of one engine, from the step that completes an object to its commit."""

    def __init__(
        self, geometry: Geometry, step_tokens: int, store_generated: bool, counters: Counter[str]
    ) -> None:
        """`step_tokens`: the most tokens of a step."""
        self._geometry = geometry
        self._store_generated = store_generated
        self._counters = counters
        self._attention_groups: list[int] = []
        self._recurrent_groups: dict[int, int] = {}  # The index of each recurrent group by its gid.
        # As many slots as two full steps can complete objects.
        chunks = 2 * -(-step_tokens // geometry.chunk_tokens) + 2
        slots: Counter[SlotShape] = Counter()
        for index, group in enumerate(geometry.groups):
            is_recurrent = group.kind is GroupKind.RECURRENT
            if is_recurrent:
                self._recurrent_groups[group.gid] = index
            else:
                self._attention_groups.append(index)
            for shape in slot_shapes(geometry, group):
                slots[shape] += max(4, chunks // 4) if is_recurrent else chunks
        self.credits = SlotCredits(slots)
        self._packed_indices = [pack_u64([index]) for index in range(len(geometry.groups))]
        self._block_bytes = [group.block_bytes for group in geometry.groups]
        self._parts = [geometry.parts(group) for group in geometry.groups]
        self._numbers = count(1)
        self._storing: dict[int, _StoreRun] = {}
        """By the number under which the workers report the run; no number is given twice."""
        self.committed: list[StoredObjects] = []  # The objects that the last `reported` committed.

    def lost(self) -> None:
        """The daemon is gone, and every slot with it."""
        self.credits.reset()
        self._storing.clear()

    def abort(self) -> None:
        """Objects that are being written now must not be committed."""
        for storing in self._storing.values():
            storing.unstored = frozenset(range(storing.run.objects))

    def planned(
        self,
        output: Any,
        requests: dict[str, TrackedRequest],
        tables: Callable[[str], Sequence[Sequence[int]]],
    ) -> dict[int, CopyRun]:
        """Copies of the objects that this step completes, as far as there are slots for them."""
        runs: dict[int, CopyRun] = {}
        offers: Mapping[str, Any] = {}
        if self._recurrent_groups:
            offers = output.kv_connector_block_state.boundary_state_offloads
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
            run, bad = storing.run, sorted(storing.unstored)
            good: Iterable[range] = (range(run.objects),)
            if bad:
                self._counters["stores_failed"] += len(bad)
                slots = [
                    (b"".join(column[at * U64 : (at + 1) * U64] for at in bad), U64)
                    for column in (run.offsets, run.generations)
                ]
                messages += starmap(Free, batches(CHANGES_MAX, *slots))
                good = consecutive(sorted({*range(run.objects)} - {*bad}))
            for part in good:
                messages += self._commit(storing, part.start, part.stop)
        return messages

    def _commit(self, storing: _StoreRun, start: int, stop: int) -> Iterator[Commit]:
        """For the run's objects from `start` on, before `stop`."""
        run, tracked, hashes = storing.run, storing.tracked, storing.hashes
        span, geometry = run.span, self._geometry
        chunks = range(span.first_chunk + start, span.first_chunk + stop)
        self.committed.append(StoredObjects(tracked, span.group_index, chunks))
        self._counters["objects_stored"] += stop - start
        part_bytes, parts = self._shape(span)
        self._counters["bytes_stored"] += part_bytes * parts * (stop - start)
        # Only a shorter hit needs the run's first objects, the `inner` ones: neither a hit at the
        # prompt's end does, nor one that ends a chunk before that.
        before_end = max(0, geometry.whole_chunks(tracked.request.num_prompt_tokens) - 1)
        needed = needed_chunks(geometry, geometry.groups[span.group_index], before_end)
        inner = min(run.objects, max(0, needed.start - span.first_chunk))
        interior = b"\1" * inner + bytes(run.objects - inner)
        tenant = pack_u64([tracked.tenant]) if tracked.tenant else b""
        for at in range(start, stop, CHANGES_MAX):
            end = min(stop, at + CHANGES_MAX)
            yield Commit(
                run.offsets[at * U64 : end * U64],
                run.generations[at * U64 : end * U64],
                self._packed_indices[span.group_index],
                hashes[(1 + at) * HASH_BYTES : (1 + end) * HASH_BYTES],
                0,
                hashes[at * HASH_BYTES : (1 + at) * HASH_BYTES],
                interior[at:end],
                tenant,
            )

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
        found = tracked.lookup.found
        mask = found.masks[index] if found is not None else b""
        if (index, chunk) in tracked.stored_states or any(mask[chunk : chunk + 1]):
            return
        span = ObjectSpan(index, chunk, 1, (block,))
        offsets, generations = self.credits.take(self._shape(span), 1)
        if not offsets:
            self._counters["stores_no_slot"] += 1
            return
        tracked.stored_states.add((index, chunk))
        yield CopyRun(span, offsets, generations)

    def _begin(
        self, tracked: TrackedRequest, completed: list[CopyRun]
    ) -> Iterator[tuple[int, CopyRun]]:
        """The runs with the numbers under which the workers will report them."""
        first = objects = -1
        hashes = b""
        for run in completed:
            if first != run.span.first_chunk or objects != run.objects:
                first, objects = run.span.first_chunk, run.objects
                start = max(0, first - 1)
                hashes = tracked.chunk_hashes(self._geometry, start, first + objects - start)
                hashes = hashes if first else bytes(HASH_BYTES) + hashes
            number = next(self._numbers)
            self._storing[number] = _StoreRun(run, hashes, tracked)
            tracked.stored += objects
            yield number, run

    def _shape(self, span: ObjectSpan) -> SlotShape:
        return span.count * self._block_bytes[span.group_index], self._parts[span.group_index]
