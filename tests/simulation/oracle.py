"""What every block must hold: the content of a token is a hash of the prefix that ends with it.

So bytes of another prefix, position, group, layer or rank are seen at once. A word of the engine's
memory is the content of its token, mixed with a constant of the place it is in.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hybridkv.core.geometry import Group, GroupKind

Words = npt.NDArray[np.int64]

_PRIME = (1 << 61) - 1
_MIX = 0x1E3779B97F4A7C15


class Content:
    """The content of a request's tokens, by position; `salt` has what else its bytes depend on."""

    def __init__(self, tokens: Sequence[int], salt: int = 0) -> None:
        self._tokens = tokens
        self._last = 7 + salt
        self._known = 0
        self._words = np.zeros(1024, np.int64)

    def upto(self, count: int) -> Words:
        """The first `count` contents."""
        if count > self._known:
            while count > len(self._words):
                self._words = np.concatenate([self._words, np.zeros_like(self._words)])
            last, fresh = self._last, []
            for token in self._tokens[self._known : count]:
                last = (last * 1_000_003 + token + 11) % _PRIME
                fresh.append(last)
            self._words[self._known : count] = fresh
            self._last, self._known = last, count
        return self._words[:count]


@dataclass(frozen=True)
class GroupWords:
    """The memory of a group: `[block, token, word]` per layer; one token holds recurrent state."""

    group: Group
    layers: list[Words]
    rank: int = 0

    def mixed(self, layer: int, content: Words) -> Words:
        """What tokens of this content look like in a layer, shaped as `[..., token, word]`."""
        place = (self.rank * 16 + self.group.gid) * 16 + layer + 1
        mixed: Words = content ^ (place * _MIX % (1 << 62))
        return mixed[..., None]


class Oracle:
    """One rank's memory, and the model that reads and writes it."""

    def __init__(self, groups: Sequence[GroupWords]) -> None:
        self.groups = groups

    def check(
        self,
        name: str,
        content: Content,
        start: int,
        table: Sequence[Sequence[int]],
        recurrent: bool,
    ) -> None:
        """All that computing token `start` reads, and all that the request keeps, is its own."""
        for words in self.groups:
            group = words.group
            if start and (group.kind is GroupKind.RECURRENT) == recurrent:
                read = read_by(group, start)
                if recurrent:
                    blocks = [table[group.gid][(start - 1) // group.tokens_per_block]]
                    assert blocks[0], f"{name} at {start}: null block is read in group {group.gid}"
                    self._expect(name, words, blocks, content.upto(start)[-1:], [start - 1])
                else:
                    self._check_attention(name, words, content.upto(start), read, table[group.gid])

    def write(self, content: Content, start: int, end: int, table: Sequence[Sequence[int]]) -> None:
        """What computing tokens [start, end) leaves in the cache."""
        for words in self.groups:
            size = words.group.tokens_per_block
            if words.group.kind is GroupKind.RECURRENT:
                blocks = np.array([table[words.group.gid][(end - 1) // size]])
                offsets, fresh = np.zeros(1, np.int64), content.upto(end)[-1:]
            else:
                positions = np.arange(start, end)
                blocks = np.array(table[words.group.gid], np.int64)[positions // size]
                offsets, fresh = positions % size, content.upto(end)[start:]
            assert blocks.all(), (
                f"the engine has no block in group {words.group.gid} for tokens it computes"
            )
            for layer, view in enumerate(words.layers):
                view[blocks, offsets] = words.mixed(layer, fresh)

    def holds(self, words: GroupWords, block: int, content: Content, boundary: int) -> bool:
        """Whether a block that ends at `boundary` holds what it must, whole."""
        expected = content.upto(boundary)[block_tokens(words.group, boundary)]
        return all(
            np.array_equal(
                view[block], np.broadcast_to(words.mixed(layer, expected), view[block].shape)
            )
            for layer, view in enumerate(words.layers)
        )

    def _check_attention(
        self, name: str, words: GroupWords, content: Words, read: range, table: Sequence[int]
    ) -> None:
        size = words.group.tokens_per_block
        start = len(content)
        whole = start // size
        blocks = np.array(table[: -(-start // size)], np.int64)
        needed = blocks[read.start // size :] if read else blocks[:0]
        assert needed.all(), f"{name} at {start}: null block is read in group {words.group.gid}"
        kept = blocks[:whole].nonzero()[0]
        if len(kept):
            expected = content[: whole * size].reshape(whole, size)[kept]
            self._expect(name, words, blocks[kept], expected, kept * size)
        if start % size and blocks[whole]:
            self._expect(name, words, blocks[whole:], content[whole * size :][None], [whole * size])

    def _expect(
        self,
        name: str,
        words: GroupWords,
        blocks: Sequence[int] | Words,
        expected: Words,
        at: Sequence[int] | Words,
    ) -> None:
        expected = expected.reshape(len(blocks), -1)
        for layer, view in enumerate(words.layers):
            wrong = view[blocks, : expected.shape[1]] != words.mixed(layer, expected)
            if wrong.any():
                block, token = (int(index) for index in np.argwhere(wrong)[0][:2])
                raise AssertionError(
                    f"{name}: group {words.group.gid} ({words.group.kind}) "
                    f"rank {words.rank} layer {layer}: "
                    f"{int(wrong.any(axis=2).sum())} of {expected.size} tokens wrong, "
                    f"first {int(at[block]) + token} "
                    f"in block {int(blocks[block])}"
                )


def read_by(group: Group, token: int) -> range:
    """Tokens whose cached content computing `token` reads; the oracle has this rule of its own."""
    first = {
        GroupKind.FULL: 0,
        GroupKind.SLIDING: token - group.window_tokens + 1,
        GroupKind.CHUNKED_LOCAL: token - token % group.window_tokens if group.window_tokens else 0,
        GroupKind.RECURRENT: token - 1,
    }[group.kind]
    return range(max(0, first), token)


def block_tokens(group: Group, boundary: int) -> slice:
    """The tokens whose content stands in the block that ends at `boundary`."""
    first = boundary - 1 if group.kind is GroupKind.RECURRENT else boundary - group.tokens_per_block
    return slice(first, boundary)
