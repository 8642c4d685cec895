"""A directory of objects is moved by copying it, as to another machine."""

import shutil
from pathlib import Path

from hybridkv.lab.daemon_process import DaemonProcess
from tests.forked_daemon import ForkedDaemon
from tests.unit.daemon.tierclient import Client, is_written, object_files
from tests.waiting import until

CHUNKS = 3


def serve(directory: Path, node: str) -> DaemonProcess:
    options = ("--disk", str(directory), "--disk-bytes", "64MiB", "--node", node)
    return ForkedDaemon(f"{directory}.sock", "16MiB", fresh=True, options=options)


def test_a_copied_directory_is_hit_by_a_daemon_of_another_name(tmp_path: Path) -> None:
    """Every byte is proven, and the daemon takes the files for its own, so its bound has them."""
    original, copied = tmp_path / "from", tmp_path / "to"
    with serve(original, "here") as daemon, Client(daemon.socket_path) as client:
        client.store(1, CHUNKS)
        until(lambda: is_written(daemon.socket_path), "everything is written")
    files = object_files(original)
    shutil.copytree(original, copied)
    with serve(copied, "there") as daemon, Client(daemon.socket_path) as client:
        until(lambda: client.values().get("tier_disk_is_open") == 1, "the tier is open")
        assert client.look_up(1, CHUNKS, 5000).found.chunks == CHUNKS
        assert client.values()["tier_disk_objects"] == len(files) > 0
    assert {path.parents[1].name for path in object_files(copied)} == {"there"}
    assert object_files(original) == files, "what was copied stays"
