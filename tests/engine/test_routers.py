"""Real routers hear what an engine's node has, also from an engine that nobody has asked yet."""

import contextlib
import itertools
import os
import signal
from pathlib import Path

import pytest
from vllm.distributed.kv_events import BlockStored, KVEventBatch, ZmqEventPublisher

from hybridkv.client.control import ControlClient
from hybridkv.lab.daemon_process import DaemonProcess
from hybridkv.lab.engine_process import EngineProcess
from tests.engine.routers import EventSource, VllmRouter, Worker, free_source, needs_vllm_router
from tests.engine.subscriber import Subscriber
from tests.engine.support import engine, prompt, stats
from tests.waiting import until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

BLOCK, CHUNKS = 128, 3
CHUNK = {"gemma3": 128, "qwen3": 128}
LOAD: dict[str, object] = {"load_policy": "always"}
"""Tiny models compute faster than they load."""


def begin(model: str, daemon: DaemonProcess, source: EventSource, log_path: Path) -> EngineProcess:
    """Returns an engine that publishes KV events, not started yet."""
    return engine(model, log_path, daemon.socket_path, *source.arguments(), extra=LOAD)


def step(running: EngineProcess) -> None:
    """Let an engine within this process's child take a step, without which it publishes nothing."""
    running.generate([5, 6, 7], max_tokens=1)


@needs_vllm_router
def test_a_router_sends_a_turn_to_an_engine_that_was_killed(
    daemon: DaemonProcess, tmp_path: Path
) -> None:
    """Another engine has one block of each prompt, and would get the turns otherwise.

    The full attention of this model is not its first group.
    """
    model, killed, other = "gemma3", free_source(), free_source()
    prompts = [prompt(seed, CHUNKS * CHUNK[model] + 20) for seed in (1, 2)]
    with begin(model, daemon, killed, tmp_path / "first.log") as running:
        running.generate(*prompts, max_tokens=4)

        def is_described() -> bool:
            step(running)
            return stats(daemon.socket_path)["token_book_chunks"] == len(prompts) * CHUNKS

        until(is_described, "the daemon has the tokens of all chunks")
        os.kill(running.process.pid, signal.SIGKILL)
        running.process.wait()
    daemon.kill()
    daemon.start()
    with (
        contextlib.ExitStack() as stack,
        Worker("killed") as worker,
        Worker("other") as other_worker,
        VllmRouter(
            {worker.url: killed, other_worker.url: other}, BLOCK, tmp_path / "router.log"
        ) as router,
    ):
        publisher = ZmqEventPublisher(0, f"tcp://*:{other.port}", f"tcp://*:{other.replay_port}")
        stack.callback(publisher.shutdown)

        def chosen() -> list[str]:
            return [router.complete(text)["choices"][0]["text"] for text in prompts]

        def goes_to_other() -> bool:
            stored = [_first_block(number, text) for number, text in enumerate(prompts)]
            publisher.publish(KVEventBatch(ts=0.0, events=[*stored]))
            return chosen() == ["other"] * len(prompts)

        until(goes_to_other, "the router hears of the other engine's blocks")
        with begin(model, daemon, killed, tmp_path / "second.log") as running:

            def goes_to_killed() -> bool:
                step(running)
                return chosen() == ["killed"] * len(prompts)

            until(goes_to_killed, "the router hears what the node has")


def _first_block(number: int, text: list[int]) -> BlockStored:
    """Returns the event of an engine that has the first block of a prompt in its own memory."""
    return BlockStored(
        block_hashes=[number],
        parent_block_hash=None,
        token_ids=text[:BLOCK],
        block_size=BLOCK,
        lora_id=None,
        medium="GPU",
        lora_name=None,
    )


def test_a_subscriber_that_comes_late_or_misses_some_hears_all(
    daemon: DaemonProcess, tmp_path: Path
) -> None:
    """What it puts together from the replay is what a subscriber that hears all knows."""
    source, prompts = free_source(), map(prompt, itertools.count(), itertools.repeat(400))
    with (
        contextlib.closing(Subscriber(source.endpoint)) as early,
        contextlib.closing(Subscriber(source.endpoint)) as late,
        begin("qwen3", daemon, source, tmp_path / "engine.log") as running,
    ):

        def is_connected() -> bool:
            running.generate(next(prompts), max_tokens=1)
            early.poll()
            return bool(early.events)

        def has_heard_all() -> bool:
            step(running)
            early.poll()
            chunks = stats(daemon.socket_path)["token_book_chunks"]
            return len(early.present("CPU")) == chunks

        until(is_connected, "the subscriber hears the engine")
        early.replay(source.replay_endpoint)
        running.generate(next(prompts), max_tokens=1)
        until(has_heard_all, "every chunk is announced")
        late.replay(source.replay_endpoint)
        assert late.present("CPU") == early.present("CPU") != set()
        with ControlClient(daemon.socket_path) as control:
            control.clear_objects()
        until(has_heard_all, "what was cleared is removed")
        assert not early.present("CPU")
        running.generate(next(prompts), max_tokens=1)
        until(lambda: has_heard_all() and early.present("CPU") != set(), "new chunks are announced")
        late.replay(source.replay_endpoint)
        assert late.present("CPU") == early.present("CPU")
