"""What every block must hold: the content of a token is a hash of the prefix that ends with it.

So bytes of another prefix, position, group, layer or rank are seen at once. A word of the engine's
memory is the content of its token, mixed with a constant of the place it is in.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hybridkv.core.geometry import Group, GroupKind

Words = npt.NDArray[np.int64]

SPOILT = -0x2121212121212121

_PRIME = (1 << 61) - 1
_MIX = 0x1E3779B97F4A7C15
_AHEAD = 0x2545F4914F


def token_of(content: int) -> int:
    """The token that the model gives after a token of this content."""
    return content % 1998 + 2


class Content:
    """The content of a request's tokens, by position. `salt` stands for the weights."""

    def __init__(self, tokens: Sequence[int], salt: int = 0) -> None:
        self.tokens = tokens
        self._last = 7 + salt
        self._known = 0
        self._words = np.zeros(1024, np.int64)

    def ahead(self, start: int, end: int, next_token: int | None = None) -> Words:
        """Returns what a drafter makes of tokens [start, end), each with the token after it.

        `next_token` is what it takes for the token after the last, or None for the request's own.
        """
        following = np.array(self.tokens[start + 1 : end + 1], np.int64)
        if next_token is not None:
            following = np.append(following[: end - start - 1], next_token)
        mixed: Words = self.upto(end)[start:] ^ (following * _AHEAD)
        return mixed

    def guess(self, count: int) -> list[int]:
        """Returns the `count` tokens that the model would give after those of the request."""
        last, tokens = int(self.upto(len(self.tokens))[-1]), []
        for _ in range(count):
            tokens.append(token_of(last))
            last = (last * 1_000_003 + tokens[-1] + 11) % _PRIME
        return tokens

    def upto(self, count: int) -> Words:
        """Returns the contents of the first `count` tokens."""
        if count > self._known:
            while count > len(self._words):
                self._words = np.concatenate([self._words, np.zeros_like(self._words)])
            last, fresh = self._last, []
            for token in self.tokens[self._known : count]:
                last = (last * 1_000_003 + token + 11) % _PRIME
                fresh.append(last)
            self._words[self._known : count] = fresh
            self._last, self._known = last, count
        return self._words[:count]


@dataclass(frozen=True)
class GroupWords:
    """The memory of a group: `[block, token, head, word]` per layer.

    A recurrent state is one token.
    """

    group: Group
    layers: list[Words]
    rank: int = 0
    drafter: frozenset[int] = frozenset()  # The layers that are the drafter's.
    lookahead: int = 0  # Tokens after a position on which the drafter's bytes there depend.
    first_head: int = 0  # The number of its first head among those of all ranks.

    def shard(self, number: int, count: int) -> "GroupWords":
        """Returns the memory of one of `count` shards of the heads."""
        heads = self.layers[0].shape[2] // count if self.layers else 0
        first = number * heads
        layers = [view[:, :, first : first + heads] for view in self.layers]
        return replace(self, layers=layers, first_head=self.first_head + first)

    def expected(self, layer: int, content: Content, positions: slice) -> Words:
        """Returns the words of a layer for these tokens, which all have a next token."""
        start, end = positions.start, positions.stop
        is_ahead = layer in self.drafter and self.lookahead
        words = content.ahead(start, end) if is_ahead else content.upto(end)[start:]
        return self.mixed(layer, words)

    def mixed(self, layer: int, content: Words) -> Words:
        """Returns the words of a layer for this content: `[..., token, head, word]`."""
        place = (self.rank * 16 + self.group.gid) * 16 + layer + 1
        heads, words = self.layers[layer].shape[2:]
        within = (np.arange(heads * words) + self.first_head * words).reshape(heads, words)
        mixed: Words = (content ^ (place * _MIX % (1 << 62)))[..., None, None] ^ within
        return mixed


class StateSpan(NamedTuple):
    """The tokens that a step of one request computes: [start, known_end), then its drafts."""

    start: int
    known_end: int
    drafts: int
    accepted: int  # Drafts that are right.


