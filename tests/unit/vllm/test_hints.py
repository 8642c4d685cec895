"""What a request asks of the cache, as vLLM's API server and its engine hand it to a connector."""

import json
from collections.abc import Mapping
from typing import Any

import pytest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.request import Request
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from hybridkv.core.hints import NO_HINTS, PREFETCH_SECONDS_MAX, RETAIN_SECONDS_MAX, Hints
from hybridkv.vllm.hints import (
    DEMOTE,
    NO_FORM,
    PREFETCH_IN_SECONDS,
    PRIORITY,
    READ,
    RELEASE,
    RETAIN_SECONDS,
    TTL,
    WRITE,
    ReadHints,
    read_hints,
)

ROUTER = {"do_remote_decode": True, "do_remote_prefill": False, "remote_block_ids": None}
ALL = {
    READ: False,
    WRITE: False,
    RETAIN_SECONDS: 600,
    RELEASE: True,
    DEMOTE: True,
    PRIORITY: "low",
    PREFETCH_IN_SECONDS: 20,
}
ALL_HINTS = Hints(
    reads=False,
    writes=False,
    retain_seconds=600.0,
    release=True,
    demote=True,
    low_priority=True,
    prefetch_in_seconds=20.0,
)
USER = [{"role": "user", "content": "Hello"}]


def read(params: Any = None, xargs: Any = None, actions: Any = None) -> ReadHints:
    """Return what a request with these forms asks. `actions` are those of an envelope."""
    extra_args = {**(xargs or {}), **({} if params is None else {"kv_transfer_params": params})}
    request = Request("r", [1, 2], SamplingParams(extra_args=extra_args or None), None)
    if actions is not None:
        vars(request)["kv_hints"] = envelope(*actions)
    return read_hints(request)


def envelope(*actions: tuple[str, Any]) -> Any:
    """Return the envelope of an orchestrator, as vLLM's own type."""
    protocol = pytest.importorskip("vllm.v1.kv_hints")
    made = [protocol.KvHintAction("a", kind, "1.0", payload) for kind, payload in actions]
    return protocol.KvHintsEnvelope("0.1", "m", made)


def sampling_of(path: str, body: Mapping[str, Any]) -> SamplingParams:
    """Return what a body comes to in vLLM's entry point at `path`."""
    request: Any
    if path == "completions":
        request = CompletionRequest(prompt=[1, 2], **body)
    elif path == "responses":
        request = ResponsesRequest(input="Hello", **body)
    else:
        request = ChatCompletionRequest(messages=USER, **body)
    sampling: SamplingParams = request.to_sampling_params(4, {})
    return sampling


@pytest.mark.parametrize("path", ["completions", "chat", "responses"])
def test_every_entry_point_passes_on_the_own_keys_and_those_of_a_router(path: str) -> None:
    xargs = {"agentic_context": json.dumps({"program_id": "p", TTL: 5})}
    for body, hints in (
        ({"kv_transfer_params": {**ROUTER, **ALL}}, ALL_HINTS),
        ({"vllm_xargs": {TTL: 7.5}}, Hints(retain_seconds=7.5)),
        ({"vllm_xargs": xargs}, Hints(retain_seconds=5.0)),
    ):
        sampling = sampling_of(path, body)
        assert read_hints(Request("r", [1, 2], sampling, None)) == ReadHints(hints)


@pytest.mark.parametrize("params", [None, {}, ROUTER, {READ: True, WRITE: True}, [WRITE], WRITE, 1])
def test_a_request_without_hints_asks_for_nothing(params: Any) -> None:
    assert read(params) == NO_FORM
    assert read(params, {"session_id": "s", "agentic_context": "{"}).hints == NO_HINTS


@pytest.mark.parametrize(
    ("actions", "hints"),
    [
        # Dynamo's example of a policy (lib/llm, session_kv_hints) sends these two.
        ([("kv.retain", {"ttl_seconds": 2.5, "priority": 3})], Hints(retain_seconds=2.5)),
        ([("kv.evict", {"block_hashes": ["1"]})], Hints(release=True)),
        # The payload that vLLM has proposed.
        (
            [
                (
                    "kv.retain",
                    {
                        "scope": "alice",
                        "directives": [
                            {"start": 0, "end": 32, "priority": 80, "duration": 60.0},
                            {"covers_output": True, "priority": 40, "duration": 5.0},
                        ],
                    },
                )
            ],
            Hints(retain_seconds=60.0),
        ),
        ([("kv.retain", {"directives": [{"priority": 0}]})], Hints(release=True)),
        ([("pin", {})], Hints(retain_seconds=RETAIN_SECONDS_MAX)),
        ([("kv.demote", {}), ("release", {})], Hints(demote=True, release=True)),
        ([("kv.prefetch", {"in_seconds": 9})], Hints(prefetch_in_seconds=9.0)),
        ([("prefetch", {})], Hints(prefetch_in_seconds=0.0)),
    ],
)
def test_an_orchestrator_sends_actions(actions: Any, hints: Hints) -> None:
    assert read(actions=actions) == ReadHints(hints)
    made = [{"action_id": "a", "action_type": kind, "payload": load} for kind, load in actions]
    assert read({"kv_hint": {"protocol_version": "0.1", "actions": made}}) == ReadHints(hints)


