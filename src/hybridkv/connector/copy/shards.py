"""The copies of a rank that has several shards of the KV heads (vllm.shards)."""

import threading
from collections import Counter
from collections.abc import Callable, Sequence

from hybridkv.connector.copy.part import Copier, PartLayout, load_error
from hybridkv.core.copies import CopyOp
from hybridkv.core.errors import HybridKVError
from hybridkv.core.packed import SlotRef


class ShardsCopier(Copier):
    """The Copier of a rank with a copier for each of its shards, whose parts are `parts`.

    Objects of replicated groups have one part. One of the copiers stores it, and the first loads
    it.
    """

    def __init__(self, parts: Sequence[PartLayout], copiers: Sequence[Copier]) -> None:
        self._parts = parts
        self.copiers = copiers

    def store(self, ops: Sequence[CopyOp], done: Callable[[CopyOp, bool], None]) -> None:
        """Copy blocks out, each op by the copiers whose shard writes it. At least one does."""
        shares = [[op for op in ops if part.writes(op)] for part in self._parts]
        running = Counter(op.slot for share in shares for op in share)
        failed: set[SlotRef] = set()
        lock = threading.Lock()

        def on_stored(op: CopyOp, is_stored: bool) -> None:
            with lock:
                running[op.slot] -= 1
                if not is_stored:
                    failed.add(op.slot)
                is_last = not running[op.slot]
            if is_last:
                done(op, op.slot not in failed)

        for copier, share in zip(self.copiers, shares, strict=True):
            copier.store(share, on_stored)

    def load(self, ops: Sequence[CopyOp], done: Callable[[HybridKVError | None], None]) -> None:
        replicated = self._parts[0].replicated
        split = [op for op in ops if op.group_index not in replicated]
        shares = [ops, *([split] * (len(self.copiers) - 1))]
        running = len(shares)
        errors: list[HybridKVError] = []
        lock = threading.Lock()

        def on_loaded(error: HybridKVError | None) -> None:
            nonlocal running
            with lock:
                running -= 1
                if error is not None:
                    errors.append(error)
                is_last = not running
            if is_last:
                done(load_error(errors))

        for copier, share in zip(self.copiers, shares, strict=True):
            copier.load(share, on_loaded)

    def close(self) -> None:
        for copier in self.copiers:
            copier.close()
