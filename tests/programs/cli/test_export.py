"""`hybridkv export` and `hybridkv import` over real files and a real daemon."""

import json
import os
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from hybridkv.cli import bundle
from hybridkv.cli.bundle import END_MEMBER
from hybridkv.cli.main import main
from hybridkv.client.control import ControlClient
from hybridkv.core.tier_urls import parse_tier
from hybridkv.shm.slots import HEADER_BYTES, committed_slots
from hybridkv.tiers.coding import Codec, Coding
from hybridkv.tiers.conformance.samples import make_sample, read
from hybridkv.tiers.disk import files
from hybridkv.tiers.disk.files import FileName
from hybridkv.tiers.disk.tier import DiskTier
from hybridkv.tiers.encoded import EncodedTier
from hybridkv.tiers.encryption import read_key
from tests.forked_daemon import ForkedDaemon
from tests.layouts import LAYOUTS
from tests.unit.daemon.tierclient import IDENTITY, Client, object_files, real_bytes, stats
from tests.waiting import until

OBJECTS = 8
CHUNKS = 3
OTHER = b"o" * 32


def opened(root: Path, writer: str = "here", size: str = "64MiB") -> DiskTier:
    tier = DiskTier(parse_tier(f"disk://{root}?bytes={size}", "disk", writer))
    tier.open()
    return tier


def filled(root: Path, objects: int = OBJECTS) -> DiskTier:
    tier = opened(root)
    for number in range(objects):
        record = make_sample(number, namespace=(IDENTITY, OTHER)[number % 2])
        assert tier.put([record.write_request()]) == [None]
        os.utime(root / "objects/here" / FileName(record.key).path, (number, number))
    return tier


class CommandResult(NamedTuple):
    """The exit status of a command, and what it prints with --json."""

    status: int
    document: dict[str, Any]


def command(capsys: pytest.CaptureFixture[str], *words: object) -> CommandResult:
    capsys.readouterr()
    status = main([*map(str, words), "--json"])
    return CommandResult(status, json.loads(capsys.readouterr().out))


def members(file: Path) -> list[tarfile.TarInfo]:
    with tarfile.open(file) as tar:
        return tar.getmembers()


def has(root: Path, numbers: range, writer: str = "reader") -> list[bool]:
    """Whether a daemon finds records; those that it does are proven."""
    tier = opened(root, writer)
    return [
        read(tier, make_sample(number, namespace=(IDENTITY, OTHER)[number % 2])) is None
        for number in numbers
    ]


def test_what_was_exported_can_be_imported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    filled(tmp_path / "from")
    file = tmp_path / "all.tar"
    status, document = command(capsys, "export", file, "--disk", tmp_path / "from")
    assert (status, document["objects"]) == (0, OBJECTS)
    assert document["bytes"] == sum(path.stat().st_size for path in object_files(tmp_path / "from"))
    by_age = [
        FileName(make_sample(n, namespace=(IDENTITY, OTHER)[n % 2]).key).text
        for n in range(OBJECTS)
    ]
    assert [member.name for member in members(file)] == [*by_age, END_MEMBER]
    status, document = command(capsys, "import", file, "--disk", tmp_path / "to")
    assert (status, document["objects"], document["kept"]) == (0, OBJECTS, OBJECTS)
    assert all(has(tmp_path / "to", range(OBJECTS)))
    status, document = command(capsys, "import", file, "--disk", tmp_path / "to")
    assert (status, document["objects"], document["there already"]) == (0, 0, OBJECTS), (
        "once is enough"
    )


def test_encrypted_objects_need_the_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = tmp_path / "tier.key"
    key.write_bytes(bytes(32))
    key.chmod(0o600)
    coding = Coding(Codec.ZPLANES, read_key(str(key), "key"))
    tier = EncodedTier(opened(tmp_path / "from"), coding)
    samples = [make_sample(number) for number in range(OBJECTS)]
    assert tier.put([record.write_request() for record in samples]) == [None] * OBJECTS
    file, disk, with_key = tmp_path / "all.tar", tmp_path / "from", ("--key", f"file:{key}")
    why = "it is encrypted, and there is no key="
    status, document = command(capsys, "export", file, "--disk", disk)
    assert (status, document["objects"], document[why]) == (1, 0, OBJECTS)
    status, document = command(capsys, "fsck", "--disk", disk)
    assert (status, document["writers"][0]["undecodable"]) == (0, OBJECTS)
    status, document = command(capsys, "fsck", "--disk", disk, *with_key)
    assert (status, document["writers"][0]["whole"]) == (0, OBJECTS)
    status, document = command(capsys, "export", file, "--disk", disk, "--force", *with_key)
    assert (status, document["objects"]) == (0, OBJECTS)
    # What is exported is as encrypted as it was.
    assert command(capsys, "import", file, "--disk", tmp_path / "to").document[why] == OBJECTS
    status, document = command(capsys, "import", file, "--disk", tmp_path / "to", *with_key)
    assert (status, document["objects"]) == (0, OBJECTS)
    reader = EncodedTier(opened(tmp_path / "to", "reader"), coding)
    assert [read(reader, record) for record in samples] == [None] * OBJECTS
    assert main(["fsck", "--disk", str(disk), "--key", str(key)]) == 2
    assert "key=file:/etc/hybridkv/tier.key works" in capsys.readouterr().err


