"""Stores: a step looks at the blocks that it completes, not at the prompt before them."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

from hybridkv.connector.stores import Stores
from hybridkv.connector.tracked import Tracked, block_tables
from hybridkv.core.coverage import slot_shapes
from hybridkv.core.packed import pack_u64
from tests.layouts import LAYOUTS

STEP_CHUNKS = 4
STEPS = 8


class Watched(list[Any]):
    """The engine's blocks of one group, and how many of them were looked at."""

    seen = 0

    def __getitem__(self, at: Any) -> Any:
        found = super().__getitem__(at)
        self.seen += len(found) if isinstance(at, slice) else 1
        return found


def test_a_step_reads_no_more_of_the_block_tables_than_it_stores() -> None:
    geometry = LAYOUTS["gemma3"]
    step = STEP_CHUNKS * geometry.chunk_tokens
    stores = Stores(geometry, step, True, Counter())
    request = SimpleNamespace(num_tokens=STEPS * step, num_prompt_tokens=STEPS * step)
    request.block_hashes = [bytes([number % 256]) * 32 for number in range(STEPS * step // geometry.hash_tokens)]
    tracked = Tracked(request, next_chunk=[0] * len(geometry.groups))
    groups = [
        Watched(SimpleNamespace(block_id=1 + at) for at in range(STEPS * step // group.tokens_per_block))
        for group in geometry.groups
    ]
    offset = 0
    for number in range(STEPS):
        for group in geometry.groups:
            for shape in slot_shapes(geometry, group):
                slots = pack_u64(list(range(offset, offset + STEP_CHUNKS)))
                stores.credits.granted(shape, slots, slots, 0.0)
                offset += STEP_CHUNKS
        request.num_computed_tokens = number * step
        before = [group.seen for group in groups]
        output = SimpleNamespace(
            num_scheduled_tokens={"r": step}, kv_connector_block_state=SimpleNamespace(boundary_state_offloads={})
        )
        runs = stores.planned(output, {"r": tracked}, lambda _: block_tables(SimpleNamespace(blocks=groups)))
        assert sum(run.objects for run in runs.values()) == STEP_CHUNKS * len(geometry.groups)
        for group, blocks, seen in zip(geometry.groups, groups, before, strict=True):
            assert blocks.seen - seen <= step // group.tokens_per_block
