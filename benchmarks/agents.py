"""A trace of a day of agents: `python -m benchmarks.agents > agents.jsonl`, for `hybridkv replay`.

All sessions have one system prompt, of 6,000 tokens. After it come the tools, of which there are a
few lists, then the task and the turns. Now and then a session asks a subagent, which has another
list of tools, a task of its own, and some turns. `replay` is to know the blocks: `--block-tokens
16`.
"""

import argparse
import json
import random
from collections.abc import Iterator
from itertools import count
from typing import Any

from benchmarks.chats import BLOCK_TOKENS, Chat

SYSTEM_TOKENS = 6_000
TOOLS_TOKENS = (1_600, 2_400, 3_200)  # Of each list of tools.
TASK_TOKENS_MIN, TASK_TOKENS_MAX = 200, 1_500
NEW_TOKENS_MIN, NEW_TOKENS_MAX = 100, 2_000  # What a tool or a person answers.
ANSWER_TOKENS_MIN, ANSWER_TOKENS_MAX = 50, 400
SUBAGENT_RATE = 0.2  # The share of a session's turns after which it asks a subagent.
SUBAGENT_TURNS = 5
AT_ONCE = 8


class Agents:
    """Sessions and their subagents, all of whose prompts begin alike."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self._numbers = count()
        self._system = self._new_blocks(SYSTEM_TOKENS)
        self._tools = [self._new_blocks(tokens) for tokens in TOOLS_TOKENS]

    def _new_blocks(self, tokens: int) -> list[int]:
        return [next(self._numbers) for _ in range(tokens // BLOCK_TOKENS)]

    def begin(self) -> Chat:
        """Returns an agent that has its system prompt and one of the lists of tools."""
        blocks = self._system + self._chance.choice(self._tools)
        return Chat([*blocks], len(blocks) * BLOCK_TOKENS)

    def turn(self, chat: Chat) -> dict[str, Any]:
        """Returns the request of an agent's next turn."""
        chance = self._chance
        bounds = (NEW_TOKENS_MIN, NEW_TOKENS_MAX)
        new = chance.randint(*(bounds if chat.turns else (TASK_TOKENS_MIN, TASK_TOKENS_MAX)))
        answer = chance.randint(ANSWER_TOKENS_MIN, ANSWER_TOKENS_MAX)
        prompt = chat.tokens + new
        chat.tokens = prompt + answer
        chat.turns += 1
        while len(chat.blocks) * BLOCK_TOKENS < chat.tokens:
            chat.blocks.append(next(self._numbers))
        return {"input_length": prompt, "output_length": answer, "hash_ids": chat.blocks}

    def requests(self, sessions: int, turns: int) -> Iterator[dict[str, Any]]:
        """Yields the requests in order. A random one of the agents at work has its turn."""
        waiting = sessions
        left: dict[Chat, int] = {}  # The turns that each agent at work has left.
        while waiting or left:
            while waiting and len(left) < AT_ONCE:
                left[self.begin()] = turns
                waiting -= 1
            chat = self._chance.choice([*left])
            yield self.turn(chat)
            left[chat] -= 1
            is_session = left[chat] > SUBAGENT_TURNS
            if is_session and self._chance.random() < SUBAGENT_RATE:
                left[self.begin()] = SUBAGENT_TURNS
            if not left[chat]:
                del left[chat]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=20)
    parser.add_argument("--turns", type=int, default=30)
    arguments = parser.parse_args()
    for request in Agents(1).requests(arguments.sessions, arguments.turns):
        print(json.dumps(request))