def test_any_damaged_byte_of_the_file_is_noticed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Wherever it is: what is imported is exact, and the status says that something was not."""
    filled(tmp_path / "from", 2)
    file = tmp_path / "all.tar"
    command(capsys, "export", file, "--disk", tmp_path / "from")
    good = file.read_bytes()
    size = make_sample(0).record.size_bytes
    for number, at in enumerate(range(0, len(good) - 9 * 512, 1531)):
        file.write_bytes(good[:at] + bytes([good[at] ^ 8]) + good[at + 1 :])
        to = tmp_path / f"to-{number}"
        capsys.readouterr()
        status = main(["import", str(file), "--disk", str(to)])
        exact = has(to, range(2))
        if all(exact):
            assert status == 0 or at < 2 * (size + 4096), f"byte {at}"
        else:
            assert status in (1, 2), f"byte {at}"


@pytest.mark.parametrize("part", [0.2, 0.5, 0.9])
def test_a_file_that_was_cut_is_noticed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], part: float
) -> None:
    filled(tmp_path / "from")
    file = tmp_path / "all.tar"
    command(capsys, "export", file, "--disk", tmp_path / "from")
    os.truncate(file, int(file.stat().st_size * part))
    status, document = command(capsys, "import", file, "--disk", tmp_path / "to")
    assert status == 1
    assert 0 < document["objects"] < OBJECTS
    assert document["the file ends too early"] == 1
    assert sum(has(tmp_path / "to", range(OBJECTS))) == document["objects"]


def test_a_file_that_exists_is_replaced_only_by_force(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    filled(tmp_path / "from")
    file = tmp_path / "all.tar"
    file.write_bytes(b"another's")
    words = ["export", str(file), "--disk", str(tmp_path / "from")]
    assert main(words) == 2
    assert capsys.readouterr().err == f"hybridkv: export: {file} exists; --force replaces it\n"
    assert file.read_bytes() == b"another's"
    assert main([*words, "--force"]) == 0
    assert len(members(file)) == OBJECTS + 1


@pytest.mark.parametrize("content", [b"", b"x" * 3000, bytes(10240)])
def test_what_is_no_export_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    file = tmp_path / "file"
    file.write_bytes(content)
    assert main(["import", str(file), "--disk", str(tmp_path / "to")]) in (1, 2)
    assert main(["import", str(tmp_path / "none"), "--disk", str(tmp_path / "to")]) == 2
    assert main(["export", str(tmp_path / "no/file"), "--disk", str(tmp_path / "to")]) == 2
    assert main(["export", str(file), "--force", "--disk", str(tmp_path)]) == 2
    assert file.read_bytes() == content, "an export that fails leaves what was there"
    capsys.readouterr()


def test_an_import_keeps_its_bound(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    filled(tmp_path / "from", 40)
    file = tmp_path / "all.tar"
    command(capsys, "export", file, "--disk", tmp_path / "from")
    status, document = command(
        capsys, "import", file, "--disk", tmp_path / "to", "--disk-bytes", "256KiB"
    )
    assert (status, document["objects"]) == (0, 40)
    assert 0 < document["kept"] < 40
    assert real_bytes(tmp_path / "to") <= 256 << 10
    assert sum(has(tmp_path / "to", range(40))) == document["kept"]
    status, document = command(
        capsys, "import", file, "--disk", tmp_path / "too", "--disk-bytes", "8KiB"
    )
    assert (status, document["no room"]) == (1, 40)


@pytest.mark.parametrize("layout", ["gemma3", "two_ranks", "two_ranks_mla"])
def test_a_living_daemons_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], layout: str
) -> None:
    """Every object of a daemon's memory is a hit, and exact, in a running daemon's directory."""
    geometry, file = LAYOUTS[layout], tmp_path / "ram.tar"
    with (
        ForkedDaemon(str(tmp_path / "a.sock"), "16MiB") as first,
        Client(first.socket_path, geometry) as client,
    ):
        with Client(first.socket_path, geometry, "other", OTHER) as second_engine:
            second_engine.store(1, 1)
        client.store(1, CHUNKS)
        client.values()
        status, document = command(
            capsys, "export", file, "--socket", first.socket_path, "--identity", IDENTITY.hex()
        )
        assert (status, document["objects"]) == (0, CHUNKS * len(geometry.groups))
    disk = tmp_path / "disk"
    with ForkedDaemon(str(tmp_path / "b.sock"), "16MiB", options=["--disk", str(disk)]) as second:
        assert (
            command(capsys, "import", file, "--disk", disk).document["objects"]
            == document["objects"]
        )
        with Client(second.socket_path, geometry) as client:
            until(
                lambda: client.look_up(1, CHUNKS, wait_ms=2000).found.chunks == CHUNKS,
                "the daemon has seen them",
            )
            until(
                lambda: len(list((disk / "objects").iterdir())) == 1,
                "the daemon has taken them over",
            )
            assert client.look_up(1, CHUNKS).found.chunks == CHUNKS
        with Client(second.socket_path, geometry, identity=OTHER) as client:
            assert client.look_up(1, 1, wait_ms=1000).found.chunks == 0
    names = {path.name for path in object_files(disk)}
    assert {member.name for member in members(file)} - {END_MEMBER} == names


def test_a_slot_that_changes_while_it_is_copied_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each slot is written anew between its header and its bytes, has a wrong byte, or no name."""
    changes: list[Callable[[memoryview], None]] = [
        lambda slot: slot.__setitem__(slice(16, 24), bytes(8)),
        lambda slot: slot.__setitem__(slice(0, HEADER_BYTES), bytes(HEADER_BYTES)),
        lambda slot: slot.__setitem__(3000, slot[3000] ^ 1),
        lambda slot: slot.__setitem__(slice(HEADER_BYTES, HEADER_BYTES + 8), bytes(8)),
    ]
    expected = ["changed meanwhile", "changed meanwhile", "damaged", "not signed"]
    with (
        ForkedDaemon(str(tmp_path / "a.sock"), "16MiB") as daemon,
        Client(daemon.socket_path) as client,
    ):
        client.store(1, CHUNKS)
        client.values()
        real = committed_slots
        for change, why in zip(changes, expected, strict=True):

            def changing(memory: memoryview, change: Callable[[memoryview], None] = change) -> Any:
                for number, (offset, header) in enumerate(list(real(memory))):
                    before = bytes(memory[offset : offset + 4096])
                    if number == 2:
                        change(memory[offset : offset + 4096])
                    yield offset, header
                    memory[offset : offset + 4096] = before

            monkeypatch.setattr(bundle, "committed_slots", changing)
            status, document = command(
                capsys, "export", tmp_path / "a.tar", "--socket", daemon.socket_path, "--force"
            )
            assert (status, document["objects"], document[why]) == (
                int(why == "damaged"),
                CHUNKS * 3 - 1,
                1,
            )


