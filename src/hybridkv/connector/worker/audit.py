"""A worker's part of live audits: it compares two slots, in a thread of its own.

Both slots are in the arena. One has a stored object. The other has the same object as the engine
computed it again, which the worker has just copied out as it copies every store. So an audit needs
nothing of a device, and proves the copies too.
"""

import logging
import re
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from vllm.v1 import kv_cache_interface as kv

from hybridkv.connector.copy.part import PartLayout
from hybridkv.connector.messages import ObjectPair
from hybridkv.connector.worker.difference import (
    BOUNDS,
    Bytes,
    Depth,
    LayerNumbers,
    NumberRange,
    bounds_of,
    compare,
    whole_verdict,
)
from hybridkv.core.audit import AuditOutcome, AuditVerdict
from hybridkv.core.copies import CopyOp
from hybridkv.core.packed import unpack_slots
from hybridkv.shm.arena import Arena
from hybridkv.vllm.blocks import block_bytes, physical

logger = logging.getLogger("vllm.hybridkv")

_FIRST_LAYER = re.compile(r"(language_model\.)?model\.layers\.0\.")
"""The first layer of the model itself: that of a drafter reads what the last one computed."""


class Auditor:
    """Compares objects for one rank.

    `layers` are the layers of each served group, in an object's order. `parts` are the rank's own
    part of an object, or that of each of its shards, which have the same layers.
    """

    def __init__(
        self,
        layers: Sequence[Sequence[LayerNumbers]],
        parts: Sequence[PartLayout],
        is_on_cpu: bool = True,
    ) -> None:
        self.layers = layers
        self.bounds = bounds_of(layers, is_on_cpu)
        self._parts = parts
        self._lock = threading.Lock()
        self._verdicts: dict[int, AuditVerdict] = {}  # Guarded by the lock.
        self._thread: threading.Thread | None = None  # The last one that was started.

    def compare_pairs(self, arena: Arena | None, pairs: Mapping[int, ObjectPair]) -> None:
        """Compare the objects. `arena` has their slots. None = it is not mapped here."""
        if arena is None:
            self._add_verdicts(dict.fromkeys(pairs, AuditVerdict(AuditOutcome.INCONCLUSIVE)))
            return
        self._thread = threading.Thread(
            target=self._compare_all, args=(arena, dict(pairs)), name="hybridkv-audit", daemon=True
        )
        self._thread.start()

    def take_verdicts(self) -> dict[int, AuditVerdict]:
        """Return the verdicts since the last call, by the numbers of the pairs."""
        with self._lock:
            verdicts, self._verdicts = self._verdicts, {}
        return verdicts

    def join(self) -> None:
        """Wait until everything that was begun is compared. For tests."""
        if self._thread is not None:
            self._thread.join()

    def _add_verdicts(self, verdicts: Mapping[int, AuditVerdict]) -> None:
        with self._lock:
            self._verdicts.update(verdicts)

    def _compare_all(self, arena: Arena, pairs: Mapping[int, ObjectPair]) -> None:
        for number, pair in pairs.items():
            verdict = AuditVerdict(AuditOutcome.INCONCLUSIVE)
            try:
                verdict = self._compare_pair(arena, pair)
            except Exception as error:  # noqa: BLE001  # no audit is no reason not to serve
                logger.warning("hybridkv: an audit could not compare: %s", error)
            self._add_verdicts({number: verdict})

    def _compare_pair(self, arena: Arena, pair: ObjectPair) -> AuditVerdict:
        """Compare this rank's parts of two objects.

        Raises BadSlotError where a slot is another object's, or has lost its bytes.
        """
        _, computed = _slot_ops(pair)
        # A part that ranks share is compared by the one that wrote it; the others pass.
        own_parts = [part for part in self._parts if part.writes(computed)]
        return whole_verdict([self._compare_part(arena, pair, part) for part in own_parts])

    def _compare_part(self, arena: Arena, pair: ObjectPair, part: PartLayout) -> AuditVerdict:
        """Compare one part of two objects. Raises BadSlotError."""
        layers = self.layers[pair.group_index]
        part_bytes = pair.count * sum(layer.block_bytes for layer in layers)
        stored, computed = _slot_ops(pair)
        stored_bytes = _proven_bytes(arena, part, stored, part_bytes)
        computed_bytes = _proven_bytes(arena, part, computed, part_bytes)
        verdict = compare(layers, self.bounds, pair.count, stored_bytes, computed_bytes)
        for op in (stored, computed):
            # Its slot may have been given away meanwhile.
            part.check_generation(arena, op)
        return verdict


def _proven_bytes(arena: Arena, part: PartLayout, op: CopyOp, part_bytes: int) -> Bytes:
    """Return the bytes of a part in the arena. Raises BadSlotError."""
    part.check_part(arena, op, part_bytes)
    offset = part.part_offset(op, part_bytes)
    return np.frombuffer(arena.memory, np.uint8, part_bytes, offset)


def _slot_ops(pair: ObjectPair) -> list[CopyOp]:
    """Return an op without blocks for each slot of a pair, by which its parts are found."""
    return [
        CopyOp(slot, pair.group_index, chunk=pair.chunk, count=pair.count, first=0, blocks=())
        for slot in unpack_slots(pair.tickets)
    ]


def layer_numbers(spec: Any, name: str, view: torch.Tensor) -> LayerNumbers:
    """Find the numbers in the blocks of a layer, from its group's spec (vllm.layout)."""
    if isinstance(spec, kv.UniformTypeKVCacheSpecs):
        spec = spec.kv_cache_specs[name]
    size, dtype = block_bytes(view), _name(view.dtype)
    ranges: list[NumberRange] = []
    if isinstance(spec, kv.MambaSpec):
        # Its states stand one after another; the tensor is registered as plain bytes.
        start = 0
        for shape, state_dtype in zip(spec.shapes, spec.dtypes, strict=True):
            stop = start + int(np.prod(shape)) * state_dtype.itemsize
            ranges.append(NumberRange(start, stop, _name(state_dtype)))
            start = stop
        if start > size or len(physical(view).shape) != 2:
            ranges = []
    elif getattr(spec, "state_content_bytes", None) is None:
        ranges.append(NumberRange(0, size, dtype))
    if any(numbers.dtype not in BOUNDS for numbers in ranges):
        ranges = []
    depth = Depth.LATER
    if _FIRST_LAYER.match(name):
        depth = Depth.FIRST_STATE if isinstance(spec, kv.MambaSpec) else Depth.FIRST
    return LayerNumbers(name, size, tuple(ranges), depth)


def _name(dtype: torch.dtype) -> str:
    """Return the name of a data type: `torch.bfloat16` -> "bfloat16"."""
    return str(dtype).removeprefix("torch.")
