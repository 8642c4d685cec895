"""Turns over states that accepted drafts led to, on an engine with a daemon and on one without."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from hybridkv.lab.engine_process import EngineProcess
from hybridkv.lab.models import bundled_arguments
from tests.engine.forked import ForkedEngine
from tests.engine.support import engine, forget, prompt

PROMPTS, ANSWER_TOKENS = 5, 24
COMPARED = ("tokens", "logprobs", "drafts", "step_tokens", "cached_tokens")


class DraftedTurns(NamedTuple):
    """The results of each engine: of the first turns, then of the turns that follow them."""

    own: list[dict[str, Any]]  # Of an engine without a daemon, whose own cache keeps all.
    ours: list[dict[str, Any]]  # Its own cache is emptied before the second turns.

    def differences(self) -> list[str]:
        """The values that differ, of those that must be the same."""
        return [
            key
            for key in COMPARED
            if [result[key] for result in self.ours] != [result[key] for result in self.own]
        ]

    def accepted_tokens(self) -> int:
        """The most tokens that a step of a first turn gave."""
        return int(max(max(result["step_tokens"]) for result in self.ours[:PROMPTS]))

    def hits(self) -> list[int]:
        """The tokens that each second turn hit."""
        return [result["cached_tokens"] for result in self.ours[PROMPTS:]]


def run_turns(
    model: str,
    directory: Path,
    socket_path: str,
    boundary_tokens: int,
    *options: str,
    kind: type[EngineProcess] = ForkedEngine,
) -> DraftedTurns:
    """Ask prompts that end just before a boundary, at which a state is kept, and their next turns.

    The boundary is then reached by drafts that are right and wrong (`tests.engine.guesses`). It is
    the end of the first block, and of the first chunk.
    """
    words = [f"--prefix-cache-retention-interval={boundary_tokens}", *options]
    given = [*bundled_arguments(model), *options]
    written = [word for word in given if '"method"' in word][-1]
    drafting = json.loads(written[written.index("{") :])
    if drafting["method"] != "ngram":
        # The oracle's hit is then as long: it is of the same prompt, so nothing in it is stale.
        drafting["disable_eagle_block_drop"] = True
        words.append(f"--speculative-config={json.dumps(drafting)}")
    texts = [prompt(seed, boundary_tokens - 2 - seed) for seed in range(PROMPTS)]
    with engine(model, directory / "cold.log", None, *words, kind=kind) as plain:
        first = [plain.generate(text, max_tokens=ANSWER_TOKENS)[0] for text in texts]
    turns = [[*text, *answer["tokens"]] for text, answer in zip(texts, first, strict=True)]
    (directory / "answers.json").write_text(json.dumps(turns))
    words.append("--worker-extension-cls=tests.engine.guesses.BundledWorker")
    known = {"HYBRIDKV_TEST_ANSWERS": str(directory / "answers.json")}
    # A GPU computes so few tokens faster than it loads them.
    extra: dict[str, object] = {"load_policy": "always", "hybrid_chunk_size": boundary_tokens}

    def answers(server: str | None, log: str) -> list[dict[str, Any]]:
        results = []
        with engine(
            model, directory / log, server, *words, extra=extra, environment=known, kind=kind
        ) as running:
            for text in texts:
                results += running.generate(text, max_tokens=ANSWER_TOKENS)
            if server is not None:
                forget(running)
            for turn in turns:
                results += running.generate([*turn, *prompt(9, 30)], max_tokens=ANSWER_TOKENS)
        return results

    return DraftedTurns(own=answers(None, "own.log"), ours=answers(socket_path, "ours.log"))
