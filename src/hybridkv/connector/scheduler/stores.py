"""Stores: the objects that a step completes, their slots, and their commits.

What a report ends is committed with the end of the step (`send_changes`).
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hybridkv.client.credits import SlotCredits
from hybridkv.connector.messages import StepReport
from hybridkv.connector.metrics import (
    BYTES_STORED,
    JUNCTIONS_STORED,
    OBJECTS_STORED,
    TAILS_STORED,
    Shed,
    stores_shed,
)
from hybridkv.connector.scheduler.audits import Audits
from hybridkv.connector.scheduler.context import EngineLife, SchedulerContext
from hybridkv.connector.scheduler.kv_events import KVEventPublisher, PresentObjects
from hybridkv.connector.scheduler.listeners import EngineIdentity, Listener, Step
from hybridkv.connector.scheduler.requests import (
    RequestRegistry,
    StoredState,
    TrackedRequest,
    hit_chunks_max,
)
from hybridkv.connector.scheduler.staging import StagingCredits
from hybridkv.core.copies import NULL_BLOCK, CopyRun, ObjectSpan, storable_spans
from hybridkv.core.coverage import SlotShape, slot_shapes
from hybridkv.core.eviction_classes import eviction_classes
from hybridkv.core.geometry import GroupKind
from hybridkv.core.keys import HASH_BYTES
from hybridkv.core.packed import batches, consecutive, pack_u64
from hybridkv.core.policies import EvictionClass
from hybridkv.wire.messages import CHANGES_MAX, Commit, Free

# A step runs this with cold caches: its cost is how much different code and data it touches.


@dataclass(slots=True)
class StoreRun:
    """A run that workers are writing."""

    run: CopyRun
    hashes: bytes
    """The hash of the chunk before the run (zeros: there is none), then those of its chunks. Empty
    until the commit where the token after the last chunk was not sampled yet."""
    tracked: TrackedRequest
    step: int  # The number of the step that computes the objects.
    ranks_done: frozenset[int] = frozenset()
    unstored: frozenset[int] = frozenset()
    """Places in the run of objects that some rank did not write, or that must not be committed."""
    is_lost: bool = False
    """True if the slots are gone with the daemon. The ranks still report the run."""
    adapter_hash: bytes = b""  # The identity of the LoRA adapter that the hashes are of.
    tail_tokens: int = 0
    """The tokens before the end of the tail that the run has an object of (core.tails). 0 = the run
    has whole chunks."""


class StateOffer(NamedTuple):
    """A recurrent state that the engine offers. Its block holds it in this step only."""

    gid: int
    block: int
    tokens: int  # The tokens that the state has read.


class StorePlanner(Listener):
    """All stores of one engine, each from the step that completes an object to its commit."""

    def __init__(
        self,
        context: SchedulerContext,
        life: EngineLife,
        requests: RequestRegistry,
        audits: Audits,
        events: KVEventPublisher,
    ) -> None:
        """Nothing is committed before the weights are proven and `audits` have compared it.

        `events` announce it then.
        """
        self._context = context
        self._requests = requests
        self._geometry = geometry = requests.geometry
        self._counters = requests.counters
        self._numbers = life.run_numbers
        self._weights = life.weights
        self._audits = audits
        self._events = events
        self._chunks_max = hit_chunks_max(geometry)  # No hit has chunks after so many.
        self._full_groups: list[int] = []
        self._windowed_groups: list[int] = []
        self._recurrent_groups: dict[int, int] = {}  # The index of each recurrent group by its gid.
        # As many slots as two full steps can complete objects.
        chunks = 2 * -(-context.step_tokens // geometry.chunk_tokens) + 2
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
        self.credits = SlotCredits(slots, geometry.ticket_bytes)
        self.staging = StagingCredits(geometry, context.staging_bytes)
        self._packed_indices = [pack_u64([index]) for index in range(len(geometry.groups))]
        self._block_bytes = [group.block_bytes for group in geometry.groups]
        self._parts = [geometry.parts(group) for group in geometry.groups]
        self.storing: dict[int, StoreRun] = {}
        """The runs that ranks are writing, by the number under which the workers report each."""
        self.unproven: list[StoreRun] = []
        """Runs that all ranks have reported and that must wait. It is not known which weights
        computed them, or a live audit compares an object of them."""
        self.changes: list[Commit | Free] = []  # Messages that leave with the end of the step.

    @property
    def may_commit(self) -> bool:
        """False once what the engine computes may not be shared, until that ends."""
        return not self._weights.is_stale and not self._audits.is_cut_off

    def on_step_planned(self, step: Step, now: float) -> None:
        if step.can_store and self.may_commit:
            step.plan.stores = self.plan_stores(step)

    def on_reset(self, is_empty: bool, now: float) -> None:
        """Commit what is of the weights before the reset: nothing that is being written now."""
        self.send_changes(now)
        self.withdraw_stores()

    def on_new_identity(self, identity: EngineIdentity, now: float) -> None:
        """Commit what is of the old weights, under the old name."""
        self.send_changes(now)
        self.withdraw_stores()

    def send_changes(self, now: float) -> None:
        """Send the commits of the last report, and the slots that it gave back."""
        changes, self.changes = self.changes, []
        for message in changes:
            self._requests.daemon.queue_message(message, now)

    def on_connection_lost(self, now: float) -> None:
        """Forget all slots, which are gone with the daemon."""
        self.changes.clear()
        self.credits.forget_slots()
        self.unproven.clear()
        for storing in self.storing.values():
            storing.is_lost = True

    @property
    def has_open_stores(self) -> bool:
        """True while some store is not over."""
        return bool(self.storing or self.unproven)

    def is_storing(self, tracked: TrackedRequest) -> bool:
        """Return True while some store of a request is not over."""
        return tracked in self.storing_requests()

    def storing_requests(self) -> set[TrackedRequest]:
        """Return the requests of which some store is not over."""
        return {run.tracked for run in (*self.storing.values(), *self.unproven)}

    def has_settled(self, tracked: TrackedRequest) -> bool:
        """Return True if no attention object of a request's prompt waits for a later step."""
        chunks = min(
            self._geometry.whole_chunks(tracked.request.num_prompt_tokens), self._chunks_max
        )
        indices = (*self._windowed_groups, *self._full_groups)
        return all(tracked.progress.next_chunk[index] >= chunks for index in indices)

    def tail_name(self, tracked: TrackedRequest) -> bytes:
        """Return the name of the last tail whose store has begun. Empty = none has.

        Only for a request that `has_hashes`.
        """
        tokens = tracked.progress.tail
        if not tokens:
            return b""
        name = tracked.request.block_hashes[tokens // self._geometry.hash_tokens - 1]
        return tracked.tail_hashes([name], [tokens])

    def withdraw_stores(self) -> None:
        """Let no object be committed that is being written now."""
        for storing in (*self.storing.values(), *self.unproven):
            storing.unstored = frozenset(range(storing.run.objects))

    def plan_stores(self, step: Step) -> dict[int, CopyRun]:
        """Return the copies of the objects that this step completes, by the number of the run.

        An object waits for a later step where there is no slot for it, or no room in the staging.
        The engine soon frees blocks of windows and states, so these come before full attention,
        which it keeps until the end of the request.
        """
        offers: Mapping[str, Any] = {}
        if self._recurrent_groups:
            offers = step.output.kv_connector_block_state.boundary_state_offloads
        windowed, full = self._windowed_groups, self._full_groups
        if self.staging.bytes_max is None:
            return self._plan_groups(step, [*windowed, *full], offers)
        runs = self._plan_groups(step, windowed, offers)
        return {**runs, **self._plan_groups(step, full, {})}

    def _plan_groups(
        self, step: Step, attention: list[int], offers: Mapping[str, Any]
    ) -> dict[int, CopyRun]:
        """Return the runs of these attention groups, and of the states that the engine offers."""
        runs: dict[int, CopyRun] = {}
        for request_id, scheduled in step.output.num_scheduled_tokens.items():
            tracked = self._requests.by_id.get(request_id)
            if tracked is None or not tracked.has_hashes():
                continue
            request = tracked.request
            tokens = min(request.num_computed_tokens + scheduled, request.num_tokens)
            if not self._context.stores_answers:
                tokens = min(tokens, request.num_prompt_tokens)
            state_tokens = tokens
            if tracked.drafted is not None:
                # A state needs no later token, and its name can wait for that until the commit.
                state_tokens = min(tokens, tracked.drafted.proven)
                if state_tokens < tokens:
                    self._shed(tracked, Shed.UNPROVEN, state_tokens, tokens)
                tokens = min(tokens, tracked.drafted.storable)
            if not tracked.hints.writes:
                self._shed(tracked, Shed.UNWANTED, 0, tokens)
                continue
            chunks = self._geometry.whole_chunks(tokens)
            if chunks > self._chunks_max:
                reachable_tokens = self._chunks_max * self._geometry.chunk_tokens
                self._shed(tracked, Shed.BEYOND_LOOKUP, reachable_tokens, tokens)
                chunks = self._chunks_max
            completed: list[CopyRun] = []
            if attention and min(tracked.progress.next_chunk[i] for i in attention) < chunks:
                completed += self._attention(tracked, attention, chunks, step.tables(request_id))
            states = [StateOffer(*offer) for offer in offers.get(request_id, ())]
            if self._context.with_tails and states:
                states, inside = self._separate(states)
                runs.update(self._tail(tracked, inside, step, tokens))
            held = step.tables(request_id) if states else ()
            for offer in states:
                completed += self._state(tracked, offer, state_tokens, held)
            if completed:
                runs.update(self._number_runs(tracked, completed, step))
        return runs

    def _shed(self, tracked: TrackedRequest, reason: Shed, tokens: int, stop_tokens: int) -> None:
        """Count, each once, the attention objects after `tokens` tokens that are not stored.

        They end within `stop_tokens` tokens. Objects that RAM had, or that were stored before, do
        not count.
        """
        found, progress = tracked.lookup.found, tracked.progress
        counted = progress.shed_chunks.get(reason, 0)
        start, stop = map(self._geometry.whole_chunks, (tokens, stop_tokens))
        for index in (*self._windowed_groups, *self._full_groups):
            first = max(start, counted, progress.next_chunk[index])
            mask = found.masks[index] if found is not None else b""
            self._counters[stores_shed(reason)] += max(0, stop - first) - mask.count(1, first, stop)
        progress.shed(reason, stop)

    def on_report(self, report: StepReport, now: float) -> None:
        """Commit the objects whose slots every rank is done with.

        Slots are freed where a rank did not write its part. They wait until the weights of the step
        that computed them are known.
        """
        if not self.may_commit:
            self.withdraw_stores()
        ended, self.unproven = [*self.unproven, *self._end_runs(report)], []
        committed: dict[TrackedRequest, list[PresentObjects]] = {}
        for storing in ended:
            if not self._weights.is_proven(storing.step):
                self.unproven.append(storing)
                continue
            adapter = storing.tracked.adapter
            if adapter and not adapter.has_computed(storing.adapter_hash, storing.step):
                storing.unstored = frozenset(range(storing.run.objects))
            if self._audits.must_wait(storing.run, storing.unstored):
                self.unproven.append(storing)
                continue
            storing.hashes = storing.hashes or self._hashes(storing.tracked, storing.run)
            if not storing.hashes:
                storing.unstored = frozenset(range(storing.run.objects))
            run, bad = storing.run, sorted(storing.unstored)
            good: Iterable[range] = (range(run.objects),)
            if bad:
                self._counters[stores_shed(Shed.FAILED)] += len(bad)
                size = self._geometry.ticket_bytes
                unused = b"".join([run.tickets[at * size : (at + 1) * size] for at in bad])
                self.changes += map(Free, batches(unused, CHANGES_MAX * size))
                good = consecutive(sorted({*range(run.objects)} - {*bad}))
            for part in good:
                self.changes += self._commit(storing, part.start, part.stop)
                if not storing.tail_tokens:
                    chunks = range(run.span.first_chunk, run.span.first_chunk + run.objects)
                    present = PresentObjects(run.span.group_index, chunks[part.start : part.stop])
                    committed.setdefault(storing.tracked, []).append(present)
        self._events.update(lambda events: events.on_committed(committed))

    def _end_runs(self, report: StepReport) -> Iterator[StoreRun]:
        """Yield the runs that the last rank reports now, unless their slots are gone."""
        for number, places in report.unstored.items():
            if number in self.storing:
                self.storing[number].unstored |= places
        for number, ranks in report.done.items():
            storing = self.storing.get(number)
            if storing is None:
                continue
            storing.ranks_done |= ranks
            if len(storing.ranks_done) < self._geometry.ranks:
                continue
            del self.storing[number]
            self.staging.give_back(storing.run.span)
            if not storing.is_lost:
                yield storing

    def _commit(self, storing: StoreRun, start: int, stop: int) -> Iterator[Commit]:
        """Yield the commits of the run's objects [start, stop)."""
        run, tracked, hashes = storing.run, storing.tracked, storing.hashes
        span = run.span
        self._counters[OBJECTS_STORED] += stop - start
        part_bytes, parts = self._shape(span)
        object_bytes = part_bytes * parts * self._geometry.nodes
        self._counters[BYTES_STORED] += object_bytes * (stop - start)
        classes = self._eviction_classes(storing)
        tenant = pack_u64([tracked.tenant]) if tracked.tenant else b""
        # The daemon counts the tokens of a chunk once, with the object of one group.
        counting_group = self._full_groups[0] if self._full_groups else 0
        tokens = 0
        if span.group_index == counting_group:
            chunk_tokens = self._geometry.chunk_tokens
            tokens = storing.tail_tokens % chunk_tokens if storing.tail_tokens else chunk_tokens
        size = self._geometry.ticket_bytes
        for at in range(start, stop, CHANGES_MAX):
            end = min(stop, at + CHANGES_MAX)
            yield Commit(
                slots=run.tickets[at * size : end * size],
                groups=self._packed_indices[span.group_index],
                hashes=hashes[(1 + at) * HASH_BYTES : (1 + end) * HASH_BYTES],
                tokens=tokens * (end - at),
                parents=hashes[at * HASH_BYTES : (1 + at) * HASH_BYTES],
                classes=classes[at:end],
                tenants=tenant,
            )

    def _eviction_classes(self, storing: StoreRun) -> bytes:
        """Return the EvictionClass of each object of a run, a byte each."""
        geometry, objects, span = self._geometry, storing.run.objects, storing.run.span
        tracked = storing.tracked
        if tracked.hints.low_priority:
            return bytes([EvictionClass.UNLIKELY]) * objects
        prompt_tokens = tracked.request.num_prompt_tokens
        if storing.tail_tokens:
            is_prompt = storing.tail_tokens <= prompt_tokens
            return bytes([EvictionClass.PROMPT if is_prompt else EvictionClass.GENERATED]) * objects
        answer = tracked.lookup.answer
        return eviction_classes(
            geometry,
            geometry.groups[span.group_index],
            range(span.first_chunk, span.first_chunk + objects),
            geometry.whole_chunks(prompt_tokens),
            answer.junctions if answer is not None else (),
        )

    def _attention(
        self,
        tracked: TrackedRequest,
        attention: list[int],
        chunks: int,
        tables: Sequence[Sequence[int]],
    ) -> Iterator[CopyRun]:
        """Yield the runs of attention objects in the first `chunks` chunks, prefix first.

        Objects that are settled already, by `next_chunk`, are left out.
        """
        found = tracked.lookup.found
        for index in attention:
            first = tracked.progress.next_chunk[index]
            if first >= chunks:
                continue
            group = self._geometry.groups[index]
            table = tables[group.gid]
            reached = min(chunks, len(table) // self._geometry.blocks_per_chunk(group))
            mask = found.masks[index] if found is not None else b""
            spans, holes = storable_spans(self._geometry, index, range(first, reached), mask, table)
            if holes:
                self._counters[stores_shed(Shed.HOLE)] += holes
            for span in spans:
                if self.staging.is_too_small(span):
                    self._counters[stores_shed(Shed.TOO_LARGE)] += span.objects
                    continue
                run = self._take_slots(span)
                if run.objects:
                    yield run
                if run.objects < span.objects:
                    # The blocks are still this request's in the next step, where it goes on.
                    reached = span.first_chunk + run.objects
                    break
            tracked.progress.settle(index, reached)

    def _state(
        self,
        tracked: TrackedRequest,
        offer: StateOffer,
        tokens: int,
        tables: Sequence[Sequence[int]],
    ) -> Iterator[CopyRun]:
        """Yield the run of a state that the engine offers within the first `tokens` tokens.

        vLLM may have freed an offered block in the same plan, where it schedules drafts
        asynchronously. Another request may write the block in this step then, and so may this one,
        for a later state. So the block must stand at the state's own place in `tables`, the
        request's present block tables by vLLM's group.
        """
        index = self._recurrent_groups.get(offer.gid)
        chunk, rest = divmod(offer.tokens, self._geometry.chunk_tokens)
        if index is None or offer.block == NULL_BLOCK or rest or offer.tokens > tokens:
            self._counters[stores_shed(Shed.STATE_UNALIGNED)] += 1
            return
        place = offer.tokens // self._geometry.groups[index].tokens_per_block - 1
        if [*tables[offer.gid][place : place + 1]] != [offer.block]:
            self._counters[stores_shed(Shed.STATE_FREED)] += 1
            return
        chunk -= 1
        if chunk >= self._chunks_max:
            self._counters[stores_shed(Shed.BEYOND_LOOKUP)] += 1
            return
        found = tracked.lookup.found
        mask = found.masks[index] if found is not None else b""
        state = StoredState(index, chunk)
        if state in tracked.progress.states or any(mask[chunk : chunk + 1]):
            return
        span = ObjectSpan(index, chunk, 1, (offer.block,))
        if self.staging.is_too_small(span):
            self._counters[stores_shed(Shed.TOO_LARGE)] += 1
        elif (run := self._take_slots(span)).objects:
            tracked.progress.note_begun(state=state)
            answer = tracked.lookup.answer
            is_junction = answer is not None and chunk + 1 in answer.junctions
            self._counters[JUNCTIONS_STORED] += is_junction
            yield run

    def _separate(
        self, offers: Iterable[StateOffer]
    ) -> tuple[list[StateOffer], dict[int, StateOffer]]:
        """Return the states at the ends of chunks, and by group index those inside a chunk."""
        at_ends, inside = [], {}
        for offer in offers:
            index = self._recurrent_groups.get(offer.gid)
            if index is not None and offer.tokens % self._geometry.chunk_tokens:
                inside[index] = offer
            else:
                at_ends.append(offer)
        return at_ends, inside

    def _tail(
        self, tracked: TrackedRequest, offers: Mapping[int, StateOffer], step: Step, tokens: int
    ) -> Iterator[tuple[int, CopyRun]]:
        """Yield the runs of a tail, if the engine offers its state in every recurrent group.

        vLLM offers it in the step after its end. Before that step vLLM copied the state to a block
        of its own (MambaManager.allocate_new_blocks). The attention blocks are the request's.
        `offers` are by group index.
        """
        boundaries = {offer.tokens for offer in offers.values()}
        if len(offers) != len(self._recurrent_groups) or len(boundaries) != 1:
            return
        boundary, geometry = boundaries.pop(), self._geometry
        chunk, unit = boundary // geometry.chunk_tokens, geometry.hash_tokens
        if boundary > tokens or boundary == tracked.progress.tail or boundary % unit:
            return
        if chunk >= self._chunks_max:
            self._counters[stores_shed(Shed.BEYOND_LOOKUP)] += len(geometry.groups)
            return
        name = tracked.tail_hashes([tracked.request.block_hashes[boundary // unit - 1]], [boundary])
        blocks = {index: offer.block for index, offer in offers.items()}
        present = step.tables(tracked.request.request_id)
        for index in self._full_groups:
            blocks[index] = present[geometry.groups[index].gid][chunk]
        if NULL_BLOCK in blocks.values() or name == tracked.lookup.tail_found():
            return
        before = tracked.chunk_hashes(geometry, chunk - 1, 1) if chunk else bytes(HASH_BYTES)
        tracked.progress.note_begun(tail=boundary)
        self._counters[TAILS_STORED] += 1
        for index in sorted(blocks):
            span = ObjectSpan(index, chunk, 1, (blocks[index],))
            if self.staging.is_too_small(span):
                self._counters[stores_shed(Shed.TOO_LARGE)] += 1
            elif (run := self._take_slots(span)).objects:
                number = step.plan.number
                tail = StoreRun(run, before + name, tracked, number, tail_tokens=boundary)
                yield self._number_run(tail)

    def _take_slots(self, span: ObjectSpan) -> CopyRun:
        """Return a run of the span's first objects, as many as have slots and staging room."""
        room = self.staging.room(span)
        tickets = self.credits.take_slots(self._shape(span), room)
        count = len(tickets) // self._geometry.ticket_bytes
        if count < span.objects:
            reason = Shed.NO_STAGING if count == room else Shed.NO_SLOT
            self._counters[stores_shed(reason)] += 1
        part = span.part(0, count)
        self.staging.count_span(part)
        return CopyRun(part, tickets)

    def _number_runs(
        self, tracked: TrackedRequest, completed: list[CopyRun], step: Step
    ) -> Iterator[tuple[int, CopyRun]]:
        """Yield the runs with the numbers under which the workers will report them."""
        first = objects = -1
        hashes = b""
        for run in completed:
            if first != run.span.first_chunk or objects != run.objects:
                first, objects = run.span.first_chunk, run.objects
                hashes = self._hashes(tracked, run)
            yield self._number_run(StoreRun(run, hashes, tracked, step.plan.number))

    def _hashes(self, tracked: TrackedRequest, run: CopyRun) -> bytes:
        """Return `StoreRun.hashes`. Empty while a token that the last hash covers is not known."""
        geometry, first = self._geometry, run.span.first_chunk
        start, stop = max(0, first - 1), first + run.objects
        known_tokens = tracked.request.num_tokens - geometry.lookahead_tokens
        if stop > geometry.whole_chunks(known_tokens):
            return b""
        hashes = tracked.chunk_hashes(geometry, start, stop - start)
        return hashes if first else bytes(HASH_BYTES) + hashes

    def _number_run(self, storing: StoreRun) -> tuple[int, CopyRun]:
        """Register a run that begins now. Returns its number and its copies."""
        number = next(self._numbers)
        self.storing[number] = storing
        storing.adapter_hash = storing.tracked.adapter_hash
        storing.tracked.progress.note_begun(objects=storing.run.objects)
        if not storing.tail_tokens:
            self._audits.on_store_begun(storing.tracked, number, storing.run)
        return number, storing.run

    def _shape(self, span: ObjectSpan) -> SlotShape:
        return span.count * self._block_bytes[span.group_index], self._parts[span.group_index]
