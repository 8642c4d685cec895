"""`hybridkv fsck` over real files."""

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from hybridkv.cli.main import main
from hybridkv.core.tier_urls import parse_tier
from hybridkv.shm.slots import SLOT_ALIGN
from hybridkv.tiers.coding import Codec, Coding
from hybridkv.tiers.conformance.samples import make_sample, read
from hybridkv.tiers.contract import MissingError
from hybridkv.tiers.disk.files import FileName
from hybridkv.tiers.disk.tier import DiskTier
from hybridkv.tiers.disk.writers import QUIET_SECONDS
from hybridkv.tiers.encoded import EncodedTier
from hybridkv.tiers.encryption import read_key
from tests.forked_daemon import ForkedDaemon
from tests.invariants import check_disk
from tests.unit.daemon.tierclient import Client, is_written, object_files
from tests.waiting import until

OBJECTS = 12


def opened(root: Path, writer: str = "here") -> DiskTier:
    tier = DiskTier(parse_tier(f"disk://{root}?bytes=64MiB", "disk", writer))
    tier.open()
    return tier


def filled(root: Path, writer: str = "here") -> DiskTier:
    tier = opened(root, writer)
    assert (
        tier.put([make_sample(number).write_request() for number in range(OBJECTS)])
        == [None] * OBJECTS
    )
    return tier


def silence(root: Path, writer: str = "here") -> None:
    """Make the writer's sign of life so old that the writer is taken for dead."""
    alive = root / "objects" / writer / "alive"
    time = alive.stat().st_mtime - 2 * QUIET_SECONDS
    os.utime(alive, (time, time))


class FsckResult(NamedTuple):
    """The exit status of fsck, and what it prints with --json."""

    status: int
    report: dict[str, Any]


def fsck(root: Path, capsys: pytest.CaptureFixture[str], *options: str) -> FsckResult:
    capsys.readouterr()
    status = main(["fsck", "--disk", str(root), "--json", *options])
    return FsckResult(status, json.loads(capsys.readouterr().out))


def path_of(root: Path, number: int, writer: str = "here") -> Path:
    return root / "objects" / writer / FileName(make_sample(number).key).path


def flip(at: int) -> Callable[[bytearray], None]:
    def damage(raw: bytearray) -> None:
        raw[at] ^= 1

    return damage


class Damage(NamedTuple):
    """A way to damage a file, and the reason that fsck gives then."""

    reason: str
    change: Callable[[bytearray], None]


DAMAGES: dict[str, Damage] = {
    "header": Damage("header", flip(20)),
    "checksum": Damage("header", flip(130)),
    "payload": Damage("bytes", flip(5000)),
    "tail": Damage("bytes", flip(-1)),
    "empty": Damage("zero length", lambda raw: raw.clear()),
    "cut": Damage("length", lambda raw: raw.__delitem__(slice(512, None))),
    "a page short": Damage("length", lambda raw: raw.__delitem__(slice(-SLOT_ALIGN, None))),
    "a page more": Damage("length", lambda raw: raw.extend(bytes(SLOT_ALIGN))),
    "random": Damage(
        "header", lambda raw: raw.__setitem__(slice(None), random.Random(1).randbytes(len(raw)))
    ),
}


