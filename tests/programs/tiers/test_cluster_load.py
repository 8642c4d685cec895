"""Two daemons over a Valkey cluster whose slots move and whose primary dies, under load.

Four clients do over the daemons' sockets what engines do, and prove every byte. Four real engines
give the answers of one that had the same hit in its own cache.
"""

import contextlib
import itertools
import random
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path

import pytest

from hybridkv.client.control import ControlClient
from hybridkv.lab.daemon_process import DaemonProcess
from hybridkv.lab.engine_process import EngineProcess
from hybridkv.lab.judging import answer_deviation
from hybridkv.tiers.valkey.slots import SLOTS
from tests.engine.soak import PROBE_CHUNKS, PROBE_TOKENS, Reference, learn
from tests.engine.support import engine, prompt
from tests.forked_daemon import ForkedDaemon
from tests.load import Asked, Load
from tests.programs.tiers.cluster import ValkeyCluster
from tests.unit.daemon.tierclient import Client, stats
from tests.waiting import until

PROMPTS, CHUNKS = 60, 8
WORKERS = 4
WAIT_MS = 2000
SLACK_SECONDS = 5.0
LOOKUPS = 60  # In each phase, at least.
MOVES = 150
ENGINE_PROMPTS = 24
CLIENTS_RAM, ENGINES_RAM = "4MiB", "24MiB"
"""A fraction of the prompts, so that most lookups read the tier."""


class Nodes:
    """Two daemons over a cluster of three primaries, one of which has a replica."""

    def __init__(self, stack: contextlib.ExitStack, place: Path, ram: str) -> None:
        self.cluster = stack.enter_context(ValkeyCluster(place / "cluster", replicas=1))
        primary, second, _ = self.cluster.primaries
        hosts = f"127.0.0.1:{primary.port},127.0.0.1:{second.port}"
        self.daemons: list[DaemonProcess] = []
        for name in ("first", "second"):
            (place / name).mkdir(mode=0o700)
            options = ["--node", name, "--tier", f"valkey://{hosts}/0?timeout=1"]
            started = ForkedDaemon(str(place / name / "daemon.sock"), ram, options=options)
            self.daemons.append(stack.enter_context(started))

    def await_replica(self) -> None:
        """Wait until the replica has what its primary has."""
        primary, replica = self.cluster.primaries[0], self.cluster.replicas[0]
        until(lambda: replica.call("DBSIZE") == primary.call("DBSIZE"), "the replica has it all")

    def serve_while_it_suffers(self, workers: Sequence[Generator[Asked, None, None]]) -> None:
        """Move slots, kill a primary, and move the slots back, with lookups after each."""
        primary, second, third = self.cluster.primaries
        (replica,) = self.cluster.replicas
        moved = [slot for slot in range(SLOTS) if self.cluster.owner(slot) == 1][:MOVES]
        with Load(workers) as load:
            load.wait("well", LOOKUPS)
            load.phase = "slots move"
            for slot in moved:
                self.cluster.move_slot(slot, second, third)
            load.wait("slots move", LOOKUPS)
            load.phase = "a primary is dead"
            primary.kill()
            # It is elected by the primaries that are left.
            until(lambda: replica.call("ROLE")[0] == b"master", "the replica takes over")
            load.wait("the replica has taken over", LOOKUPS)
            load.phase = "slots move back"
            for slot in moved:
                self.cluster.move_slot(slot, third, second)
            load.wait("slots move back", LOOKUPS)
        load.raise_faults()
        load.print_phases()
        assert max(load.longest_seconds.values()) < WAIT_MS / 1e3 + SLACK_SECONDS

    def is_written(self, daemon: DaemonProcess) -> bool:
        """Whether the tier has every object that was stored."""
        values = stats(daemon.socket_path)
        written = values.get("tier_valkey_objects_written", 0)
        return not values["writes_waiting"] and written >= values["objects_stored"]

    def check(self) -> None:
        """No record was wrong."""
        for daemon in self.daemons:
            values = stats(daemon.socket_path)
            cut = {name: value for name, value in values.items() if name.startswith("promotions_")}
            print("cut:", cut, "not answered in time:", values["deadlines_missed"])
            assert not values.get("tier_valkey_objects_damaged")
            assert not values.get("tier_valkey_objects_wrong_in_ram")


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


# Clients


