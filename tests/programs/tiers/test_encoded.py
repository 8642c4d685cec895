"""Real daemons, one after the other, over one directory of encoded objects."""

from pathlib import Path

from hybridkv.lab.daemon_process import DaemonProcess
from hybridkv.tiers.record import is_encoded
from tests.forked_daemon import ForkedDaemon
from tests.unit.daemon.tierclient import Client, is_written, object_files, stats
from tests.waiting import until

PROMPTS, CHUNKS = 4, 3
UNDECODABLE = "tier_disk_objects_undecodable"


def key_file(path: Path, byte: int) -> Path:
    path.write_bytes(bytes([byte]) * 32)
    path.chmod(0o600)
    return path


def serve(tmp_path: Path, query: str) -> DaemonProcess:
    url = f"disk://{tmp_path}/tier?bytes=64MiB&{query}"
    options = ("--tier", url, "--node", "here")
    return ForkedDaemon(str(tmp_path / "d.sock"), "16MiB", fresh=True, options=options)


def hits(client: Client) -> int:
    """Chunks that come back, every byte proven."""
    until(lambda: client.values().get("tier_disk_is_open") == 1, "the tier is open")
    return sum(client.look_up(prompt, CHUNKS, 5000).found.chunks for prompt in range(PROMPTS))


def test_what_is_stored_comes_back_for_who_has_the_key_alone(tmp_path: Path) -> None:
    socket, key = str(tmp_path / "d.sock"), key_file(tmp_path / "right.key", 1)
    with serve(tmp_path, f"codec=zplanes&key=file:{key}"), Client(socket) as client:
        for prompt in range(PROMPTS):
            client.store(prompt, CHUNKS)
        until(lambda: is_written(socket), "everything is written")
        values = stats(socket)
        before, after = (values[f"tier_disk_bytes_{when}_encoding"] for when in ("before", "after"))
        assert before > 1.2 * after
    files = object_files(tmp_path / "tier")
    assert files
    assert all(is_encoded(path.read_bytes()) for path in files)
    assert sum(path.stat().st_size for path in files) == after
    with serve(tmp_path, f"key=file:{key}"), Client(socket) as client:
        assert hits(client) == PROMPTS * CHUNKS
        assert not client.values().get(UNDECODABLE)
    for query in ("codec=zplanes", f"key=file:{key_file(tmp_path / 'wrong.key', 2)}"):
        with serve(tmp_path, query), Client(socket) as client:
            assert hits(client) == 0
            values = client.values()
            assert values[UNDECODABLE] > 0
            assert not values.get("tier_disk_objects_damaged")
            assert not values["tier_disk_breaker_open"]
    assert object_files(tmp_path / "tier") == files
