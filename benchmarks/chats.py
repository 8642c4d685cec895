"""A trace of conversations: `python -m benchmarks.chats > chats.jsonl`, for `hybridkv replay`.

All begin with one system prompt. A turn adds the answer before it and some hundred tokens, as an
agent's turns do. `replay` is to know the size of the trace's blocks: `--block-tokens 16`.
"""

import argparse
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

BLOCK_TOKENS = 16
SYSTEM_TOKENS, FIRST_TURN_TOKENS = 1_008, 1_500
NEW_TOKENS_MIN, NEW_TOKENS_MAX = 100, 500
ANSWER_TOKENS_MIN, ANSWER_TOKENS_MAX = 50, 300
CHATS_AT_ONCE = 32


@dataclass(eq=False)
class Chat:
    """A conversation that is under way."""

    blocks: list[int] = field(default_factory=lambda: [*range(SYSTEM_TOKENS // BLOCK_TOKENS)])
    tokens: int = SYSTEM_TOKENS  # Tokens of all turns and answers until now.
    turns: int = 0


def requests(chats: int, turns: int) -> Iterator[dict[str, Any]]:
    """Yields the requests in order. A random one of the chats that are under way has its turn."""
    chance, numbers = random.Random(1), count(SYSTEM_TOKENS // BLOCK_TOKENS)
    waiting = chats
    under_way: list[Chat] = []
    while waiting or under_way:
        while waiting and len(under_way) < CHATS_AT_ONCE:
            under_way.append(Chat())
            waiting -= 1
        chat = chance.choice(under_way)
        new = chance.randint(NEW_TOKENS_MIN, NEW_TOKENS_MAX) if chat.turns else FIRST_TURN_TOKENS
        answer = chance.randint(ANSWER_TOKENS_MIN, ANSWER_TOKENS_MAX)
        prompt = chat.tokens + new
        chat.tokens = prompt + answer
        while len(chat.blocks) * BLOCK_TOKENS < chat.tokens:
            chat.blocks.append(next(numbers))
        yield {"input_length": prompt, "output_length": answer, "hash_ids": chat.blocks}
        chat.turns += 1
        if chat.turns == turns:
            under_way.remove(chat)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chats", type=int, default=100)
    parser.add_argument("--turns", type=int, default=30)
    arguments = parser.parse_args()
    for request in requests(arguments.chats, arguments.turns):
        print(json.dumps(request))
