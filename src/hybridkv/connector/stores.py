"""Stores: which objects a step completes, which slots they go to, and what is committed when workers are done.

Decisions only: what must be sent to the daemon is returned.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hybridkv.client.credits import Credits
from hybridkv.connector.metadata import StepReport
from hybridkv.connector.tracked import Tracked
from hybridkv.core.coverage import part_bytes, part_sizes, stored_blocks
from hybridkv.core.geometry import Geometry, Kind
from hybridkv.core.plans import NULL_BLOCK, CopyOp, plan_store
from hybridkv.wire.messages import Abandon, Commit, pack_u64


@dataclass(slots=True)
class _Storing:
    """A slot that workers are writing."""

    op: CopyOp
    part_bytes: int
    chunk_hash: bytes
    ranks_done: int = 0
    spoilt: bool = False


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
        self._storing: dict[tuple[int, int], _Storing] = {}
        """By (offset, generation), which no other life of a daemon gives again."""

    def lost(self) -> None:
        """The daemon is gone, and every slot with it."""
        self.credits.reset()
        self._storing.clear()

    def spoil(self) -> None:
        """What is being written now must not be committed."""
        for storing in self._storing.values():
            storing.spoilt = True

    def planned(self, output: Any, requests: dict[str, Tracked]) -> list[CopyOp]:
        """Copies of the objects that this step completes, as far as there are slots for them."""
        ops: list[CopyOp] = []
        state = output.kv_connector_block_state
        offers = state.boundary_state_offloads if self._recurrent_groups else {}
        for request_id, scheduled in output.num_scheduled_tokens.items():
            tracked = requests.get(request_id)
            if tracked is None or not tracked.storable:
                continue
            request = tracked.request
            tokens = min(request.num_computed_tokens + scheduled, request.num_tokens)
            if not self._store_generated:
                tokens = min(tokens, request.num_prompt_tokens)
            chunks = self._geometry.whole_chunks(tokens)
            if self._attention_groups and min(tracked.next_chunk[i] for i in self._attention_groups) < chunks:
                ops += self._attention(tracked, chunks, state.get_block_ids(request_id))
            for gid, block, boundary in offers.get(request_id, ()):
                ops += self._state(tracked, gid, block, boundary, tokens)
        return ops

    def reported(self, report: StepReport) -> list[Commit | Abandon]:
        """Slots that every rank is done with become objects, or free again where a rank did not write its part."""
        messages: list[Commit | Abandon] = []
        ready: list[_Storing] = []
        spoilt: list[_Storing] = []
        for name, ranks in report.done.items():
            storing = self._storing.get(name)
            if storing is None:
                continue
            storing.ranks_done += ranks
            storing.spoilt = storing.spoilt or name in report.unstored
            if storing.ranks_done == self._geometry.ranks:
                (spoilt if storing.spoilt else ready).append(self._storing.pop(name))
        if spoilt:
            self._counters["stores_failed"] += len(spoilt)
            slots = [storing.op.slot for storing in spoilt]
            messages.append(Abandon(pack_u64([s.offset for s in slots]), pack_u64([s.generation for s in slots])))
        if ready:
            self._counters["objects_stored"] += len(ready)
            self._counters["bytes_stored"] += sum(storing.part_bytes for storing in ready) * self._geometry.ranks
            messages.append(
                Commit(
                    pack_u64([storing.op.slot.offset for storing in ready]),
                    pack_u64([storing.op.slot.generation for storing in ready]),
                    pack_u64([storing.op.group_index for storing in ready]),
                    b"".join(storing.chunk_hash for storing in ready),
                )
            )
        return messages

    def _attention(self, tracked: Tracked, chunks: int, tables: Sequence[Sequence[int]]) -> Iterator[CopyOp]:
        """Objects of attention groups in the first `chunks` chunks that are not settled yet, prefix first."""
        for index in self._attention_groups:
            group = self._geometry.groups[index]
            table = tables[group.gid]
            for chunk in range(tracked.next_chunk[index], chunks):
                size = part_bytes(self._geometry, group, chunk)
                holes = NULL_BLOCK in table[slice(*_bounds(stored_blocks(self._geometry, group, chunk)))]
                if size and not holes and not _is_present(tracked, index, chunk):
                    slot = self.credits.take(size)
                    if slot is None:
                        # The blocks are still this request's in the next step; the prefix goes first.
                        self._counters["stores_no_slot"] += 1
                        break
                    op = plan_store(self._geometry, index, chunk, table, slot)
                    if op is None:
                        self.credits.give_back(size, [slot])
                    else:
                        yield self._begin(tracked, op, size)
                elif holes:
                    self._counters["stores_hole"] += 1
                tracked.next_chunk[index] = chunk + 1

    def _state(self, tracked: Tracked, gid: int, block: int, boundary: int, tokens: int) -> Iterator[CopyOp]:
        """A recurrent state that the engine offers in this step: the block id is good for this step only."""
        index = self._recurrent_groups.get(gid)
        if index is None or block == NULL_BLOCK or boundary % self._geometry.chunk_tokens or boundary > tokens:
            self._counters["states_unaligned"] += 1
            return
        chunk = boundary // self._geometry.chunk_tokens - 1
        if (index, chunk) in tracked.offered or _is_present(tracked, index, chunk):
            return
        size = part_bytes(self._geometry, self._geometry.groups[index], chunk)
        slot = self.credits.take(size)
        if slot is None:
            self._counters["stores_no_slot"] += 1
            return
        tracked.offered.add((index, chunk))
        yield self._begin(tracked, CopyOp(slot, index, chunk, 1, 0, (block,)), size)

    def _begin(self, tracked: Tracked, op: CopyOp, size: int) -> CopyOp:
        name = (op.slot.offset, op.slot.generation)
        self._storing[name] = _Storing(op, size, tracked.chunk_hash(self._geometry, op.chunk))
        return op


def _slot_targets(geometry: Geometry, tokens_per_step: int) -> dict[int, int]:
    """Write slots to hold per part size: what two full steps can complete, of every group that has such parts."""
    chunks = 2 * -(-tokens_per_step // geometry.chunk_tokens) + 2
    targets: Counter[int] = Counter()
    for group in geometry.groups:
        for size in part_sizes(geometry, group):
            targets[size] += chunks if group.kind is not Kind.RECURRENT else max(4, chunks // 4)
    return dict(targets)


def _bounds(positions: range) -> tuple[int, int]:
    return positions.start, positions.stop


def _is_present(tracked: Tracked, index: int, chunk: int) -> bool:
    found = tracked.found
    return found is not None and chunk < len(found.masks[index]) and bool(found.masks[index][chunk])
