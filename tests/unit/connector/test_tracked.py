"""Block tables: what is read of the engine's blocks, and when."""

import pickle
from types import SimpleNamespace

from hybridkv.connector.scheduler.requests import block_tables
from hybridkv.core.copies import CopyRun, plan_load
from hybridkv.core.coverage import needed_chunks
from tests.layouts import LAYOUTS
from tests.packing import packed_slots

HIT = 4


class Block:
    """As the engine's, but counts how often its id is read."""

    reads = 0

    def __init__(self, block_id: int) -> None:
        self._block_id = block_id

    @property
    def block_id(self) -> int:
        """Return the id and count the read."""
        Block.reads += 1
        return self._block_id


def planned_load(name: str) -> tuple[list[list[Block]], tuple[CopyRun, ...]]:
    """The engine's blocks, no two with one id, and the plan of a hit into them."""
    geometry = LAYOUTS[name]
    boundary = HIT * geometry.chunk_tokens
    blocks = [
        [Block(1 + 1000 * index + at) for at in range(boundary // group.tokens_per_block)]
        for index, group in enumerate(geometry.groups)
    ]
    needed = sum(len(needed_chunks(geometry, group, HIT)) for group in geometry.groups)
    slots = packed_slots(range(needed))
    return blocks, plan_load(geometry, HIT, 0, block_tables(SimpleNamespace(blocks=blocks)), slots)


def test_a_load_has_the_blocks_of_when_it_was_planned_and_reads_them_when_it_is_taken_apart() -> (
    None
):
    blocks, runs = planned_load("gpu_blocks")
    whole = len(blocks[1])
    assert len(runs[1].span.blocks) == whole
    assert Block.reads < whole / 2, "a hook looked at more than the ends and a window"
    for table in blocks:
        table[:] = [Block(0)] * len(table)
    _, expected = planned_load("gpu_blocks")
    assert [[*run.ops()] for run in runs] == [[*run.ops()] for run in expected]
    sent = pickle.loads(pickle.dumps(runs))
    assert [[*run.ops()] for run in sent] == [[*run.ops()] for run in runs]
    assert all(type(run.span.blocks) is list for run in sent)
