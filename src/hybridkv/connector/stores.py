"""Stores: which objects a step completes, which slots they go to, and what is committed when workers are done.

Decisions only: what must be sent to the daemon is returned.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

from hybridkv.client.credits import Credits
from hybridkv.connector.metadata import StepReport
from hybridkv.connector.tracked import Tracked
from hybridkv.core.coverage import SlotShape, needed_chunks, slot_shapes
from hybridkv.core.geometry import Geometry, Kind
from hybridkv.core.keys import HASH_BYTES
from hybridkv.core.packed import U64, batches, pack_u64
from hybridkv.core.plans import NULL_BLOCK, CopyRun, Span, storable_spans
from hybridkv.wire.messages import CHANGES_MAX, Abandon, Commit

# What a step does here it does with cold caches: what matters is how much of different code and data it touches.


@dataclass(slots=True)
class _Storing:
    """A run that workers are writing."""

    run: CopyRun
    names: bytes
    """The hash of the chunk before the run (zeros: there is none), then those of its chunks."""
    tracked: Tracked
    ranks_done: frozenset[int] = frozenset()
    unstored: frozenset[int] = frozenset()
    """Places in the run of objects that some rank did not write."""
    spoilt: bool = False


class Stored(NamedTuple):
    """Objects of one request and group that are committed."""

    tracked: Tracked
    group_index: int
    chunks: Sequence[int]


class Stores:
    """Every store of one engine, from the step that completes an object to its commit."""

    def __init__(self, geometry: Geometry, tokens_per_step: int, store_generated: bool, counters: Counter[str]) -> None:
        self._geometry = geometry
        self._store_generated = store_generated
        self._counters = counters
        self._attention_groups = [i for i, group in enumerate(geometry.groups) if group.kind is not Kind.RECURRENT]
        self._recurrent_groups = {
            group.gid: i for i, group in enumerate(geometry.groups) if group.kind is Kind.RECURRENT
        }
        self._packed_indices = [pack_u64([index]) for index in range(len(geometry.groups))]
        self._block_bytes = [group.block_bytes for group in geometry.groups]
        self._parts = [geometry.parts(group) for group in geometry.groups]
        self.credits = Credits(_slot_targets(geometry, tokens_per_step))
        self._numbers = count(1)
        self._storing: dict[int, _Storing] = {}
        """By the number under which the workers report it; no number is given twice."""
        self.committed: list[Stored] = []
        """By the last `reported`."""

    def lost(self) -> None:
        """The daemon is gone, and every slot with it."""
        self.credits.reset()
        self._storing.clear()

    def spoil(self) -> None:
        """What is being written now must not be committed."""
        for storing in self._storing.values():
            storing.spoilt = True

    def planned(
        self, output: Any, requests: dict[str, Tracked], tables: Callable[[str], Sequence[Sequence[int]]]
    ) -> dict[int, CopyRun]:
        """Copies of the objects that this step completes, as far as there are slots for them."""
        runs: dict[int, CopyRun] = {}
        offers = output.kv_connector_block_state.boundary_state_offloads if self._recurrent_groups else {}
        for request_id, scheduled in output.num_scheduled_tokens.items():
            tracked = requests.get(request_id)
            if tracked is None or not tracked.storable or not tracked.is_named():
                continue
            request = tracked.request
            tokens = min(request.num_computed_tokens + scheduled, request.num_tokens)
            if not self._store_generated:
                tokens = min(tokens, request.num_prompt_tokens)
            chunks = self._geometry.whole_chunks(tokens)
            completed: list[CopyRun] = []
            if self._attention_groups and min(tracked.next_chunk[i] for i in self._attention_groups) < chunks:
                completed += self._attention(tracked, chunks, tables(request_id))
            for gid, block, boundary in offers.get(request_id, ()):
                completed += self._state(tracked, gid, block, boundary, tokens)
            if completed:
                runs.update(self._begin(tracked, completed))
        return runs

    def reported(self, report: StepReport) -> list[Commit | Abandon]:
        """Slots that every rank is done with become objects, or free again where a rank did not write its part."""
        for number, places in report.unstored.items():
            if number in self._storing:
                self._storing[number].unstored |= places
        self.committed = []
        messages: list[Commit | Abandon] = []
        for number, ranks in report.done.items():
            storing = self._storing.get(number)
            if storing is None:
                continue
            storing.ranks_done |= ranks
            if len(storing.ranks_done) < self._geometry.ranks:
                continue
            del self._storing[number]
            if storing.unstored or storing.spoilt:
                messages += self._partly(storing)
            else:
                messages += self._commits(storing, 0, storing.run.objects)
        return messages

    def _partly(self, storing: _Storing) -> Iterator[Commit | Abandon]:
        """Of a run whose objects were not all written, or are not to be committed."""
        run = storing.run
        bad = range(run.objects) if storing.spoilt else sorted(storing.unstored)
        self._counters["stores_failed"] += len(bad)
        slots = (_cut(run.offsets, U64, bad), U64), (_cut(run.generations, U64, bad), U64)
        for offsets, generations in batches(CHANGES_MAX, *slots):
            yield Abandon(offsets, generations)
        good = 0
        for place in (*bad, run.objects):
            if good < place:
                yield from self._commits(storing, good, place)
            good = place + 1

    def _commits(self, storing: _Storing, start: int, stop: int) -> list[Commit]:
        """Of a run's objects from `start` on, before `stop`."""
        run, tracked, names = storing.run, storing.tracked, storing.names
        span, objects = run.span, stop - start
        chunks = range(span.first_chunk + start, span.first_chunk + stop)
        self.committed.append(Stored(tracked, span.group_index, chunks))
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
                names[(1 + at) * HASH_BYTES : (1 + end) * HASH_BYTES],
                0,
                names[at * HASH_BYTES : (1 + at) * HASH_BYTES],
                interior[at:end],
                tenant,
            )
            for at in range(start, stop, CHANGES_MAX)
            for end in (min(stop, at + CHANGES_MAX),)
        ]

    def _attention(self, tracked: Tracked, chunks: int, tables: Sequence[Sequence[int]]) -> Iterator[CopyRun]:
        """Objects of attention groups in the first `chunks` chunks that are not settled yet, prefix first."""
        for index in self._attention_groups:
            first = tracked.next_chunk[index]
            if first >= chunks:
                continue
            group = self._geometry.groups[index]
            table = tables[group.gid]
            reached = min(chunks, len(table) // self._geometry.blocks_per_chunk(group))
            mask = tracked.found.masks[index] if tracked.found is not None else b""
            spans, holes = storable_spans(self._geometry, index, range(first, reached), mask, table)
            if holes:
                self._counters["stores_hole"] += holes
            for span in spans:
                offsets, generations = self.credits.take(self._shape(span), span.objects)
                taken = len(offsets) // U64
                if taken:
                    yield CopyRun(span.head(taken), offsets, generations)
                if taken < span.objects:
                    # The blocks are still this request's in the next step; the prefix goes first.
                    self._counters["stores_no_slot"] += 1
                    reached = span.first_chunk + taken
                    break
            tracked.next_chunk[index] = max(first, reached)

    def _state(self, tracked: Tracked, gid: int, block: int, boundary: int, tokens: int) -> Iterator[CopyRun]:
        """A recurrent state that the engine offers in this step: the block id is good for this step only."""
        index = self._recurrent_groups.get(gid)
        if index is None or block == NULL_BLOCK or boundary % self._geometry.chunk_tokens or boundary > tokens:
            self._counters["states_unaligned"] += 1
            return
        chunk = boundary // self._geometry.chunk_tokens - 1
        if (index, chunk) in tracked.offered or _is_present(tracked, index, chunk):
            return
        span = Span(index, chunk, 1, (block,))
        offsets, generations = self.credits.take(self._shape(span), 1)
        if not offsets:
            self._counters["stores_no_slot"] += 1
            return
        tracked.offered.add((index, chunk))
        yield CopyRun(span, offsets, generations)

    def _begin(self, tracked: Tracked, completed: list[CopyRun]) -> dict[int, CopyRun]:
        """From now on workers write them; by the numbers under which they report them."""
        runs: dict[int, CopyRun] = {}
        first = objects = -1
        names = b""
        for run in completed:
            if first != run.span.first_chunk or objects != run.objects:
                first, objects = run.span.first_chunk, run.objects
                names = self._names(tracked, first, objects)
            number = next(self._numbers)
            self._storing[number] = _Storing(run, names, tracked)
            tracked.stored += objects
            runs[number] = run
        return runs

    def _names(self, tracked: Tracked, first: int, count: int) -> bytes:
        """See _Storing.names."""
        if first:
            return tracked.chunk_hashes(self._geometry, first - 1, count + 1)
        return bytes(HASH_BYTES) + tracked.chunk_hashes(self._geometry, 0, count)

    def _interior(self, tracked: Tracked, span: Span) -> int:
        """How many objects of a span, the first ones, no hit at the prompt's end needs, nor one a chunk before that."""
        group = self._geometry.groups[span.group_index]
        before_end = max(0, self._geometry.whole_chunks(tracked.request.num_prompt_tokens) - 1)
        needed = needed_chunks(self._geometry, group, before_end)
        return min(span.objects, max(0, needed.start - span.first_chunk))

    def _shape(self, span: Span) -> SlotShape:
        return span.count * self._block_bytes[span.group_index], self._parts[span.group_index]


def _cut(packed: bytes, size: int, places: Sequence[int]) -> bytes:
    """The items at some places of a column."""
    return b"".join(packed[place * size : (place + 1) * size] for place in places)


def _slot_targets(geometry: Geometry, tokens_per_step: int) -> dict[SlotShape, int]:
    """Write slots to hold per shape: what two full steps can complete, of every group that has such objects."""
    chunks = 2 * -(-tokens_per_step // geometry.chunk_tokens) + 2
    targets: Counter[SlotShape] = Counter()
    for group in geometry.groups:
        for shape in slot_shapes(geometry, group):
            targets[shape] += chunks if group.kind is not Kind.RECURRENT else max(4, chunks // 4)
    return dict(targets)


def _is_present(tracked: Tracked, index: int, chunk: int) -> bool:
    found = tracked.found
    return found is not None and chunk < len(found.masks[index]) and bool(found.masks[index][chunk])
