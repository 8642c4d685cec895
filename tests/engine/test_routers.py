"""Real routers hear what an engine's node has, also from an engine that nobody has asked yet."""

import contextlib
import itertools
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
from vllm.distributed.kv_events import BlockStored, KVEventBatch, ZmqEventPublisher

from hybridkv.client.control import ControlClient
from hybridkv.lab.daemon_process import DaemonProcess
from hybridkv.lab.engine_process import EngineProcess
from hybridkv.lab.models import bundled_environment
from tests.engine.routers import DynamoIndexer, EventSource, VllmRouter, Worker, needs_vllm_router
from tests.engine.server import Server
from tests.engine.subscriber import Subscriber
from tests.engine.support import arguments_of, engine, prompt, stats
from tests.forked_daemon import ForkedDaemon
from tests.waiting import until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

BLOCK, CHUNKS = 128, 3
CHUNK = {"gemma3": 128, "qwen3": 128, "qwen3next": 256}
LOAD: dict[str, object] = {"load_policy": "always"}
"""Tiny models compute faster than they load."""


@pytest.fixture
def new_source() -> Iterator[Callable[[], EventSource]]:
    """Yields a function that returns ports of one more engine."""
    with contextlib.ExitStack() as stack:
        yield lambda: stack.enter_context(EventSource())


def begin(model: str, daemon: DaemonProcess, source: EventSource, log_path: Path) -> EngineProcess:
    """Returns an engine that publishes KV events, not started yet."""
    return engine(model, log_path, daemon.socket_path, *source.arguments(), extra=LOAD)


def step(running: EngineProcess) -> None:
    """Let an engine within this process's child take a step, without which it publishes nothing."""
    running.generate([5, 6, 7], max_tokens=1)


@needs_vllm_router
def test_a_router_sends_a_turn_to_an_engine_that_was_killed(
    daemon: DaemonProcess, tmp_path: Path, new_source: Callable[[], EventSource]
) -> None:
    """Another engine has one block of each prompt, and would get the turns otherwise.

    The full attention of this model is not its first group.
    """
    model, killed, other = "gemma3", new_source(), new_source()
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
        publisher = ZmqEventPublisher(0, *other.places)
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
    daemon: DaemonProcess, tmp_path: Path, new_source: Callable[[], EventSource]
) -> None:
    """What it puts together from the replay is what a subscriber that hears all knows."""
    source, prompts = new_source(), map(prompt, itertools.count(), itertools.repeat(400))
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


class Node:
    """A daemon, and over it `vllm serve`, which publishes KV events."""

    def __init__(self, model: str, place: Path, stack: contextlib.ExitStack) -> None:
        place.mkdir(mode=0o700)
        self.source = stack.enter_context(EventSource())
        self.daemon = stack.enter_context(ForkedDaemon(str(place / "daemon.sock"), "64MiB"))
        self._arguments = arguments_of(model, self.daemon.socket_path, extra=LOAD)
        self._arguments += [*self.source.arguments(), "--enable-prompt-tokens-details"]
        self._model, self._log_path, self._stack = model, place / "server.log", stack
        self.server = self._new_server(0)

    def _new_server(self, port: int) -> Server:
        environment = bundled_environment(self._model)
        return self._stack.enter_context(
            Server(self._arguments, self._log_path, environment, port=port)
        )

    def kill(self) -> None:
        """Kill the server and the daemon with -9."""
        self.server.kill()
        self.daemon.kill()

    def restart(self) -> None:
        """Start both again, at their addresses."""
        self.daemon.start()
        self.server = self._new_server(self.server.port)

    def asked_tokens(self) -> float:
        """Returns the tokens of all prompts that the server was asked for."""
        return self.server.total("vllm:prompt_tokens_total")


class Turn(NamedTuple):
    """What came of a request to the router."""

    node: Node
    """The node whose engine got the request."""
    cached_tokens: int


def take_turn(router: VllmRouter, nodes: Sequence[Node], text: list[int]) -> Turn:
    """Send a request through the router."""
    before = [node.asked_tokens() for node in nodes]
    usage = router.complete(text)["usage"]
    (node,) = [
        node for node, asked in zip(nodes, before, strict=True) if node.asked_tokens() > asked
    ]
    return Turn(node, (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0)


@pytest.mark.soak
@needs_vllm_router
@pytest.mark.parametrize("model", CHUNK)
def test_conversations_go_back_to_their_node_after_kills(model: str, tmp_path: Path) -> None:
    """Two nodes with `vllm serve` behind vllm-router, and in view of Dynamo's indexer.

    All prompts begin with one chunk that both nodes have, so a router that knows no more of one of
    them chooses the other. A restarted engine is a new instance to the indexer, as to Dynamo's
    router.
    """
    shared, tokens = CHUNK[model], CHUNKS * CHUNK[model]
    with contextlib.ExitStack() as stack:
        indexer = stack.enter_context(DynamoIndexer(tmp_path / "indexer.log"))
        places = tmp_path / "killed", tmp_path / "other"
        with ThreadPoolExecutor() as pool:  # Both servers start at once.
            nodes = [*pool.map(lambda place: Node(model, place, stack), places)]
        killed = nodes[0]
        for number, node in enumerate(nodes):
            indexer.register(number, node.source, BLOCK)
        router = VllmRouter(
            {node.server.url: node.source for node in nodes}, BLOCK, tmp_path / "router.log"
        )
        stack.enter_context(router)
        subscribers = [Subscriber(node.source.endpoint) for node in nodes]
        for subscriber in subscribers:
            stack.callback(subscriber.close)
        begun_with = prompt(99, shared)
        texts = {seed: [*begun_with, *prompt(seed, tokens - shared + 20)] for seed in range(6)}
        homes = {seed: nodes[seed % 2] for seed in texts}
        for seed, text in texts.items():
            homes[seed].server.complete(text)

        blocks = (shared + len(texts) // 2 * (tokens - shared)) // BLOCK  # Of each node.

        def are_announced() -> bool:
            for subscriber in subscribers:
                subscriber.poll()
            return all(len(subscriber.present("CPU")) == blocks for subscriber in subscribers)

        def are_known(killed_number: int) -> bool:
            known = [indexer.known_tokens(text) for text in texts.values()]
            of_killed, of_other = (
                {killed_number: tokens, 1: shared},
                {killed_number: shared, 1: tokens},
            )
            return known == [of_killed, of_other] * (len(texts) // 2)

        until(are_announced, "every chunk is announced")
        until(lambda: are_known(0), "the indexer hears of all conversations")

        def turns() -> list[Turn]:
            return [take_turn(router, nodes, [*text, *prompt(98, 9)]) for text in texts.values()]

        at_home = [Turn(homes[seed], tokens) for seed in texts]
        assert turns() == at_home

        killed.kill()
        indexer.unregister(0)
        indexer.register(2, killed.source, BLOCK)
        killed.restart()
        assert not killed.asked_tokens(), "nobody has asked the engine yet"
        # The indexer connects again only seconds after the first events, and asks for what it
        # missed when it hears the next ones.
        other_prompts = map(prompt, itertools.count(100), itertools.repeat(BLOCK + 20))

        def are_known_again() -> bool:
            killed.server.complete(next(other_prompts))
            return are_known(2)

        until(are_known_again, "the indexer hears what the node has")
        until(router.has_all_workers, "the router finds that the server is back")
        again = turns()
        print(f"{model}: back: {[turn.node is homes[seed] for seed, turn in enumerate(again)]}")
        print(f"cached tokens: {[turn.cached_tokens for turn in again]}")
        assert again == at_home
