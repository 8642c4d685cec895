"""Prefill and decode apart: a router sends a prompt to one engine, and then to the other."""

import contextlib
import json
import signal
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from hybridkv.lab.models import bundled_environment, computes_16_bits
from hybridkv.lab.tiny_model import write_tokenizer
from tests.engine.routers import PrefillDecodeRouter, Router, XpydProxy, needs_vllm_router
from tests.engine.server import Server
from tests.engine.support import VOCABULARY, arguments_of, prompt, stats
from tests.forked_daemon import ForkedDaemon
from tests.waiting import is_stopped, until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600), needs_vllm_router]

CHUNK = {"gemma3": 128, "qwen3": 128, "lfm2": 128, "deepseekv2": 128, "qwen3next": 256}
CHUNKS, TAIL = 3, 20
FLOAT32 = () if computes_16_bits() else ("--dtype=float32",)
OPTIONS: dict[str, Sequence[str]] = {"deepseekv2": FLOAT32}
"""Of vLLM, after the bundled model's own. MLA kernels of newer processors take bfloat16 alone."""
AT_ONCE = {"qwen3next": 1, "deepseekv2": 16 if FLOAT32 else 1}
"""Prompts at once, 16 elsewhere. vLLM itself rounds bfloat16 in another way where it computes
several answers at once (docs/prefill-decode.md)."""
ROUNDING, PRINTED = 1e-4, 1e-12
"""Between log-probabilities of one prompt in batches of other sizes. Alone they are the same, as
far as a router prints the digits that it has read."""
ROUTERS: dict[str, type[PrefillDecodeRouter | XpydProxy]] = {
    "vllm-router": PrefillDecodeRouter,
    "xpyd-proxy": XpydProxy,
}
HIT_TOKENS = "vllm:external_prefix_cache_hits_total"
RUNNING = "vllm:num_requests_running"
LONG_CHUNKS = 24  # Of a prompt that is not computed before its client can leave.


class Pair:
    """A server that computes prompts, one that answers, a daemon between, and a router before."""

    def __init__(self, model: str, place: Path, stack: contextlib.ExitStack, router: str) -> None:
        # Prompts that are under way at once, and their slots, need more than tests have otherwise.
        self.daemon = ForkedDaemon(str(place / "daemon.sock"), "256MiB")
        stack.enter_context(self.daemon)
        write_tokenizer(place, VOCABULARY)

        def start(role: str) -> Server:
            arguments = arguments_of(
                model,
                self.daemon.socket_path,
                *OPTIONS.get(model, ()),
                extra={"load_policy": "always"},
                role=role,
            )
            arguments.remove("--skip-tokenizer-init")  # Without one, HTTP has no log-probabilities.
            arguments += [f"--tokenizer={place}", "--enable-prompt-tokens-details"]
            environment = bundled_environment(model)
            return stack.enter_context(Server(arguments, place / f"{role}.log", environment))

        with ThreadPoolExecutor() as pool:
            self.prefill, self.decode = pool.map(start, ("kv_producer", "kv_consumer"))
        proxy = ROUTERS[router](self.prefill.url, self.decode.url, place / "router.log")
        self.router: Router = stack.enter_context(proxy)
        self.merges_usage = router == "vllm-router"

    def complete(self, text: Sequence[int]) -> Any:
        """Returns the answer of the decoder, which the router asks."""
        return json.loads(self.router.ask("/v1/completions", request(text)))

    def hit_of_prefiller(self, text: Sequence[int]) -> Any:
        """Returns the answer of the prefiller alone, which has the prompt in its own cache."""
        return json.loads(self.prefill.post("/v1/completions", request(text)))


