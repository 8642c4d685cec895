"""Prompts of which a directory has more than RAM has room for, over the socket of a real daemon."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from hybridkv.core.coverage import needed_chunks, part_bytes
from hybridkv.core.geometry import Geometry, Group, GroupKind
from hybridkv.lab.daemon_process import DaemonProcess
from hybridkv.shm.slots import slot_bytes
from tests.forked_daemon import ForkedDaemon
from tests.unit.daemon.tierclient import DISK, Client, is_written, stats
from tests.waiting import until

CHUNKS = 160
RAM = 4 << 20
WAIT_MS = 20_000
FULL = Group(0, GroupKind.FULL, 128, (60_000,))
GEOMETRIES = {
    name: Geometry((FULL, *options), 128, 128, 128)
    for name, options in {
        "full": (),
        "sliding": (Group(1, GroupKind.SLIDING, 128, (30_000,), 256),),
        "chunked": (Group(1, GroupKind.CHUNKED_LOCAL, 128, (30_000,), 512),),
        "recurrent": (Group(1, GroupKind.RECURRENT, 128, (200_000,)),),
    }.items()
}


def hit_bytes(geometry: Geometry, chunks: int) -> int:
    """What RAM holds of a hit."""
    return sum(
        slot_bytes(part_bytes(geometry, group, chunk), geometry.parts(group))
        for group in geometry.groups
        for chunk in needed_chunks(geometry, group, chunks)
    )


def serve(directory: Path, ram: int) -> DaemonProcess:
    options = ["--node", "here", "--tier", f"disk://{directory}/disk?bytes=1GiB"]
    return ForkedDaemon(str(directory / "daemon.sock"), f"{ram >> 20}MiB", options=options)


@pytest.fixture(params=GEOMETRIES, scope="module")
def node(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[DaemonProcess, Client]]:
    """A daemon of little RAM whose directory has two prompts, and a client of it."""
    geometry, directory = GEOMETRIES[request.param], tmp_path_factory.mktemp("node")
    with serve(directory, 128 << 20) as daemon, Client(daemon.socket_path, geometry) as client:
        for prompt in (1, 2):
            client.store(prompt, CHUNKS)
        until(lambda: is_written(daemon.socket_path), "everything is written")
    with serve(directory, RAM) as daemon, Client(daemon.socket_path, geometry) as client:
        until(lambda: stats(daemon.socket_path).get(f"{DISK}is_open") == 1, "the tier is open")
        yield daemon, client


def test_the_longest_prefix_that_ram_can_hold_is_hit(node: tuple[DaemonProcess, Client]) -> None:
    """Each time, whatever is in RAM then; `explain` gets the reason and it is counted."""
    daemon, client = node
    whole = hit_bytes(client.geometry, CHUNKS)
    assert whole > 2 * RAM
    before = stats(daemon.socket_path).get("promotions_no_room", 0)
    for lookup, prompt in enumerate((1, 2, 1), 1):
        found = client.look_up(prompt, CHUNKS, WAIT_MS).found
        held = hit_bytes(client.geometry, found.chunks)
        assert 0.9 * RAM < held <= RAM
        assert found.why == f"RAM has room for {found.chunks * 128} of {CHUNKS * 128} tokens"
        assert stats(daemon.socket_path)["promotions_no_room"] == before + lookup


def test_what_others_read_is_left_to_them(node: tuple[DaemonProcess, Client]) -> None:
    """A lease takes three quarters of RAM: the other prompt is hit as far as the rest goes."""
    _, client = node
    lease = client.ask(1, CHUNKS * RAM * 3 // 4 // hit_bytes(client.geometry, CHUNKS), WAIT_MS)
    leased = client.answer(lease)
    taken_bytes = hit_bytes(client.geometry, leased.chunks)
    assert taken_bytes > RAM // 2
    found = client.look_up(2, CHUNKS, WAIT_MS).found
    assert 0.7 * (RAM - taken_bytes) < hit_bytes(client.geometry, found.chunks) <= RAM - taken_bytes
    assert found.why == f"RAM has room for {found.chunks * 128} of {CHUNKS * 128} tokens"
    client.prove(leased, 1)
    client.release(lease)
