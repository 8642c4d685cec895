"""Prefill and decode apart: a router sends a prompt to one engine, and then to the other."""

import contextlib
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from hybridkv.lab.models import bundled_environment
from tests.engine.routers import PrefillDecodeRouter, Router, XpydProxy, needs_vllm_router
from tests.engine.server import Server
from tests.engine.support import arguments_of, prompt, stats
from tests.forked_daemon import ForkedDaemon

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900), needs_vllm_router]

CHUNK = {"gemma3": 128, "qwen3": 128, "lfm2": 128, "qwen3next": 256}
CHUNKS, TAIL = 3, 20
AT_ONCE = {"qwen3next": 1}
"""Prompts at once, 16 elsewhere. vLLM itself rounds Qwen3-Next in another way where it computes
several answers at once: of 96 that were hits of its own cache, 11 had other log-probabilities."""
ROUTERS: dict[str, type[PrefillDecodeRouter | XpydProxy]] = {
    "vllm-router": PrefillDecodeRouter,
    "xpyd-proxy": XpydProxy,
}
HIT_TOKENS = "vllm:external_prefix_cache_hits_total"


class Pair:
    """A server that computes prompts, one that answers, a daemon between, and a router before."""

    def __init__(self, model: str, place: Path, stack: contextlib.ExitStack, router: str) -> None:
        # Prompts that are under way at once, and their slots, need more than tests have otherwise.
        self.daemon = stack.enter_context(ForkedDaemon(str(place / "daemon.sock"), "256MiB"))

        def start(role: str) -> Server:
            arguments = arguments_of(
                model, self.daemon.socket_path, extra={"load_policy": "always"}, role=role
            )
            arguments += ["--enable-prompt-tokens-details"]
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
    return {**body, "ignore_eos": True, "return_token_ids": True}


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def check(pair: Pair, texts: Sequence[list[int]], hit: int) -> None:
    """Every answer is that of one engine's own hit of the same length, and hits all there is.

    vllm-router answers with the prefiller's count of cached tokens, of which there are none.
    """
    before = pair.decode.total(HIT_TOKENS)
    with ThreadPoolExecutor(len(texts)) as pool:
        answers = [*pool.map(pair.complete, texts)]
    assert pair.decode.total(HIT_TOKENS) - before == hit * len(texts)
    for text, answer in zip(texts, answers, strict=True):
        own = pair.hit_of_prefiller(text)
        assert own["usage"]["prompt_tokens_details"]["cached_tokens"] == hit
        reported = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert reported == (0 if pair.merges_usage else hit)
        assert answer["choices"][0]["token_ids"] == own["choices"][0]["token_ids"]
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
