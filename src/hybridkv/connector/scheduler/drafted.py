"""Which of the engine's blocks hold the KV for the tokens that name them.

The engine names a block by the tokens up to the block's end. The drafter's KV in the block may
depend on the next token as well, and is missing where vLLM did not run the drafter. Some of vLLM's
kernels give KV that depends on the batch (`vllm.batch_faults`). The engine's own prefix cache gives
such blocks to other prompts. None of these blocks may be stored::

    tokens     0                     proven                                      computed
    blocks     | own or marked blocks  | not what these tokens give                  |
    stored     | whole chunks       |  - - - never - - -

Every block has a *mark*. It is a hash of the block's name and of the next token, or of the image
there, at the time when a request computed or loaded the block. A request whose prompt begins with
blocks of the engine's cache compares their marks with its own tokens. From the first block that
differs on, nothing of the request is stored, because all later KV reads the earlier.
"""

import logging
from array import array
from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import Any

from hybridkv.connector.scheduler.context import SchedulerContext
from hybridkv.connector.scheduler.listeners import Listener, Step, Tables
from hybridkv.connector.scheduler.requests import (
    Change,
    DraftedTokens,
    RequestRegistry,
    TrackedRequest,
)
from hybridkv.core.copies import NULL_BLOCK
from hybridkv.core.geometry import Group, GroupKind
from hybridkv.vllm.batch_faults import BatchFaults
from hybridkv.vllm.drafters import NO_DRAFTER
from hybridkv.vllm.hashing import extra_keys_at

logger = logging.getLogger("vllm.hybridkv")

_MARK_BYTES = 8
_ALL = 1 << 62  # More tokens than any request has.


