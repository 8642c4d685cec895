"""What a request asks of the cache, as vLLM's API server hands it to the engine."""

from typing import Any

import pytest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from hybridkv.vllm.transfer_params import READ, WRITE, CacheWishes, cache_wishes

ROUTER = {"do_remote_decode": True, "do_remote_prefill": False, "remote_block_ids": None}


def wishes_in(params: Any, is_chat: bool = False) -> CacheWishes:
    """Returns what a body with these `kv_transfer_params` asks for."""
    body: Any
    if is_chat:
        messages = [{"role": "user", "content": "Hello"}]
        body = ChatCompletionRequest(messages=messages, kv_transfer_params=params)
    else:
        body = CompletionRequest(prompt=[1, 2], kv_transfer_params=params)
    sampling = body.to_sampling_params(1, {})
    return cache_wishes(Request("r", [1, 2], sampling, None))


@pytest.mark.parametrize("is_chat", [False, True])
@pytest.mark.parametrize(
    ("params", "reads", "writes"),
    [
        (None, True, True),
        ({}, True, True),
        (ROUTER, True, True),
        ({READ: True, WRITE: True}, True, True),
        ({READ: False}, False, True),
        ({**ROUTER, WRITE: False}, True, False),
        ({READ: False, WRITE: False}, False, False),
    ],
)
def test_a_request_asks(params: Any, reads: bool, writes: bool, is_chat: bool) -> None:
    assert wishes_in(params, is_chat) == CacheWishes(reads, writes)


@pytest.mark.parametrize(
    ("params", "reads", "writes", "mistake"),
    [
        ({READ: "no"}, False, True, "hybridkv.read is 'no', and is taken for false"),
        ({WRITE: None}, True, False, "hybridkv.write is None"),
        ({WRITE: 0}, True, False, "hybridkv.write is 0"),
        ({WRITE: {"a": [1] * 1000}}, True, False, "hybridkv.write is {'a': [1, 1"),
        ({"hybridkv.wirte": False}, True, True, "hybridkv.wirte is no key"),
        ({"hybridkv." + "x" * 1000: 1}, True, True, "is no key: hybridkv.read and hybridkv.write"),
    ],
)
def test_a_mistake_is_a_sentence(params: Any, reads: bool, writes: bool, mistake: str) -> None:
    wishes = wishes_in(params)
    assert (wishes.reads, wishes.writes) == (reads, writes)
    assert mistake in wishes.mistake
    assert len(wishes.mistake) < 200


def test_other_types_ask_for_nothing() -> None:
    request = Request("r", [1, 2], SamplingParams(), None)
    for params in ([WRITE], WRITE, 1):
        vars(request)["kv_transfer_params"] = params
        assert cache_wishes(request) == CacheWishes()