def test_an_envelope_of_the_engine_s_caller_comes_to_the_scheduler() -> None:
    """In the bytes in which vLLM sends it to the engine's process."""
    sent = EngineCoreRequest(
        request_id="r",
        prompt_token_ids=[1, 2],
        mm_features=None,
        sampling_params=SamplingParams(),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
        kv_hints=envelope(("kv.retain", {"ttl_seconds": 600})),
    )
    received = MsgpackDecoder(EngineCoreRequest).decode(MsgpackEncoder().encode(sent))
    request = Request.from_engine_core_request(received, None)
    assert read_hints(request).hints == Hints(retain_seconds=600.0)


def test_the_own_form_is_taken_first_and_a_router_s_last() -> None:
    own, action, router = {RETAIN_SECONDS: 0}, [("kv.retain", {"ttl_seconds": 2})], {TTL: 3}
    assert read(own, router, action).hints.retain_seconds == 0
    assert read({RELEASE: True}, router, action).hints == Hints(release=True, retain_seconds=2.0)
    assert read({}, router).hints.retain_seconds == 3


@pytest.mark.parametrize(
    ("params", "hints", "mistake"),
    [
        ({READ: "no"}, Hints(reads=False), "hybridkv.read is 'no', and is taken for false"),
        ({WRITE: None}, Hints(writes=False), "hybridkv.write is None"),
        ({WRITE: 0}, Hints(writes=False), "hybridkv.write is 0"),
        ({WRITE: {"a": [1] * 1000}}, Hints(writes=False), "hybridkv.write is a dict, and is taken"),
        ({RELEASE: 1}, NO_HINTS, "hybridkv.release is 1, and is taken for false"),
        ({RETAIN_SECONDS: "1h"}, NO_HINTS, "hybridkv.retain_seconds is '1h', and is passed over"),
        ({RETAIN_SECONDS: True}, NO_HINTS, "hybridkv.retain_seconds is True"),
        ({RETAIN_SECONDS: -1}, NO_HINTS, "hybridkv.retain_seconds is -1"),
        ({RETAIN_SECONDS: float("nan")}, NO_HINTS, "hybridkv.retain_seconds is nan"),
        ({PREFETCH_IN_SECONDS: []}, NO_HINTS, "hybridkv.prefetch_in_seconds is a list"),
        ({PRIORITY: "high"}, NO_HINTS, "hybridkv.priority is 'high', and is passed over"),
        ({PRIORITY: {}}, NO_HINTS, "hybridkv.priority is a dict"),
        ({"hybridkv.wirte": False}, NO_HINTS, "hybridkv.wirte is no key: hybridkv.read, hybridkv."),
        ({"hybridkv." + "x" * 1000: 1}, NO_HINTS, "x is no key: hybridkv.read"),
        ({"kv_hint": {"actions": [{"action_type": "kv.fetch"}]}}, NO_HINTS, "'kv.fetch' is not k"),
        ({"kv_hint": {"actions": [7]}}, NO_HINTS, "kv_hints action None is not known"),
        (
            {"kv_hint": {"actions": [{"action_type": "pin", "payload": {"directives": 1}}]}},
            NO_HINTS,
            "kv_hints action 'pin' has no list of directives",
        ),
    ],
)
def test_a_mistake_is_named_and_is_no_error(params: Any, hints: Hints, mistake: str) -> None:
    found = read(params)
    assert found.hints == hints
    assert mistake in found.mistakes[0].sentence
    assert len(found.mistakes) == 1
    assert len(found.mistakes[0].sentence) < 300
    assert len(found.mistakes[0].name) <= 40


@pytest.mark.parametrize("seconds", [1e300, 2**64 - 1, float("inf")])
def test_a_long_time_is_shortened_and_counted(seconds: float) -> None:
    both = read({RETAIN_SECONDS: seconds, PREFETCH_IN_SECONDS: seconds})
    assert both.shortened == 2
    assert both.hints.retain_seconds == RETAIN_SECONDS_MAX
    assert both.hints.prefetch_in_seconds == PREFETCH_SECONDS_MAX
    assert not both.mistakes


def test_an_engine_s_caller_may_hand_over_any_number() -> None:
    """vLLM's API server refuses those beyond 64 bits."""
    huge = read(actions=[("pin", {"ttl_seconds": 10**5000})])
    assert huge == ReadHints(Hints(retain_seconds=RETAIN_SECONDS_MAX), shortened=1)
    assert len(read(actions=[("pin", {"ttl_seconds": -(10**5000)})]).mistakes) == 1


def test_the_work_has_a_bound_whatever_is_sent() -> None:
    """A hook reads this. A hundred thousand of anything take no longer than some."""
    many = {f"hybridkv.{number}": True for number in range(100_000)}
    found = read({**many, RETAIN_SECONDS: 5})
    assert found.hints.retain_seconds == 5
    assert len(found.mistakes) < 100
    actions: Any = [("kv.unheard", {})] * 100_000
    assert len(read(actions=actions).mistakes) < 100
    directives: Any = [("kv.retain", {"directives": [{"duration": -1}] * 10_000})] * 1000
    assert len(read(actions=directives).mistakes) < 200
    deep = {"agentic_context": "[" * 100_000}
    assert read(None, deep).hints == NO_HINTS
    assert read(None, {"agentic_context": "[" * 16_000}).hints == NO_HINTS