class DraftedBlocks(Listener):
    """The marks of one engine's blocks, and with them what may be stored of each request."""

    def __init__(self, context: SchedulerContext, requests: RequestRegistry) -> None:
        self._drafter = context.drafter or NO_DRAFTER
        self._requests = requests
        self._geometry = requests.geometry
        self._faults = context.faults
        self._groups = [
            group
            for group in self._geometry.groups
            if group.kind is not GroupKind.RECURRENT or self._faults != BatchFaults()
        ]
        """The groups whose blocks have marks. A drafter has no layers among recurrent ones."""
        self._marks = array("q", bytes(_MARK_BYTES * (context.pool_blocks + 1)))
        """A mark for each block id, in whatever group the block is now. 0 = it has no mark."""

    def on_unobserved_steps(self, now: float) -> None:
        """Delete all marks, because the engine computed steps that were not observed.

        Blocks that were proven before stay in the engine's own cache, which goes on to hit them.
        """
        if any(self._marks):
            logger.warning(
                "hybridkv: after the fault it is not known which blocks of the engine's own prefix "
                "cache hold the KV of their tokens; prompts that begin with them are not stored "
                "until they are evicted, or the cache is reset (reset_prefix_cache)"
            )
        self._marks = array("q", bytes(_MARK_BYTES * len(self._marks)))
        for tracked in self._requests.by_id.values():
            if tracked.drafted is not None:
                change = Change(drafted=tracked.drafted._replace(proven=0))
                self._requests.advance(tracked, change, now)

    def on_step_planned(self, step: Step, now: float) -> None:
        """Update the marks, and the DraftedTokens of the step's requests."""
        requests, output, tables = self._requests.by_id, step.output, step.tables
        scheduled, cached = output.num_scheduled_tokens, output.scheduled_cached_reqs
        starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        starts.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        ends = {name: start + scheduled[name] for name, start in starts.items()}
        drafter = self._drafter
        is_drafted = max(ends.values(), default=0) + drafter.drafts <= drafter.tokens_max
        # Of a request that is not tracked nobody knows whether it has an adapter.
        plain = [name for name in starts if name in requests and not requests[name].adapter]
        is_beside = self._faults.beside_adapters and 0 < len(plain) < len(starts)
        for name, start in starts.items():
            tracked = requests.get(name)
            if tracked is None:
                self._compute(None, tables(name), start, ends[name], 0)
                continue
            is_wrong = (
                self._faults.in_all_steps
                or (is_beside and not tracked.adapter)
                or (self._faults.in_sessions and tracked.request.resumable)
            )
            drafted = self._after_step(
                tracked,
                start=start,
                end=ends[name],
                is_proven=is_drafted and not is_wrong,
                tables=tables,
            )
            self._requests.advance(tracked, Change(drafted=drafted), now)

    def _after_step(
        self, tracked: TrackedRequest, start: int, end: int, is_proven: bool, tables: Tables
    ) -> DraftedTokens:
        """Return a request's DraftedTokens after a step over the tokens [start, end).

        The last of these tokens may be drafts. `is_proven`: the step gives the KV that the tokens
        have alone, the drafter's too.
        """
        request, before, table = tracked.request, tracked.drafted, None
        known = request.num_tokens
        if before is None or before.preemptions != request.num_preemptions:
            table = tables(request.request_id)
            before = self._start_tracking(tracked, start, table)
        proven, marked, begun = before.proven, before.marked, before.begun
        if not is_proven:
            # With asynchronous scheduling `start` counts drafts that may be rejected yet.
            proven = min(proven, start, known - 1)
        elif end < known and self._is_stale(request, end):
            proven = min(proven, end - 1)
        computed = min(end, known)
        storable = min(computed, known - self._drafter.lookahead_tokens, proven)
        unit = self._geometry.hash_tokens
        if storable // unit > marked // unit or computed > begun:
            table = table or tables(request.request_id)
            self._compute(request, table, marked, computed, storable)
            marked = max(marked, storable)
            begun = -(-computed // unit) * unit
        return DraftedTokens(before.preemptions, proven, storable, marked, begun)

    def _is_stale(self, request: Any, end: int) -> bool:
        """Return True if a step that ends inside a prompt takes a wrong token for the next one.

        An image that begins there may not be encoded yet. vLLM then takes the placeholder token,
        which is the same for all images.
        """
        if self._drafter.is_stale_at_ends or not self._drafter.lookahead_tokens:
            return self._drafter.is_stale_at_ends
        return any(feature.mm_position.offset == end for feature in request.mm_features)

    def _start_tracking(
        self, tracked: TrackedRequest, start: int, tables: Sequence[Sequence[int]]
    ) -> DraftedTokens:
        """Return the state of a request that runs from token `start` on.

        The tokens before `start` are the engine's own hit and the request's load.
        """
        request, proven, restored = tracked.request, _ALL, tracked.load.restored
        local = restored.start if restored.stop == start else start
        for group in self._groups:
            size = group.tokens_per_block
            marks = self._marks_of(request, group, range(local // size))
            blocks = [*tables[group.gid][: len(marks)]]
            if [*map(self._marks.__getitem__, blocks)] == marks:
                continue
            for number, (block, mark) in enumerate(zip(blocks, marks, strict=True)):
                if block != NULL_BLOCK and self._marks[block] != mark:
                    proven = min(proven, number * size)
                    break
        # A chunk's hash covers the next token, so all tokens that were loaded are proven.
        self._compute(request, tables, local, start, start)
        return DraftedTokens(request.num_preemptions, proven, marked=start, begun=start)

    def _compute(
        self, request: Any, tables: Sequence[Sequence[int]], start: int, end: int, storable: int
    ) -> None:
        """Mark the blocks of tokens [start, end) that end within `storable` tokens.

        The other blocks of these tokens lose their marks.
        """
        for group in self._groups:
            size = group.tokens_per_block
            numbers = range(start // size, -(-end // size))
            whole = range(numbers.start, max(numbers.start, storable // size))
            marks = self._marks_of(request, group, whole[: len(numbers)])
            marks += [0] * (len(numbers) - len(marks))
            blocks = tables[group.gid][numbers.start : numbers.stop]
            for block, mark in zip(blocks, marks, strict=True):
                self._marks[block] = mark

    def _marks_of(self, request: Any, group: Group, numbers: range) -> list[int]:
        """Return the marks of a request's whole blocks in a group that have these numbers."""
        if not numbers:
            return []
        size, unit = group.tokens_per_block, self._geometry.hash_tokens
        end, stop = (numbers.start + 1) * size, numbers.stop * size
        names = request.block_hashes[end // unit - 1 : stop // unit : size // unit]
        ahead: Iterable[object] = repeat(0)
        if self._drafter.lookahead_tokens:
            ahead = request.all_token_ids[end : stop + 1 : size]
            if request.mm_features:
                # All images have one token in their places.
                extras = extra_keys_at(request, range(end, stop + 1, size))
                ahead = zip(ahead, map(repr, extras), strict=False)
        return [hash(mark) or 1 for mark in zip(repeat(group.gid), names, ahead, strict=False)]
