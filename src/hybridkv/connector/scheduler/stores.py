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
from hybridkv.connector.scheduler.audits import Audits
from hybridkv.connector.scheduler.requests import TrackedRequest, hit_chunks_max
from hybridkv.connector.scheduler.staging import StagingCredits
from hybridkv.core.copies import NULL_BLOCK, CopyRun, ObjectSpan, storable_spans
from hybridkv.core.coverage import SlotShape, needed_chunks, slot_shapes
from hybridkv.core.geometry import Geometry, GroupKind
from hybridkv.core.keys import HASH_BYTES
from hybridkv.core.packed import U64, batches, consecutive, pack_u64
from hybridkv.core.policies import EvictionClass
from hybridkv.wire.messages import CHANGES_MAX, Commit, Free

# A step runs this with cold caches: its cost is how much different code and data it touches.


@dataclass(slots=True)
class _StoreRun:
    """A run that workers are writing."""

    run: CopyRun
    hashes: bytes
    """The hash of the chunk before the run (zeros: there is none), then those of its chunks. Empty
    until the commit where the token behind them was not sampled yet."""
    tracked: TrackedRequest
    step: int  # The number of the step that computes them.
    ranks_done: frozenset[int] = frozenset()
    unstored: frozenset[int] = frozenset()
    """Places in the run of objects that some rank did not write, or that must not be committed."""
    is_lost: bool = False
    """Whether the slots are gone with the daemon. The ranks still report the run."""
    adapter_hash: bytes = b""  # The identity of the LoRA adapter that the hashes are of.
    tail_tokens: int = 0
    """Where the tail ends that the run has an object of (core.tails); 0 = it has whole chunks."""


