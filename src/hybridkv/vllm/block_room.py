"""The rule that loads leave room in the engine's block pool for all loading requests to run.

The engine takes blocks back only from running requests. If loads filled its pool, no request would
have blocks to run with, and the loads would wait for each other for ever.
"""

from collections.abc import Container, Sequence
from typing import NamedTuple

from hybridkv.core.geometry import Group, GroupKind

ROOM_SECONDS = 2.0
"""How long a request with a hit waits until other loads leave it room in the block pool."""


class Retention(NamedTuple):
    """The part of a request that the engine keeps in a group."""

    tokens_per_block: int
    window_tokens: int | None  # The last tokens that are kept; None = all tokens are.
    draft_blocks: int = 0  # Further blocks: each draft of a step leaves a recurrent state.


def retention_of(group: Group, draft_blocks: int = 0) -> Retention:
    """Return what the engine keeps of a request in `group`."""
    window = group.window_tokens + group.extra_retained_tokens
    kept = None if group.kind is GroupKind.FULL else window
    return Retention(group.tokens_per_block, kept, draft_blocks)


class BlockRoom:
    """Counts the blocks of the requests that got blocks for a load and have not run since.

    `tokens` are always the tokens that a request loads, and the first token that it computes.
    """

    def __init__(self, groups: Sequence[Retention], pool_blocks: int, inflight_tokens: int) -> None:
        """`groups` are what each group of the engine keeps. `pool_blocks` are all blocks.

        `inflight_tokens` are the most tokens of all steps that are planned and not reported. vLLM
        runs a request only where its window and all of these tokens have room.
        """
        self._groups = groups
        self._pool_blocks = pool_blocks
        self._inflight_tokens = inflight_tokens
        self._held: dict[str, int] = {}

    def __len__(self) -> int:
        """The number of requests that hold blocks."""
        return len(self._held)

    def most_blocks(self, tokens: int) -> int:
        """Return the most blocks, over all groups, that a request holds before it has run once.

        A group with a window frees earlier blocks only after the step that leaves them.
        """
        total = 0
        for group in self._groups:
            kept = tokens if group.window_tokens is None else group.window_tokens
            total += -(-min(tokens, kept + self._inflight_tokens) // group.tokens_per_block) + 1
            total += group.draft_blocks
        return total

    def has_room(self, request_id: str, tokens: int) -> bool:
        """Return True if this request and all that load can run when their loads end.

        A request that is alone always has room.
        """
        held_blocks = sum(blocks for name, blocks in self._held.items() if name != request_id)
        return not held_blocks or held_blocks + self.most_blocks(tokens) <= self._pool_blocks

    def count_load(self, request_id: str, tokens: int) -> None:
        """Count the blocks that the request got for a load, until it runs."""
        self._held[request_id] = self.most_blocks(tokens)

    def on_running(self, request_ids: Container[str]) -> None:
        """Count nothing any more for these requests, which ran or ended."""
        for name in [name for name in self._held if name in request_ids]:
            del self._held[name]
