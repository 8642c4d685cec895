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

from hybridkv.lab import wide_weights
from hybridkv.lab.models import V2_RUNNER_ENV

ANSWERS = "HYBRIDKV_TEST_ANSWERS"
BundledWorker = wide_weights.BundledWorker
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


def _on_v2() -> None:
    """Put the same in place for drafters with layers on the V2 model runner."""
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as Runner
    from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator import (
        TargetDependentARSpeculator,
    )

    draft, postprocess = TargetDependentARSpeculator.propose, Runner.postprocess_sampled
    requests: Any = None

    def postprocess_sampled(self: Any, *given: Any, **named: Any) -> Any:
        nonlocal requests
        requests = self.req_states
        return postprocess(self, *given, **named)

    def propose(self: Any, input_batch: Any, *given: Any, **named: Any) -> Any:
        drafts = draft(self, input_batch, *given, **named)
        if requests is None or named.get("dummy_run"):
            return drafts
        for row, name in enumerate(input_batch.req_ids):
            at = requests.req_id_to_index[name]
            length = int(requests.total_len.gpu[at])
            known = _answer_to(requests.all_token_ids.gpu[at, :length].tolist())
            for place, token in enumerate(known[length : length + drafts.shape[1]]):
                if (length + place) % 5 != 3:
                    drafts[row, place] = token
        return drafts

    TargetDependentARSpeculator.propose = propose
    Runner.postprocess_sampled = postprocess_sampled


NgramProposer.propose = _propose
GPUModelRunner.propose_draft_token_ids = _draft_known
if os.environ.get(V2_RUNNER_ENV) == "1":
    _on_v2()