def test_an_export_takes_no_memory_of_the_arena(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Who reads a page of shared memory that does not exist yet makes it exist."""
    with (
        ForkedDaemon(str(tmp_path / "a.sock"), "320MiB") as daemon,
        Client(daemon.socket_path) as client,
    ):
        client.store(1, CHUNKS)
        # The rest is reserved when it is soon needed, and that is not now.
        until(
            lambda: stats(daemon.socket_path)["bytes_reserved"] >= 288 << 20,
            "the daemon has reserved what it does",
        )
        with ControlClient(daemon.socket_path) as control:
            arena = Path(control.welcome.arena_path)
        before = arena.stat().st_blocks
        status, document = command(
            capsys, "export", tmp_path / "ram.tar", "--socket", daemon.socket_path
        )
        assert (status, document["objects"]) == (0, CHUNKS * 3)
        assert arena.stat().st_blocks == before


def test_two_exports_to_one_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second comes while the first writes. One of them has the name, and the other says so."""
    filled(tmp_path / "from")
    filled(tmp_path / "few", 2)
    file, statuses = tmp_path / "all.tar", list[int]()
    prove_file = files.prove_file

    def meanwhile(*arguments: Any) -> Any:
        monkeypatch.setattr(files, "prove_file", prove_file)
        statuses.append(main(["export", str(file), "--disk", str(tmp_path / "few")]))
        return prove_file(*arguments)

    monkeypatch.setattr(files, "prove_file", meanwhile)
    statuses.append(main(["export", str(file), "--disk", str(tmp_path / "from")]))
    assert statuses == [0, 2]
    says = f"hybridkv: export: {file} exists; --force replaces it"
    assert capsys.readouterr().err.splitlines()[-1] == says
    assert len(members(file)) == 2 + 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all.tar", "few", "from"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    """Nor does it show where the command was."""
    filled(tmp_path / "from")
    code = (
        "import os, sys; from hybridkv.cli.main import main; from hybridkv.cli import bundle\n"
        "write = bundle.Bundle.write_record\n"
        "def interrupted(*words): write(*words); os.kill(os.getpid(), int(sys.argv[1]))\n"
        "bundle.Bundle.write_record = interrupted\n"
        "sys.exit(main(sys.argv[2:]))"
    )
    words = ["export", str(tmp_path / "all.tar"), "--disk", str(tmp_path / "from")]
    program = [sys.executable, "-c", code, str(int(number)), *words]
    result = subprocess.run(program, stderr=subprocess.PIPE, text=True, check=False, timeout=60)
    assert (result.returncode, result.stderr.strip()) == (128 + number, "")
    assert [path.name for path in tmp_path.iterdir()] == ["from"]
