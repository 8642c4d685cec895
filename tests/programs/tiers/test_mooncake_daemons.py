"""Two daemons that give memory to one Mooncake store: one of them dies, and the master restarts."""

import contextlib
from pathlib import Path

import pytest

from hybridkv.lab.daemon_process import DaemonProcess
from tests.programs.tiers.master import Master, needs_mooncake
from tests.unit.daemon.tierclient import Client, stats
from tests.waiting import until

PROMPTS, CHUNKS = 40, 8
RAM = "4MiB"  # A fraction of the prompts, so that most lookups read the store.
WAIT_MS = 2000
SLACK_SECONDS = 10.0
TIMEOUT_SECONDS = 3
COMING_SECONDS = 240.0


class Node:
    """A daemon that gives memory to the store, and a client of it."""

    def __init__(self, place: Path, master: Master) -> None:
        place.mkdir(mode=0o700)
        self.log = place / "log"
        url = master.url(size="64MiB", timeout=TIMEOUT_SECONDS)
        options = ["--node", place.name, "--tier", url, "--log-file", str(self.log)]
        self.daemon = DaemonProcess(str(place / "daemon.sock"), RAM, options=options)

    def value(self, name: str) -> float:
        """The value of a metric of the store."""
        return stats(self.daemon.socket_path).get(f"tier_mooncake_{name}", 0.0)

    def store(self, prompts: range) -> None:
        """Store prompts, each until the store has it."""
        for prompt in prompts:
            with Client(self.daemon.socket_path, name="writer") as client:
                client.store(prompt, CHUNKS)
            until(lambda: not stats(self.daemon.socket_path)["writes_waiting"], "it is written")

    def hit_chunks(self, prompts: range) -> int:
        """Look up prompts and prove each byte. Every answer comes in time. Returns the chunks."""
        chunks = 0
        with Client(self.daemon.socket_path, name="reader") as client:
            for prompt in prompts:
                answer = client.look_up(prompt, CHUNKS, WAIT_MS)
                assert answer.seconds < WAIT_MS / 1e3 + SLACK_SECONDS
                chunks += answer.found.chunks
        return chunks


@needs_mooncake
@pytest.mark.soak
def test_two_daemons_one_of_which_dies_and_a_master_that_restarts(tmp_path: Path) -> None:
    master = Master(tmp_path / "master.log", lease="5s")
    everything, half = range(PROMPTS), PROMPTS // 2
    with contextlib.ExitStack() as stack:
        stack.callback(master.kill)
        here, there = Node(tmp_path / "here", master), Node(tmp_path / "there", master)
        for node in (here, there):
            stack.enter_context(node.daemon)
            until(lambda node=node: node.value("is_open") == 1, "it is open")  # type: ignore[misc]
        here.store(range(half))
        there.store(range(half, PROMPTS))
        for node in (here, there):
            until(
                lambda node=node: node.hit_chunks(everything) == PROMPTS * CHUNKS,  # type: ignore[misc]
                "each has what both stored",
            )
        there.daemon.kill()
        print("hit while one is dead:", here.hit_chunks(everything), "of", PROMPTS * CHUNKS)

        def is_whole() -> bool:
            """As engines do: what is no hit is computed, and stored again."""
            here.store(everything)
            return here.hit_chunks(everything) == PROMPTS * CHUNKS

        # The master takes the dead node for alive for some seconds.
        until(is_whole, "hits come back", COMING_SECONDS)
        failures = here.value("failures")
        master.kill()
        print("hit without a master:", here.hit_chunks(everything))
        until(lambda: here.value("failures") > failures, "it is counted")
        assert "mooncake" in here.log.read_text()
        master.restart()
        until(is_whole, "hits come back again", COMING_SECONDS)
        assert here.value("is_open")
        assert not here.value("breaker_open")
        print(*here.log.read_text().splitlines()[-6:], sep="\n")
