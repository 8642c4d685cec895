"""A worker extension: n-gram speculation that knows most of what the model says.

`HYBRIDKV_TEST_ANSWERS` is a JSON file of token sequences, prompts with their answers. Behind the
tokens of one of them its next tokens are drafted: none, some or all, and every fifth is wrong.
"""

import json
import os
from pathlib import Path
from typing import Any

from vllm.v1.spec_decode.ngram_proposer import NgramProposer

import hybridkv.lab.shims

ANSWERS = "HYBRIDKV_TEST_ANSWERS"
BundledWorker = hybridkv.lab.shims.BundledWorker
_answers = json.loads(Path(os.environ[ANSWERS]).read_text())


def _propose(
    self: Any, count: int, sampled: list[list[int]], lengths: Any, tokens: Any, *_: Any, **__: Any
) -> list[list[int]]:
    """The drafts of each row."""
    rows = []
    for row, fresh in enumerate(sampled):
        length = int(lengths[row])
        own = tokens[row, :length].tolist()
        known: list[int] = next((one for one in _answers if fresh and one[:length] == own), [])
        wanted = known[length:][: (length + len(known)) % (count + 2)][:count]
        rows.append([one + ((length + at) % 5 == 3) for at, one in enumerate(wanted)])
    return rows


NgramProposer.propose = _propose