def test_whole_records_are_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here = filled(tmp_path)
    filled(tmp_path, "there")
    here.close()
    status, report = fsck(tmp_path, capsys)
    assert status == 0
    assert report["damaged"] == 0
    assert [(writer["name"], writer["whole"]) for writer in report["writers"]] == [
        ("here", OBJECTS),
        ("there", 0),
    ]
    disk_bytes = sum(path.stat().st_blocks * 512 for path in object_files(tmp_path))
    assert report["writers"][0]["whole_bytes"] == disk_bytes
    assert main(["fsck", "--disk", str(tmp_path)]) == 0
    assert "here" in capsys.readouterr().out


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_file_is_told_and_put_aside(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    tier = filled(tmp_path)
    reason, damage = DAMAGES[how]
    path = path_of(tmp_path, 3)
    raw = bytearray(path.read_bytes())
    damage(raw)
    path.write_bytes(raw)
    status, report = fsck(tmp_path, capsys)
    assert status == 1
    assert report["writers"][0]["damaged"] == {reason: 1}
    assert report["writers"][0]["whole"] == OBJECTS - 1
    assert report["files"] == [{"path": str(path), "damage": reason, "done": ""}]
    assert path.exists(), "nothing is changed unless it is asked for"
    status, report = fsck(tmp_path, capsys, "--repair")
    assert (status, report["repaired"], report["quarantined"]) == (0, 1, 1)
    status, report = fsck(tmp_path, capsys)
    assert (status, report["damaged"], report["writers"][0]["whole"]) == (0, 0, OBJECTS - 1)
    assert isinstance(read(tier, make_sample(3)), MissingError), "the daemon that knew it goes on"
    assert tier.put([make_sample(3).write_request()]) == [None]
    check_disk(tier)


def test_a_file_in_another_files_place_is_misnamed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    filled(tmp_path)
    silence(tmp_path)
    path = path_of(tmp_path, 1)
    elsewhere = path.parent.parent / ("00" if path.parent.name != "00" else "01")
    elsewhere.mkdir()
    path.rename(elsewhere / path.name)
    assert fsck(tmp_path, capsys).report["writers"][0]["damaged"] == {"misnamed": 1}
    assert fsck(tmp_path, capsys, "--repair").status == 0
    assert path.exists()


def test_what_is_not_the_tiers_is_counted_and_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    filled(tmp_path)
    home = tmp_path / "objects/here"
    foreign = [
        home / "notes",
        path_of(tmp_path, 1).parent / "notes",
        path_of(tmp_path, 1).parent / "ab.cd",
    ]
    for path in foreign:
        path.write_text("mine")
    link = home / FileName(make_sample(50).key).path
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(path_of(tmp_path, 1))
    status, report = fsck(tmp_path, capsys, "--repair")
    assert (status, report["writers"][0]["foreign"]) == (0, 4)
    assert all(path.exists() for path in [*foreign, link])


def test_beside_a_living_daemon(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It stores, evicts and reads while its directory is repaired again and again, undamaged."""
    options = ["--disk", str(tmp_path / "disk"), "--disk-bytes", "1MiB", "--node", "here"]
    with (
        ForkedDaemon(str(tmp_path / "d.sock"), "16MiB", options=options) as daemon,
        Client(daemon.socket_path) as client,
    ):
        for prompt in range(20):
            client.store(prompt, 3)
            status, report = fsck(tmp_path / "disk", capsys, "--repair")
            assert (status, report["damaged"]) == (0, 0)
            assert report["writers"][0]["is_alive"]
            client.look_up(prompt, 3)
        until(lambda: is_written(daemon.socket_path), "everything is written")
        values = client.values()
        assert not values["tier_disk_failures"]
        assert values["tier_disk_objects_written"] == values["objects_stored"]


def test_encrypted_objects_need_the_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With it plain objects, which the daemon wrote before, are proven too."""
    key, root = tmp_path / "tier.key", tmp_path / "disk"
    key.write_bytes(bytes(32))
    key.chmod(0o600)
    tier = EncodedTier(filled(root), Coding(Codec.ZPLANES, read_key(str(key), "key")))
    assert tier.put([make_sample(OBJECTS).write_request()]) == [None]
    for options, found in (((), (OBJECTS, 1)), (("--key", f"file:{key}"), (OBJECTS + 1, 0))):
        status, report = fsck(root, capsys, *options)
        (writer,) = report["writers"]
        assert (status, (writer["whole"], writer["undecodable"])) == (0, found)
    assert main(["fsck", "--disk", str(root), "--key", str(key)]) == 2
    assert "key=file:/etc/hybridkv/tier.key works" in capsys.readouterr().err


@pytest.mark.parametrize("what", ["nothing", "other", "file"])
def test_what_is_no_tier_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    root = tmp_path / "root"
    if what == "file":
        root.write_text("")
    else:
        root.mkdir()
    if what == "other":
        (root / "hybridkv-tier").write_text("99\n")
    assert main(["fsck", "--disk", str(root)]) == 2
    assert "works" in capsys.readouterr().err