def request(text: Sequence[int]) -> dict[str, Any]:
    """Returns a request for an answer of a prompt of token ids."""
    body = {"model": "tiny", "prompt": [*text], "max_tokens": 8, "temperature": 0}
    return {**body, "ignore_eos": True, "return_token_ids": True, "logprobs": 0}


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def check(pair: Pair, texts: Sequence[list[int]], hit: int, is_new: bool = True) -> None:
    """Every answer is that of one engine's own hit of the same length, and hits all there is.

    vllm-router answers with the prefiller's count of cached tokens: none of a new prompt.
    """
    before = pair.decode.total(HIT_TOKENS)
    with ThreadPoolExecutor(len(texts)) as pool:
        answers = [*pool.map(pair.complete, texts)]
    assert pair.decode.total(HIT_TOKENS) - before == hit * len(texts)
    for text, answer in zip(texts, answers, strict=True):
        own = pair.hit_of_prefiller(text)
        assert own["usage"]["prompt_tokens_details"]["cached_tokens"] == hit
        reported = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert reported == (0 if pair.merges_usage else hit) or (pair.merges_usage and not is_new)
        ours, theirs = answer["choices"][0], own["choices"][0]
        assert ours["token_ids"] == theirs["token_ids"]
        logprobs = theirs["logprobs"]["token_logprobs"]
        rounding = ROUNDING if len(texts) > 1 else PRINTED
        assert ours["logprobs"]["token_logprobs"] == pytest.approx(logprobs, abs=rounding, rel=0)
    assert stats(pair.daemon.socket_path)["promises_broken"] == 0


@pytest.mark.soak
@pytest.mark.parametrize("router", ROUTERS)
def test_the_decoder_hits_all_that_the_prefiller_stored(
    router: str, tmp_path: Path, stack: contextlib.ExitStack
) -> None:
    pair, hit = Pair("gemma3", tmp_path, stack, router), CHUNKS * CHUNK["gemma3"]
    check(pair, [prompt(seed, hit + TAIL) for seed in range(6)], hit)


@pytest.mark.soak
@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("model", CHUNK)
def test_two_hundred_prompts_through_two_engines(
    model: str, router: str, tmp_path: Path, stack: contextlib.ExitStack
) -> None:
    pair, hit = Pair(model, tmp_path, stack, router), CHUNKS * CHUNK[model]
    at_once = AT_ONCE.get(model, 16)  # The engine's own cache has no room for many more.
    for first in range(0, 200, at_once):
        check(pair, [prompt(seed, hit + TAIL) for seed in range(first, first + at_once)], hit)


@pytest.mark.soak
@pytest.mark.parametrize("router", ROUTERS)
def test_a_stopped_daemon_and_a_client_that_leaves_cost_no_answer(
    router: str, tmp_path: Path, stack: contextlib.ExitStack
) -> None:
    pair, hit = Pair("gemma3", tmp_path, stack, router), CHUNKS * CHUNK["gemma3"]
    check(pair, [prompt(0, hit + TAIL)], hit)
    texts = [prompt(seed, hit + TAIL) for seed in range(1, 5)]
    process = pair.daemon.process
    process.send_signal(signal.SIGSTOP)
    try:
        until(lambda: is_stopped(process.pid), "the daemon is stopped")
        with ThreadPoolExecutor(len(texts)) as pool:
            answers = [*pool.map(pair.complete, texts)]
    finally:
        process.send_signal(signal.SIGCONT)
    for text, answer in zip(texts, answers, strict=True):
        own = pair.hit_of_prefiller(text)
        assert answer["choices"][0]["token_ids"] == own["choices"][0]["token_ids"]
    seeds = iter(range(5, 1000))

    def hits_again() -> bool:
        before = pair.decode.total(HIT_TOKENS)
        pair.complete(prompt(next(seeds), hit + TAIL))
        return pair.decode.total(HIT_TOKENS) - before == hit

    until(hits_again, "both engines have the daemon again")
    chunk = CHUNK["gemma3"]
    text = prompt(1000, LONG_CHUNKS * chunk + TAIL)
    leave_while_it_runs(pair, text)
    check(pair, [text], LONG_CHUNKS * chunk, is_new=False)


def leave_while_it_runs(pair: Pair, text: Sequence[int]) -> None:
    """Ask for an answer, and close the connection while the prefiller computes the prompt."""
    body = json.dumps(request(text)).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: tiny\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", pair.router.port)) as client:
        client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        until(lambda: pair.prefill.total(RUNNING) > 0, "the prefiller computes")
    until(lambda: not pair.prefill.total(RUNNING), "the prefiller has ended the request")
    until(lambda: not pair.decode.total(RUNNING), "the decoder has ended it, if it began")