def ask_as_client(
    daemon: DaemonProcess, number: int, new_prompts: Iterator[int]
) -> Generator[Asked, None, None]:
    rng = random.Random(number)
    with Client(daemon.socket_path, name=f"client{number}") as client:
        while True:
            if rng.random() < 0.1:
                client.store(next(new_prompts), 2)
            found, seconds = client.look_up(rng.randrange(PROMPTS), CHUNKS, WAIT_MS)
            yield Asked(found.chunks / CHUNKS, seconds, found.why)


def hit_chunks(daemon: DaemonProcess) -> int:
    with Client(daemon.socket_path, name="reader") as client:
        return sum(client.look_up(prompt, CHUNKS, 20_000).found.chunks for prompt in range(PROMPTS))


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_clients_over_a_cluster_that_loses_a_primary_and_moves_slots(
    tmp_path: Path, stack: contextlib.ExitStack
) -> None:
    nodes = Nodes(stack, tmp_path, CLIENTS_RAM)
    with Client(nodes.daemons[0].socket_path, name="writer") as client:
        for number in range(PROMPTS):
            client.store(number, CHUNKS)
            until(lambda: nodes.is_written(nodes.daemons[0]), "everything is written")
    nodes.await_replica()
    new_prompts = itertools.count(PROMPTS)
    workers = [
        ask_as_client(nodes.daemons[number % 2], number, new_prompts) for number in range(WORKERS)
    ]
    nodes.serve_while_it_suffers(workers)
    for daemon in nodes.daemons:
        until(lambda: hit_chunks(daemon) == PROMPTS * CHUNKS, "hits come back")  # noqa: B023
    nodes.check()


# Engines


def ask_as_engine(
    running: EngineProcess, numbers: Iterator[int], reference: Reference, chunk_tokens: int
) -> Generator[Asked, None, None]:
    """Ask for answers to prompts of these numbers, which have to be those of an own cache."""
    for number in numbers:
        probe = reference.probes[number]
        running.reset_caches()
        (result,) = running.generate(probe.prompt, max_tokens=PROBE_TOKENS)
        chunks = result["cached_tokens"] // chunk_tokens
        deviation = answer_deviation(result, probe.answers[chunks])
        assert deviation <= reference.tolerance, f"prompt {number}, {chunks} chunks: {deviation}"
        yield Asked(chunks / PROBE_CHUNKS, result["ttft_seconds"], "")


def draws(seed: int) -> Iterator[int]:
    """Yields numbers of prompts without an end."""
    rng = random.Random(seed)
    while True:
        yield rng.randrange(ENGINE_PROMPTS)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_engines_over_a_cluster_that_loses_a_primary_and_moves_slots(
    tmp_path: Path, stack: contextlib.ExitStack
) -> None:
    nodes = Nodes(stack, tmp_path, ENGINES_RAM)
    extra = {"load_policy": "always", "load_timeout_seconds": WAIT_MS / 1e3}
    engines = [
        stack.enter_context(
            engine(
                "gemma3",
                tmp_path / f"engine{number}.log",
                nodes.daemons[number % 2].socket_path,
                extra=extra,
            )
        )
        for number in range(WORKERS)
    ]
    engines[0].generate(prompt(1000, 20), max_tokens=1)
    with ControlClient(nodes.daemons[0].socket_path) as control:
        chunk_tokens = control.engines()[0].geometry.chunk_tokens
    plain = engine("gemma3", tmp_path / "plain.log", None)
    reference = learn(plain, random.Random(0), chunk_tokens, ENGINE_PROMPTS)
    print("tolerance", reference.tolerance)

    def all_are_hit(number: int) -> bool:
        asked = ask_as_engine(engines[number], iter(range(ENGINE_PROMPTS)), reference, chunk_tokens)
        return sum(each.hit_share for each in asked) == ENGINE_PROMPTS

    until(lambda: all_are_hit(0), "every prompt is a hit")
    path = nodes.daemons[0].socket_path
    until(lambda: not stats(path)["writes_waiting"], "everything is written")
    nodes.await_replica()
    workers = [
        ask_as_engine(running, draws(seed), reference, chunk_tokens)
        for seed, running in enumerate(engines)
    ]
    nodes.serve_while_it_suffers(workers)
    for number in range(WORKERS):
        until(lambda: all_are_hit(number), "hits come back")  # noqa: B023
    nodes.check()