@dataclass(frozen=True)
class StateStep:
    """Columns of block tables in which a step finds recurrent states and leaves them.

    As in vLLM's V1 model runner, the states after the last known token and after each draft stand
    in consecutive columns from `first` on. After the step, the state at a block's end that accepted
    tokens reach is copied to that block's own column.
    """

    source: int  # The column of the state after all tokens before the step; -1 = there are none.
    first: int
    known_end: int  # The end of the step's tokens that are no drafts.
    drafts: int
    accepted: int

    @property
    def end(self) -> int:
        """The end of the step's tokens that count."""
        return self.known_end + self.accepted


@dataclass
class StatePlace:
    """The columns of the block tables in which a running request has its state."""

    column: int = -1  # -1 = the request has not run yet.
    accepted: int = 0  # The state is so many columns after `column`.

    def step(self, span: StateSpan, block_tokens: int) -> StateStep:
        """Returns where a step over these tokens finds and leaves states, and keeps the place."""
        first = (span.known_end + span.drafts - 1) // block_tokens
        source = (span.start - 1) // block_tokens
        if self.column >= 0:
            source = self.column + self.accepted
        end = (span.known_end + span.accepted) // block_tokens * block_tokens
        is_back = end >= span.known_end and end // block_tokens - 1 == first
        self.column, self.accepted = first, 0 if is_back else span.accepted
        return StateStep(
            source=source if span.start else -1,
            first=first,
            known_end=span.known_end,
            drafts=span.drafts,
            accepted=span.accepted,
        )


@dataclass(frozen=True)
class DraftedStep:
    """The part of a step that a drafter adds to a request's own tokens."""

    computed_end: int  # The end of the drafts that the target's layers compute.
    drafted_end: int  # The end of the tokens that the drafter's layers compute.
    is_drafted: bool  # Whether vLLM runs the drafter in this step.
    next_token: int | None  # What the drafter takes for the token after those computed.


