"""Stores: which objects a step completes, which slots they go to, and what is committed when workers are done.

Decisions only: what must be sent to the daemon is returned.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
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


@dataclass(slots=True)
class _Storing:
    """A run that workers are writing."""

    run: CopyRun
    hashes: bytes
    shape: SlotShape
    parents: bytes
    """The hashes of the chunks before them; zeros: there is none."""
    interior: bytes
    """For each object 1 where only a hit short of the prompt's end needs it."""
    tracked: Tracked
    ranks_done: set[int] = field(default_factory=set)
    unstored: set[int] = field(default_factory=set)
    """Places in the run of objects that some rank did not write."""
    spoilt: bool = False
    chunks: Sequence[int] = ()
    """Of the objects in the run."""


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
            runs.update(self._begin(tracked, completed))
        return runs

    def reported(self, report: StepReport) -> list[Commit | Abandon]:
        """Slots that every rank is done with become objects, or free again where a rank did not write its part."""
        for number, places in report.unstored.items():
            if number in self._storing:
                self._storing[number].unstored |= places
        ready: list[_Storing] = []
        self.committed = []
        spoilt: list[CopyRun] = []
        for number, ranks in report.done.items():
            storing = self._storing.get(number)
            if storing is None:
                continue
            storing.ranks_done |= ranks
            if len(storing.ranks_done) < self._geometry.ranks:
                continue
            del self._storing[number]
            everything = range(storing.run.objects)
            bad = everything if storing.spoilt else sorted(storing.unstored)
            good = [place for place in everything if place not in bad] if bad else everything
            if bad:
                spoilt.append(_pick(storing, bad).run)
            if good:
                ready.append(_pick(storing, good) if bad else storing)
                self.committed.append(Stored(storing.tracked, storing.run.span.group_index, ready[-1].chunks))
        return [*self._abandons(spoilt), *self._commits(ready)]

    def _abandons(self, runs: list[CopyRun]) -> Iterator[Abandon]:
        if runs:
            self._counters["stores_failed"] += sum(run.objects for run in runs)
            for offsets, generations in batches(
                CHANGES_MAX,
                (b"".join(run.offsets for run in runs), U64),
                (b"".join(run.generations for run in runs), U64),
            ):
                yield Abandon(offsets, generations)

    def _commits(self, ready: list[_Storing]) -> Iterator[Commit]:
        if ready:
            runs = [storing.run for storing in ready]
            self._counters["objects_stored"] += sum(run.objects for run in runs)
            self._counters["bytes_stored"] += sum(math.prod(storing.shape) * storing.run.objects for storing in ready)
            for offsets, generations, groups, hashes, parents, interior, tenants in batches(
                CHANGES_MAX,
                (b"".join(run.offsets for run in runs), U64),
                (b"".join(run.generations for run in runs), U64),
                (b"".join(pack_u64([run.span.group_index]) * run.objects for run in runs), U64),
                (b"".join(storing.hashes for storing in ready), HASH_BYTES),
                (b"".join(storing.parents for storing in ready), HASH_BYTES),
                (b"".join(storing.interior for storing in ready), 1),
                (b"".join(pack_u64([storing.tracked.tenant]) * storing.run.objects for storing in ready), U64),
            ):
                yield Commit(offsets, generations, groups, hashes, 0, parents, interior, tenants)

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

    def _begin(self, tracked: Tracked, runs: list[CopyRun]) -> Iterator[tuple[int, CopyRun]]:
        names: dict[tuple[int, int], bytes] = {}
        for run in runs:
            span = run.span
            first = max(0, span.first_chunk - 1)
            chunks = first, span.first_chunk + run.objects - first
            if chunks not in names:
                names[chunks] = tracked.chunk_hashes(self._geometry, *chunks)
            with_parent = names[chunks] if span.first_chunk else bytes(HASH_BYTES) + names[chunks]
            number = next(self._numbers)
            self._storing[number] = _Storing(
                run,
                with_parent[HASH_BYTES:],
                self._shape(span),
                with_parent[:-HASH_BYTES],
                self._interior(tracked, span),
                tracked,
                chunks=range(span.first_chunk, span.first_chunk + run.objects),
            )
            tracked.stored += run.objects
            yield number, run

    def _interior(self, tracked: Tracked, span: Span) -> bytes:
        """For each object of a span 1 where no hit at the prompt's end needs it, nor one a chunk before that."""
        group = self._geometry.groups[span.group_index]
        end = self._geometry.whole_chunks(tracked.request.num_prompt_tokens)
        if group.kind is Kind.FULL:
            return bytes(span.objects)
        needed = needed_chunks(self._geometry, group, max(0, end - 1))
        first_needed = min(needed.start, end - 1) if needed else end - 1
        inner = min(span.objects, max(0, first_needed - span.first_chunk))
        return b"\1" * inner + bytes(span.objects - inner)

    def _shape(self, span: Span) -> SlotShape:
        group = self._geometry.groups[span.group_index]
        return span.count * group.block_bytes, self._geometry.parts(group)


def _pick(storing: _Storing, places: Sequence[int]) -> _Storing:
    """Only some objects of a run; their blocks are not needed any more."""
    run = storing.run

    def cut(packed: bytes, size: int) -> bytes:
        return b"".join(packed[place * size : (place + 1) * size] for place in places)

    picked = CopyRun(run.span, cut(run.offsets, U64), cut(run.generations, U64))
    return _Storing(
        picked,
        cut(storing.hashes, HASH_BYTES),
        storing.shape,
        cut(storing.parents, HASH_BYTES),
        cut(storing.interior, 1),
        storing.tracked,
        chunks=[storing.chunks[place] for place in places],
    )


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