Offer = tuple[int, int, int]
"""A state that the engine offers: its gid, its block, and the tokens before its boundary."""


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
        step_tokens: int,
        store_generated: bool,
        counters: Counter[str],
        staging_bytes: int | None = None,
        numbers: Iterator[int] | None = None,
        with_tails: bool = False,
    ) -> None:
        """`step_tokens`: the most tokens of a step; `staging_bytes`: see StagingCredits.

        `numbers` go on from an earlier planner. `with_tails`: what the engine offers inside a chunk
        is stored too (core.tails).
        """
        self._with_tails = with_tails
        self._geometry = geometry
        self._chunks_max = hit_chunks_max(geometry)  # Nothing behind so many can be hit.
        self._store_generated = store_generated
        self._counters = counters
        self._full_groups: list[int] = []
        self._windowed_groups: list[int] = []
        self._recurrent_groups: dict[int, int] = {}  # The index of each recurrent group by its gid.
        # As many slots as two full steps can complete objects.
        chunks = 2 * -(-step_tokens // geometry.chunk_tokens) + 2
        slots: Counter[SlotShape] = Counter()
        for index, group in enumerate(geometry.groups):
            is_recurrent = group.kind is GroupKind.RECURRENT
            if is_recurrent:
                self._recurrent_groups[group.gid] = index
            elif group.kind is GroupKind.FULL:
                self._full_groups.append(index)
            else:
                self._windowed_groups.append(index)
            for shape in slot_shapes(geometry, group):
                slots[shape] += max(4, chunks // 4) if is_recurrent else chunks
        self.credits = SlotCredits(slots)
        self._staging = StagingCredits(geometry, staging_bytes)
        self._packed_indices = [pack_u64([index]) for index in range(len(geometry.groups))]
        self._block_bytes = [group.block_bytes for group in geometry.groups]
        self._parts = [geometry.parts(group) for group in geometry.groups]
        self.numbers = numbers or count(1)
        self._step = 0  # The number of the last step that was planned.
        self._storing: dict[int, _StoreRun] = {}
        """By the number under which the workers report the run; no number is given twice."""
        self._unproven: list[_StoreRun] = []
        """Runs that all ranks have reported, of weights that may be others, or with an object that
        a live audit compares."""
        self.audits: Audits | None = None  # They compare objects before these are committed.
        self.committed: list[StoredObjects] = []  # The objects that the last `reported` committed.

    def lost(self) -> None:
        """The daemon is gone, and every slot with it."""
        self.credits.reset()
        self._unproven.clear()
        for storing in self._storing.values():
            storing.is_lost = True

    @property
    def is_awaited(self) -> bool:
        """Whether some store is not over yet."""
        return bool(self._storing or self._unproven)

    def abort(self) -> None:
        """Objects that are being written now must not be committed."""
        for storing in (*self._storing.values(), *self._unproven):
            storing.unstored = frozenset(range(storing.run.objects))

    def planned(
        self,
        output: Any,
        requests: dict[str, TrackedRequest],
        tables: Callable[[str], Sequence[Sequence[int]]],
        step: int = 0,
    ) -> dict[int, CopyRun]:
        """Copies of the objects that this step completes; `step` is the number of its plan.

        An object waits for a later step where there is no slot for it, or no room in the staging.
        What the engine lets go of soon, windows and states, comes before all that it keeps until
        the end of the request.
        """
        self._step = step
        offers: Mapping[str, Any] = {}
        if self._recurrent_groups:
            offers = output.kv_connector_block_state.boundary_state_offloads
        windowed, full = self._windowed_groups, self._full_groups
        if self._staging.bytes_max is None:
            return self._planned(output, requests, tables, [*windowed, *full], offers)
        runs = self._planned(output, requests, tables, windowed, offers)
        return {**runs, **self._planned(output, requests, tables, full, {})}

    def _planned(
        self,
        output: Any,
        requests: dict[str, TrackedRequest],
        tables: Callable[[str], Sequence[Sequence[int]]],
        attention: list[int],
        offers: Mapping[str, Any],
    ) -> dict[int, CopyRun]:
        """The runs of these attention groups, and of the states that the engine offers."""
        runs: dict[int, CopyRun] = {}
        for request_id, scheduled in output.num_scheduled_tokens.items():
            tracked = requests.get(request_id)
            if tracked is None or not tracked.has_hashes():
                continue
            request = tracked.request
            tokens = min(request.num_computed_tokens + scheduled, request.num_tokens)
            if not self._store_generated:
                tokens = min(tokens, request.num_prompt_tokens)
            state_tokens = tokens
            if tracked.drafted is not None:
                # A state needs no later token, and its name can wait for that until the commit.
                state_tokens = min(tokens, tracked.drafted.proven)
                if state_tokens < tokens:
                    self._shed(tracked, "stores_unproven", state_tokens, tokens)
                tokens = min(tokens, tracked.drafted.storable)
            chunks = self._geometry.whole_chunks(tokens)
            if chunks > self._chunks_max:
                behind = self._chunks_max * self._geometry.chunk_tokens
                self._shed(tracked, "stores_beyond_lookup", behind, tokens)
                chunks = self._chunks_max
            completed: list[CopyRun] = []
            if attention and min(tracked.next_chunk[i] for i in attention) < chunks:
                completed += self._attention(tracked, attention, chunks, tables(request_id))
            offered = offers.get(request_id, ())
            if self._with_tails and offered:
                offered, inside = self._divided(offered)
                runs.update(self._tail(tracked, inside, tables, tokens))
            for gid, block, boundary in offered:
                completed += self._state(tracked, gid, block, boundary, state_tokens)
            if completed:
                runs.update(self._begin(tracked, completed))
        return runs

    def _shed(self, tracked: TrackedRequest, counter: str, tokens: int, stop_tokens: int) -> None:
        """Count, each once, the attention objects behind `tokens` tokens that are not stored.

        They end within `stop_tokens`. Those that RAM had, or that were stored before, are none.
        """
        found, counted = tracked.lookup.found, tracked.shed.get(counter, 0)
        start, stop = map(self._geometry.whole_chunks, (tokens, stop_tokens))
        for index in (*self._windowed_groups, *self._full_groups):
            first = max(start, counted, tracked.next_chunk[index])
            mask = found.masks[index] if found is not None else b""
            self._counters[counter] += max(0, stop - first) - mask.count(1, first, stop)
        tracked.shed[counter] = max(counted, stop)

    def reported(self, report: StepReport, is_proven: Callable[[int], bool]) -> list[Commit | Free]:
        """Messages for the slots that every rank is done with.

        Slots become objects, or are freed where a rank did not write its part. They wait until it
        `is_proven` of the step that computed them which weights did (`WeightsWatch.is_proven`).
        """
        over, self._unproven = [*self._unproven, *self._over(report)], []
        self.committed = []
        messages: list[Commit | Free] = []
        for storing in over:
            if not is_proven(storing.step):
                self._unproven.append(storing)
                continue
            adapter = storing.tracked.adapter
            if adapter and not adapter.has_computed(storing.adapter_hash, storing.step):
                storing.unstored = frozenset(range(storing.run.objects))
            if self.audits is not None and self.audits.must_wait(storing.run, storing.unstored):
                self._unproven.append(storing)
                continue
            storing.hashes = storing.hashes or self._hashes(storing.tracked, storing.run)
            if not storing.hashes:
                storing.unstored = frozenset(range(storing.run.objects))
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

    def _over(self, report: StepReport) -> Iterator[_StoreRun]:
        """The runs that the last rank reports now, unless the daemon is gone with their slots."""
        for number, places in report.unstored.items():
            if number in self._storing:
                self._storing[number].unstored |= places
        for number, ranks in report.done.items():
            storing = self._storing.get(number)
            if storing is None:
                continue
            storing.ranks_done |= ranks
            if len(storing.ranks_done) < self._geometry.ranks:
                continue
            del self._storing[number]
            self._staging.give_back(storing.run.span)
            if not storing.is_lost:
                yield storing

    def _commit(self, storing: _StoreRun, start: int, stop: int) -> Iterator[Commit]:
        """For the run's objects from `start` on, before `stop`."""
        run, tracked, hashes = storing.run, storing.tracked, storing.hashes
        span, geometry = run.span, self._geometry
        chunks = range(span.first_chunk + start, span.first_chunk + stop)
        if not storing.tail_tokens:
            self.committed.append(StoredObjects(tracked, span.group_index, chunks))
        self._counters["objects_stored"] += stop - start
        part_bytes, parts = self._shape(span)
        self._counters["bytes_stored"] += part_bytes * parts * (stop - start)
        # Only a shorter hit needs the run's first objects, the `inner` ones: neither a hit at the
        # prompt's end does, nor one that ends a chunk before that.
        prompt_tokens = tracked.request.num_prompt_tokens
        prompt_chunks = geometry.whole_chunks(prompt_tokens)
        before_end = max(0, prompt_chunks - 1)
        needed = needed_chunks(geometry, geometry.groups[span.group_index], before_end)
        inner = min(run.objects, max(0, needed.start - span.first_chunk))
        asked = min(run.objects, max(inner, prompt_chunks - span.first_chunk))
        if storing.tail_tokens:
            asked = run.objects if storing.tail_tokens <= prompt_tokens else 0
        classes = (
            bytes([EvictionClass.INTERIOR]) * inner
            + bytes([EvictionClass.PROMPT]) * (asked - inner)
            + bytes([EvictionClass.GENERATED]) * (run.objects - asked)
        )
        tenant = pack_u64([tracked.tenant]) if tracked.tenant else b""
        counted = self._full_groups[0] if self._full_groups else 0
        tokens = geometry.chunk_tokens
        if storing.tail_tokens:
            tokens = storing.tail_tokens % tokens
        if span.group_index != counted:
            tokens = 0
        for at in range(start, stop, CHANGES_MAX):
            end = min(stop, at + CHANGES_MAX)
            yield Commit(
                run.offsets[at * U64 : end * U64],
                run.generations[at * U64 : end * U64],
                self._packed_indices[span.group_index],
                hashes[(1 + at) * HASH_BYTES : (1 + end) * HASH_BYTES],
                tokens * (end - at),
                hashes[at * HASH_BYTES : (1 + at) * HASH_BYTES],
                classes[at:end],
                tenant,
            )

    def _attention(
        self,
        tracked: TrackedRequest,
        attention: list[int],
        chunks: int,
        tables: Sequence[Sequence[int]],
    ) -> Iterator[CopyRun]:
        """Attention objects in the first `chunks` chunks that are not settled, prefix first."""
        found = tracked.lookup.found
        for index in attention:
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
                if self._staging.is_too_small(span):
                    self._counters["stores_too_large"] += span.objects
                    continue
                run = self._begun(span)
                if run.objects:
                    yield run
                if run.objects < span.objects:
                    # The blocks are still this request's in the next step, where it goes on.
                    reached = span.first_chunk + run.objects
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
        if chunk >= self._chunks_max:
            self._counters["stores_beyond_lookup"] += 1
            return
        found = tracked.lookup.found
        mask = found.masks[index] if found is not None else b""
        if (index, chunk) in tracked.stored_states or any(mask[chunk : chunk + 1]):
            return
        span = ObjectSpan(index, chunk, 1, (block,))
        if self._staging.is_too_small(span):
            self._counters["stores_too_large"] += 1
        elif (run := self._begun(span)).objects:
            tracked.stored_states.add((index, chunk))
            yield run

    def _divided(self, offered: Iterable[Offer]) -> tuple[list[Offer], dict[int, Offer]]:
        """The offers of states at the ends of chunks, and those inside one by group index."""
        at_ends, inside = [], {}
        for offer in offered:
            index = self._recurrent_groups.get(offer[0])
            if index is not None and offer[2] % self._geometry.chunk_tokens:
                inside[index] = offer
            else:
                at_ends.append(offer)
        return at_ends, inside

    def _tail(
        self,
        tracked: TrackedRequest,
        offered: Mapping[int, Offer],
        tables: Callable[[str], Sequence[Sequence[int]]],
        tokens: int,
    ) -> Iterator[tuple[int, CopyRun]]:
        """The tail at which the engine offers a state of every recurrent group, by group index.

        vLLM offers it in the step behind its end, before which it copied the state to a block of
        its own (MambaManager.allocate_new_blocks). The attention blocks are the request's.
        """
        boundaries = {boundary for _, _, boundary in offered.values()}
        if len(offered) != len(self._recurrent_groups) or len(boundaries) != 1:
            return
        boundary, geometry = boundaries.pop(), self._geometry
        chunk, unit = boundary // geometry.chunk_tokens, geometry.hash_tokens
        if boundary > tokens or boundary == tracked.stored_tail or boundary % unit:
            return
        if chunk >= self._chunks_max:
            self._counters["stores_beyond_lookup"] += len(geometry.groups)
            return
        name = tracked.tail_hashes([tracked.request.block_hashes[boundary // unit - 1]])
        blocks = {index: block for index, (_, block, _) in offered.items()}
        present = tables(tracked.request.request_id)
        for index in self._full_groups:
            blocks[index] = present[geometry.groups[index].gid][chunk]
        if NULL_BLOCK in blocks.values() or name == tracked.lookup.tail_found():
            return
        before = tracked.chunk_hashes(geometry, chunk - 1, 1) if chunk else bytes(HASH_BYTES)
        tracked.stored_tail = boundary
        self._counters["tails_stored"] += 1
        for index in sorted(blocks):
            span = ObjectSpan(index, chunk, 1, (blocks[index],))
            if self._staging.is_too_small(span):
                self._counters["stores_too_large"] += 1
            elif (run := self._begun(span)).objects:
                tail = _StoreRun(run, before + name, tracked, self._step, tail_tokens=boundary)
                yield self._numbered(tail)

    def _begun(self, span: ObjectSpan) -> CopyRun:
        """The span's first objects, as many as have slots and room in the staging."""
        room = self._staging.room(span)
        offsets, generations = self.credits.take(self._shape(span), room)
        taken = len(offsets) // U64
        if taken < span.objects:
            self._counters["stores_no_staging" if taken == room else "stores_no_slot"] += 1
        part = span.part(0, taken)
        self._staging.take(part)
        return CopyRun(part, offsets, generations)

    def _begin(
        self, tracked: TrackedRequest, completed: list[CopyRun]
    ) -> Iterator[tuple[int, CopyRun]]:
        """The runs with the numbers under which the workers will report them."""
        first = objects = -1
        hashes = b""
        for run in completed:
            if first != run.span.first_chunk or objects != run.objects:
                first, objects = run.span.first_chunk, run.objects
                hashes = self._hashes(tracked, run)
            yield self._numbered(_StoreRun(run, hashes, tracked, self._step))

    def _hashes(self, tracked: TrackedRequest, run: CopyRun) -> bytes:
        """As `_StoreRun.hashes`; empty while the token that the last one covers is not known."""
        geometry, first = self._geometry, run.span.first_chunk
        start, stop = max(0, first - 1), first + run.objects
        known_tokens = tracked.request.num_tokens - geometry.lookahead_tokens
        if stop > geometry.whole_chunks(known_tokens):
            return b""
        hashes = tracked.chunk_hashes(geometry, start, stop - start)
        return hashes if first else bytes(HASH_BYTES) + hashes

    def _numbered(self, storing: _StoreRun) -> tuple[int, CopyRun]:
        """A run that begins now, with its number."""
        number = next(self.numbers)
        self._storing[number] = storing
        storing.adapter_hash = storing.tracked.adapter_hash
        storing.tracked.stored += storing.run.objects
        if self.audits is not None and not storing.tail_tokens:
            self.audits.began(storing.tracked, number, storing.run)
        return number, storing.run

    def _shape(self, span: ObjectSpan) -> SlotShape:
        return span.count * self._block_bytes[span.group_index], self._parts[span.group_index]
