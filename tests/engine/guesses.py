"""A worker extension: speculation that knows most of what the model says.

`HYBRIDKV_TEST_ANSWERS` is a JSON file of token sequences, prompts with their answers. After the
first tokens of a sequence, n-gram speculation drafts none, a few or all of the next ones, of which
every fifth is wrong. Where a drafter has layers, every fifth draft is its own, and the others are
these tokens.
"""

import json
import os
from pathlib import Path
from typing import Any

import torch
from vllm.v1.spec_decode.ngram_proposer import NgramProposer
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

import hybridkv.lab.shims

ANSWERS = "HYBRIDKV_TEST_ANSWERS"
BundledWorker = hybridkv.lab.shims.BundledWorker
_answers = json.loads(Path(os.environ[ANSWERS]).read_text())


_draft = GPUModelRunner.propose_draft_token_ids


def _answer_to(own: list[int]) -> list[int]:
    """Returns the known sequence that begins with these tokens, [] where there is none."""
    return next((tokens for tokens in _answers if tokens[: len(own)] == own), [])


def _propose(
    self: Any, count: int, sampled: list[list[int]], lengths: Any, tokens: Any, *_: Any, **__: Any
) -> list[list[int]]:
    """Returns the drafts of each row."""
    rows = []
    for row, fresh in enumerate(sampled):
        length = int(lengths[row])
        known = _answer_to(tokens[row, :length].tolist()) if fresh else []
        wanted = known[length:][: (length + len(known)) % (count + 2)][:count]
        rows.append([token + ((length + at) % 5 == 3) for at, token in enumerate(wanted)])
    return rows


def _draft_known(self: Any, *given: Any, **named: Any) -> Any:
    """Returns the drafts of each row, after the drafter has computed its own."""
    drafts = _draft(self, *given, **named)
    if isinstance(drafts, torch.Tensor):
        batch = self.input_batch
        for row in range(len(drafts)):
            length = int(batch.num_tokens_no_spec[row])
            known = _answer_to(batch.token_ids_cpu[row, :length].tolist())
            for at, token in enumerate(known[length : length + drafts.shape[1]]):
                drafts[row, at] = token if (length + at) % 5 != 3 else drafts[row, at]
    return drafts


NgramProposer.propose = _propose
GPUModelRunner.propose_draft_token_ids = _draft_known
