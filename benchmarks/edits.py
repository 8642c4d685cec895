"""A trace of edits and branches: `python -m benchmarks.edits > edits.jsonl`, for `hybridkv replay`.

Conversations as those of `benchmarks.chats`, of which people ask some turns again, take another way
from an earlier turn, or change a word of an earlier message. Beside them are documents, each of
which many ask about. `replay` is to know the blocks: `--block-tokens 16`.
"""

import argparse
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from benchmarks.chats import BLOCK_TOKENS

SYSTEM_TOKENS = 1_008
FIRST_TOKENS_MIN, FIRST_TOKENS_MAX = 200, 3_000
NEW_TOKENS_MIN, NEW_TOKENS_MAX = 50, 800
ANSWER_TOKENS_MIN, ANSWER_TOKENS_MAX = 50, 600
DOCUMENT_TOKENS_MIN, DOCUMENT_TOKENS_MAX = 4_000, 30_000
READERS_MIN, READERS_MAX = 2, 16
AT_ONCE = 32
AGAIN_RATE, BRANCH_RATE, EDIT_RATE = 0.08, 0.08, 0.05
"""The shares of the turns that are asked again, asked otherwise from an earlier turn on, and in
which an earlier message is changed in its middle."""


@dataclass(eq=False)
class Talk:
    """A conversation, or the question of one reader about a document."""

    blocks: list[int]
    tokens: int
    turns: int  # Those that are left.
    ends: list[int] = field(default_factory=list)
    """The tokens before each turn's new message."""
    prompt: int = 0  # The tokens of the last prompt.


class Edits:
    """Conversations and documents, with one system prompt."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self._numbers = count(SYSTEM_TOKENS // BLOCK_TOKENS)
        self._system = [*range(SYSTEM_TOKENS // BLOCK_TOKENS)]

    def document(self) -> list[Talk]:
        """Returns the talks of all readers of a new document."""
        chance = self._chance
        blocks = chance.randint(DOCUMENT_TOKENS_MIN, DOCUMENT_TOKENS_MAX) // BLOCK_TOKENS
        text = self._system + [next(self._numbers) for _ in range(blocks)]
        readers = range(chance.randint(READERS_MIN, READERS_MAX))
        return [
            Talk([*text], len(text) * BLOCK_TOKENS, chance.choice((1, 1, 2, 4))) for _ in readers
        ]

    def chat(self, turns: int) -> Talk:
        """Returns a new conversation."""
        return Talk([*self._system], SYSTEM_TOKENS, self._chance.randint(2, turns))

    def turn(self, talk: Talk) -> dict[str, Any]:
        """Returns the request of the next turn."""
        chance, drawn = self._chance, self._chance.random()
        is_again = bool(talk.ends) and drawn < AGAIN_RATE
        if is_again:
            self._cut(talk, talk.prompt)
        elif talk.ends and drawn < AGAIN_RATE + BRANCH_RATE:
            self._cut(talk, chance.choice(talk.ends))
        elif talk.ends and drawn < AGAIN_RATE + BRANCH_RATE + EDIT_RATE:
            self._cut(talk, chance.randint(talk.ends[0], talk.tokens - 1))
        if not is_again:
            first, later = (FIRST_TOKENS_MIN, FIRST_TOKENS_MAX), (NEW_TOKENS_MIN, NEW_TOKENS_MAX)
            bounds = later if talk.ends else first
            talk.ends.append(talk.tokens)
            talk.prompt = talk.tokens + chance.randint(*bounds)
        answer = chance.randint(ANSWER_TOKENS_MIN, ANSWER_TOKENS_MAX)
        talk.tokens = talk.prompt + answer
        talk.turns -= 1
        while len(talk.blocks) * BLOCK_TOKENS < talk.tokens:
            talk.blocks.append(next(self._numbers))
        return {"input_length": talk.prompt, "output_length": answer, "hash_ids": [*talk.blocks]}

    def _cut(self, talk: Talk, tokens: int) -> None:
        """Let the talk go on after so many tokens, with others than before."""
        talk.tokens = tokens
        del talk.blocks[tokens // BLOCK_TOKENS :]
        talk.ends = [end for end in talk.ends if end < tokens]

    def requests(self, chats: int, documents: int, turns: int) -> Iterator[dict[str, Any]]:
        """Yields the requests in order. A random one of those at work has its turn."""
        chance = self._chance
        waiting = [self.chat(turns) for _ in range(chats)]
        for _ in range(documents):
            # The readers of a document come one after the other, with others between them.
            at = chance.randint(0, len(waiting))
            for reader in self.document():
                waiting.insert(min(len(waiting), at), reader)
                at += chance.randint(1, 12)
        waiting.reverse()
        at_work: list[Talk] = []
        while waiting or at_work:
            while waiting and len(at_work) < AT_ONCE:
                at_work.append(waiting.pop())
            talk = chance.choice(at_work)
            yield self.turn(talk)
            if not talk.turns:
                at_work.remove(talk)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chats", type=int, default=150)
    parser.add_argument("--documents", type=int, default=40)
    parser.add_argument("--turns", type=int, default=20)
    arguments = parser.parse_args()
    for request in Edits(1).requests(arguments.chats, arguments.documents, arguments.turns):
        print(json.dumps(request))