class Oracle:
    """Writes a rank's memory as a model would, and checks every byte that one would read."""

    def __init__(self, groups: Sequence[GroupWords]) -> None:
        self.groups = groups

    def check(
        self,
        name: str,
        content: Content,
        start: int,
        table: Sequence[Sequence[int]],
        states: "StateStep | None" = None,
    ) -> None:
        """Check all bytes that computing token `start` reads, of `states` or else of attention."""
        for words in self.groups:
            group = words.group
            is_recurrent = group.kind is GroupKind.RECURRENT
            if not start or is_recurrent != (states is not None):
                continue
            if states is not None:
                blocks = [table[group.gid][states.source]]
                assert blocks[0], f"{name} at {start}: null block is read in group {group.gid}"
                self._expect(name, words, blocks, content.upto(start)[-1:], [start - 1])
            else:
                read = read_by(group, start)
                self._check_attention(name, words, content.upto(start), read, table[group.gid])

    def write(
        self,
        content: Content,
        computed: range,
        table: Sequence[Sequence[int]],
        states: StateStep,
        drafts: "DraftedStep | None" = None,
    ) -> None:
        """Write what computing these tokens leaves in the cache."""
        start, end = computed.start, computed.stop
        for words in self.groups:
            size = words.group.tokens_per_block
            if words.group.kind is GroupKind.RECURRENT:
                self._write_states(words, content, table[words.group.gid], states)
                continue
            if drafts is not None:
                self._spoil(words, end, table[words.group.gid], drafts)
            positions = np.arange(start, end)
            blocks = np.array(table[words.group.gid], np.int64)[positions // size]
            offsets, fresh = positions % size, content.upto(end)[start:]
            assert blocks.all(), (
                f"the engine has no block in group {words.group.gid} for tokens it computes"
            )
            for layer, view in enumerate(words.layers):
                mixed = fresh
                if layer in words.drafter and drafts is not None:
                    if not drafts.is_drafted:
                        continue
                    if words.lookahead:
                        mixed = content.ahead(start, end, drafts.next_token)
                view[blocks, offsets] = words.mixed(layer, mixed)

    def check_drafter(
        self, name: str, content: Content, loaded: range, table: Sequence[Sequence[int]]
    ) -> int:
        """Check that a load left in the drafter's layers what computing would have left there.

        Returns how many blocks it compared.
        """
        count = 0
        for words in (group_words for group_words in self.groups if group_words.drafter):
            size, blocks = words.group.tokens_per_block, table[words.group.gid]
            for number in range(loaded.start // size, loaded.stop // size):
                whole = slice(number * size, (number + 1) * size)
                for layer in sorted(words.drafter) if blocks[number] else ():
                    view = words.layers[layer][blocks[number]]
                    expected = np.broadcast_to(words.expected(layer, content, whole), view.shape)
                    assert np.array_equal(view, expected), (
                        f"{name}: the drafter's layer {layer} of group {words.group.gid}, "
                        f"{whole.start} to {whole.stop}, is loaded and wrong"
                    )
                    count += 1
        return count

    def _write_states(
        self, words: GroupWords, content: Content, table: Sequence[int], states: StateStep
    ) -> None:
        """Write the states after the last known token and after each draft."""
        for draft in range(states.drafts + 1):
            tokens, block = states.known_end + draft, table[states.first + draft]
            assert block, f"no block in group {words.group.gid} for the state at {tokens}"
            for layer, view in enumerate(words.layers):
                view[block] = SPOILT - tokens
                if draft <= states.accepted:
                    view[block] = words.mixed(layer, content.upto(tokens)[-1:])

    def on_tokens_accepted(self, table: Sequence[Sequence[int]], states: StateStep) -> None:
        """Copy the state at a block's end to that block, as vLLM does once tokens are sampled."""
        for words in self.groups:
            if words.group.kind is not GroupKind.RECURRENT:
                continue
            size, blocks = words.group.tokens_per_block, table[words.group.gid]
            end = states.end // size * size
            if end < states.known_end:
                continue
            block = blocks[end // size - 1]
            assert block, f"no block in group {words.group.gid} for the state at {end}"
            for view in words.layers:
                view[block] = view[blocks[states.first + end - states.known_end]]

    def _spoil(
        self, words: GroupWords, end: int, table: Sequence[int], drafts: "DraftedStep"
    ) -> None:
        """Write from token `end` on the bytes of drafts that were rejected or not verified yet."""
        size = words.group.tokens_per_block
        for layer, view in enumerate(words.layers):
            is_drafters = layer in words.drafter
            if is_drafters and not drafts.is_drafted:
                continue
            last = drafts.drafted_end if is_drafters else drafts.computed_end
            for position in range(end, min(last, len(table) * size)):
                if block := table[position // size]:
                    view[block, position % size] = SPOILT - position

    def holds(self, words: GroupWords, block: int, content: Content, boundary: int) -> bool:
        """Whether a block that is cached up to `boundary` holds what it must, whole."""
        expected = content.upto(boundary)[block_tokens(words.group, boundary)]
        kept = slice(0, len(expected))
        return all(
            np.array_equal(
                view[block, kept],
                np.broadcast_to(words.mixed(layer, expected), view[block, kept].shape),
            )
            for layer, view in enumerate(words.layers)
            if layer not in words.drafter
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
            # The engine's own cache may give a drafter what another prompt's left.
            if layer in words.drafter:
                continue
            wrong = view[blocks, : expected.shape[1]] != words.mixed(layer, expected)
            if wrong.any():
                block, token = (int(index) for index in np.argwhere(wrong)[0][:2])
                raise AssertionError(
                    f"{name}: group {words.group.gid} ({words.group.kind}) "
                    f"rank {words.rank} layer {layer}: "
                    f"{int(wrong.any(axis=(2, 3)).sum())} of {expected.size} tokens wrong, "
                    f"first {int(at[block]) + token} "
                    f"in block {int(blocks[block])}"
                )


def read_by(group: Group, token: int) -> range:
    """Tokens whose cached content is read to compute `token`: a rule that is the oracle's own."""
    first = {
        GroupKind.FULL: 0,
        GroupKind.SLIDING: token - group.window_tokens + 1,
        GroupKind.CHUNKED_LOCAL: token - token % group.window_tokens if group.window_tokens else 0,
        GroupKind.RECURRENT: token - 1,
    }[group.kind]
    return range(max(0, first), token)


def block_tokens(group: Group, boundary: int) -> slice:
    """The tokens whose content stands in the block that is cached up to `boundary`.

    A prompt may end inside a block, of which vLLM then caches the beginning.
    """
    size = 1 if group.kind is GroupKind.RECURRENT else group.tokens_per_block
    return slice((boundary - 1) // size * size, boundary)
