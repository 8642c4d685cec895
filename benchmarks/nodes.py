"""What another node costs: `python -m benchmarks.nodes [--rounds COUNT]`.

Two real daemons stand for two nodes, with a tier between. An engine of the second one asks for a
prompt that an engine of the first one begins to store, a chunk of 1 MiB at a time, as a prefiller
does. The row has the milliseconds from the last commit on the first node to the answer on the
second, which is a hit of the whole prompt, and how often the tier was asked again.
"""

import argparse
import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.programs.tiers.servers import ValkeyServer
from tests.unit.daemon.tierclient import Client, hashes, stats

from benchmarks.rows import print_rows
from hybridkv.core.geometry import Geometry, Group, GroupKind
from hybridkv.core.keys import HASH_BYTES
from hybridkv.core.packed import pack_slots, pack_u64
from hybridkv.lab.daemon_process import DaemonProcess
from hybridkv.wire.messages import Commit, Lookup

CHUNK_BYTES = 1 << 20
GEOMETRY = Geometry((Group(0, GroupKind.FULL, 128, (CHUNK_BYTES,)),), 128, 128, 128)
WAIT_MS = 30_000
PATIENCE_SECONDS = 30.0
PROMPTS = ((8, 0.05), (32, 0.02), (4, 0.5))
"""Chunks of a prompt, and the seconds in which each is computed."""
FIRST_ROUNDS = 2  # In these the tier's speed is not known, and they do not count.


@contextlib.contextmanager
def two_nodes(kind: str) -> Iterator[tuple[Client, Client, str]]:
    """Start two daemons over one tier. Yields a client of each, and the second one's socket."""
    with contextlib.ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url = f"disk://{place}/tier?bytes=4GiB"
        if kind == "valkey":
            url = f"valkey://127.0.0.1:{stack.enter_context(ValkeyServer(place)).port}/0"
        clients, path = [], ""
        for name in ("first", "second"):
            (place / name).mkdir(mode=0o700)
            path = str(place / name / "daemon.sock")
            options = ["--node", name, "--tier", url]
            stack.enter_context(DaemonProcess(path, "1GiB", options=options))
            clients.append(stack.enter_context(Client(path, GEOMETRY, name)))
        yield clients[0], clients[1], path


def ask(client: Client, names: list[bytes]) -> int:
    """Ask for a prompt as a `kv_consumer` does. Returns the lookup's id."""
    number = client.new_id()
    lookup = Lookup(number, number, b"".join(names), WAIT_MS, computed_elsewhere=True)
    client.tell(lookup)
    return number


def store(client: Client, names: list[bytes], seconds: float) -> None:
    """Store a prompt's chunks, each after so many seconds of computing."""
    for at, name in enumerate(names):
        slot = client.wait_slot(CHUNK_BYTES, 1, PATIENCE_SECONDS)
        client.fill(slot, 0, name, CHUNK_BYTES, 1)
        time.sleep(seconds)
        parent = names[at - 1] if at else bytes(HASH_BYTES)
        commit = Commit(pack_slots([slot]), pack_u64([0]), name, parents=parent)
        client.tell(commit)


def measure(kind: str, chunks: int, seconds: float, rounds: int) -> dict[str, Any]:
    """Return a row for prompts of so many chunks over one kind of tier."""
    with two_nodes(kind) as (first, second, path):
        delays = []
        for prompt in range(rounds + FIRST_ROUNDS):
            names = hashes(prompt, chunks)
            number = ask(second, names)
            store(first, names, seconds)
            committed_at = time.monotonic()
            found = second.answer(number)
            delays.append(1e3 * (time.monotonic() - committed_at))
            assert found.chunks == chunks, "the whole prompt is hit"
            second.release(number)
        questions = stats(path)["node_questions"]
    counted = delays[FIRST_ROUNDS:]
    return {
        "tier": kind,
        "chunks": chunks,
        "each after": f"{1e3 * seconds:.0f} ms",
        "median": f"{statistics.median(counted):.0f} ms",
        "worst": f"{max(counted):.0f} ms",
        "questions of a lookup": round(questions / len(delays)),
    }


def main() -> int:
    """Print the rows."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.nodes", description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = [
        measure(kind, chunks, seconds, options.rounds)
        for kind in ("disk", "valkey")
        for chunks, seconds in PROMPTS
    ]
    print_rows(rows, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
