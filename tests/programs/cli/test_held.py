"""`hybridkv ls` and `forget` of a real daemon with a directory and a real Valkey server."""

import io
import itertools
import json
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import valkey as library

from hybridkv.cli import forget
from hybridkv.cli.main import main
from hybridkv.client.control import ControlClient
from hybridkv.core.coverage import part_bytes
from hybridkv.core.keys import tenant_of
from hybridkv.core.selection import Selection
from hybridkv.lab.daemon_process import DaemonProcess
from tests.forked_daemon import ForkedDaemon
from tests.programs.tiers.servers import ValkeyServer
from tests.unit.daemon.tierclient import GEOMETRY, Client, content, hashes, object_files, stats
from tests.waiting import until

ALICE, BOB, EARLIER = 1, 2, 3  # Prompts.


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[ValkeyServer]:
    place = tmp_path / "valkey"
    place.mkdir()
    with ValkeyServer(place) as server:
        yield server


@pytest.fixture
def held(tmp_path: Path, valkey: ValkeyServer) -> Iterator[DaemonProcess]:
    """A daemon of two tenants, whose prompts are in RAM and in both tiers."""
    options = [
        "--node",
        "here",
        "--tier",
        f"disk://{tmp_path / 'tier'}?bytes=64MiB",
        "--tier",
        valkey.url,
    ]
    with ForkedDaemon(str(tmp_path / "d.sock"), "16MiB", options=options) as daemon:
        with Client(daemon.socket_path) as client:
            client.store(ALICE, 3, tenant=tenant_of("alice"))
            client.store(BOB, 2, tenant=tenant_of("bob"))
        until(lambda: is_below(daemon.socket_path), "both tiers have everything")
        yield daemon


def marks(prompt: int, chunks: int) -> list[bytes]:
    """A part of each of a prompt's objects, that nothing else has."""
    return [
        content(name, index, size)[size // 2 :][:48]
        for index, group in enumerate(GEOMETRY.groups)
        for chunk, name in enumerate(hashes(prompt, chunks))
        if (size := part_bytes(GEOMETRY, group, chunk))
    ]


class Places(NamedTuple):
    """Every byte that is stored anywhere."""

    arena: bytes
    files: dict[str, bytes]  # By path.
    values: dict[bytes, bytes]  # By key.

    def present(self, parts: list[bytes]) -> list[int]:
        """How many of the parts are in the arena, in files and in the server's values."""
        wholes = self.arena, b"".join(self.files.values()), b"".join(self.values.values())
        return [sum(part in whole for part in parts) for whole in wholes]


def stored_bytes(daemon: DaemonProcess, tier: Path, valkey: ValkeyServer) -> Places:
    with ControlClient(daemon.socket_path) as control:
        arena = Path(control.welcome.arena_path).read_bytes()
    files = {str(path): path.read_bytes() for path in tier.rglob("*") if path.is_file()}
    with closing(library.Valkey.from_url(valkey.url)) as server:
        keys: list[bytes] = [*server.scan_iter()]
        values: dict[bytes, Any] = {key: server.get(key) for key in keys}
    return Places(arena, files, values)


def is_below(socket_path: str) -> bool:
    values = stats(socket_path)
    stored = values["objects_stored"]
    return stored > 0 and all(
        values.get(f"tier_{name}_objects_written", 0) >= stored for name in ("disk", "valkey")
    )


def test_ls_tells_tenants_families_and_places_apart(
    held: DaemonProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--socket", held.socket_path]
    assert main(["ls", "--families", "--json", *where]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["errors"] == {} == document["undecided"]
    alice, bob = document["groups"]
    assert alice["tenant"] == f"{tenant_of('alice'):016x}"
    assert bob["tenant"] == f"{tenant_of('bob'):016x}"
    for group, prompt in ((alice, ALICE), (bob, BOB)):
        assert group["family"] == hashes(prompt, 1)[0][:8].hex()
        ram, disk, valkey = (group["places"][name] for name in ("RAM", "disk", "valkey"))
        for below in (disk, valkey):
            assert (below["objects"], below["bytes"]) == (ram["objects"], ram["bytes"])
        assert ram["newest_write_seconds"] <= ram["oldest_write_seconds"] < 600
        assert ram["last_use_seconds"] == ram["newest_write_seconds"]
        assert disk["oldest_write_seconds"] is valkey["last_use_seconds"] is None
    assert alice["places"]["RAM"]["bytes"] > bob["places"]["RAM"]["bytes"]
    assert main(["ls", "--salt", "bob", "--json", *where]) == 0
    only = json.loads(capsys.readouterr().out)["groups"]
    assert [group["places"] for group in only] == [bob["places"] | only[0]["places"]]
    assert main(["ls", "--rows", "1", *where]) == 0
    output = capsys.readouterr().out
    assert f"{tenant_of('alice'):016x}" in output
    assert f"{tenant_of('bob'):016x}" not in output
    assert "1 more groups" in output
    assert main(["ls", "--identity", "xyz", *where]) == 2


def test_forget_leaves_nothing_of_a_tenant_and_everything_of_the_other(
    held: DaemonProcess,
    valkey: ValkeyServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    where, tier = ["--socket", held.socket_path], tmp_path / "tier"
    with Client(held.socket_path) as client:
        # RAM has bytes of what it holds no longer, and tiers have more of the tenant than RAM.
        client.store(EARLIER, 1, tenant=tenant_of("alice"))
        until(lambda: is_below(held.socket_path), "both tiers have everything")
        assert main(["clear", *where]) == 0
        client.store(ALICE, 3, tenant=tenant_of("alice"))
        client.store(BOB, 2, tenant=tenant_of("bob"))
        damaged = next(
            path for path in object_files(tier) if hashes(ALICE, 1)[0].hex() in path.name
        )
        (tier / "quarantine").mkdir(exist_ok=True)
        shutil.copy(damaged, tier / "quarantine" / f"{damaged.name}.ab")
        alice, bob = marks(ALICE, 3) + marks(EARLIER, 1), marks(BOB, 2)
        before = stored_bytes(held, tier, valkey)
        assert before.present(alice) == [len(alice)] * 3
        assert before.present(bob) == [len(bob)] * 3
        assert main(["forget", "--salt", "alice", "--dry-run", *where]) == 0
        assert stored_bytes(held, tier, valkey).present(alice) == [len(alice)] * 3
        capsys.readouterr()
        monkeypatch.setattr("sys.stdin", io.StringIO("alice\n"))
        assert main(["forget", "--salt", "-", "--json", *where]) == 0
        outcome = json.loads(capsys.readouterr().out)
        assert outcome["is_proven"]
        places = outcome["places"]
        assert places["disk"]["removed"] == places["valkey"]["removed"] == len(alice)
        assert places["RAM"]["removed"] == len(marks(ALICE, 3))
        after = stored_bytes(held, tier, valkey)
        assert after.present(alice) == [0, 0, 0]
        assert after.present(bob) == [len(bob)] * 3
        of_bob = {key: value for key, value in before.values.items() if key in after.values}
        assert of_bob == after.values
        assert len(of_bob) == len(bob)
        assert {path: before.files[path] for path in map(str, object_files(tier))} == {
            path: after.files[path] for path in map(str, object_files(tier))
        }
        assert client.look_up(BOB, 2).found.depth == 2
        assert client.look_up(ALICE, 3, wait_ms=500).found.depth == 0


def test_what_ram_wrote_to_a_tier_meanwhile_is_not_taken_for_new(tmp_path: Path) -> None:
    """It is evicted after RAM was listed, and comes to a tier that was listed already."""
    disk = ["--tier", f"disk://{tmp_path / 'tier'}?bytes=64MiB&write=back"]
    with (
        ForkedDaemon(str(tmp_path / "d.sock"), "16MiB", options=disk) as daemon,
        Client(daemon.socket_path) as client,
        ControlClient(daemon.socket_path) as control,
    ):
        client.store(ALICE, 3, tenant=tenant_of("alice"))
        run = forget.DeletionRun(control, Selection(tenant=tenant_of("alice")))
        listed = run.find_selected().keys
        assert (len(listed[0]), listed[1]) == (len(marks(ALICE, 3)), {})

        def is_in_ram() -> bool:
            pages = control.list_objects(0)
            return any(held.key in listed[0] for page in pages for held in page.objects)

        others = itertools.count(10)
        while is_in_ram():
            client.store(next(others), 8, tenant=tenant_of("bob"))
        found = run.find_selected()
        assert found.keys[1], "what was in RAM before is deleted, wherever it is now"
        run.delete_all(found)
        assert run.deletion.leaves_nothing


def test_forget_says_what_is_not_proven(
    held: DaemonProcess,
    valkey: ValkeyServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(forget, "READ_SECONDS", 0.1)
    where = ["--socket", held.socket_path]
    assert main(["forget", *where]) == 2, "all is what `clear` is for"
    assert main(["forget", "--older-than", "1h", *where]) == 1
    assert "valkey: of 15 objects it is unknown" in capsys.readouterr().out
    with Client(held.socket_path) as client:
        number = client.ask(ALICE, 3)
        assert client.answer(number).depth == 3
        assert main(["forget", "--family", hashes(ALICE, 1)[0].hex()[:9], *where]) == 1
        assert "objects are still read or written" in capsys.readouterr().out
        client.release(number)
        assert main(["forget", "--salt", "alice", *where]) == 0
    valkey.kill()
    assert main(["forget", "--salt", "bob", *where]) == 1
    output = capsys.readouterr().out
    assert "valkey: " in output
    assert "it is not proven" in output
    assert main(["ls", "--json", "--salt", "bob", *where]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["groups"] == []
    assert list(document["errors"]) == ["valkey"]


@pytest.mark.parametrize("is_beside_disk", [True, False], ids=["disk", "home"])
def test_bounds_are_set_at_run_time_and_kept_over_a_restart(
    is_beside_disk: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    disk = ["--tier", f"disk://{tmp_path / 'tier'}?bytes=64MiB"] if is_beside_disk else []
    kept = tmp_path / ("tier" if is_beside_disk else "state/hybridkv") / "quotas" / "here.json"
    alice, bob = f"{tenant_of('alice'):016x}", f"{tenant_of('bob'):016x}"

    def bounds(*words: str, status: int = 0) -> Any:
        capsys.readouterr()
        where = ["--json", "--socket", daemon.socket_path]
        assert main(["quota", *words, *where]) == status
        return json.loads(capsys.readouterr().out)

    with ForkedDaemon(
        str(tmp_path / "d.sock"), "16MiB", options=["--node", "here", *disk]
    ) as daemon:
        assert bounds()["tenants"] == {}
        with Client(daemon.socket_path) as client:
            client.store(ALICE, 8, tenant=tenant_of("alice"))
            client.store(BOB, 2, tenant=tenant_of("bob"))
            held = bounds("--salt", "alice", "300KiB")["tenants"][alice]
            assert held["is_own"]
            assert 200 << 10 < held["held"] <= held["bound"] == 300 << 10
            assert client.look_up(BOB, 2).found.depth == 2
        bounds("--default", "4MiB")
        monkeypatch.setattr("sys.stdin", io.StringIO("bob\n"))
        before = bounds("--salt", "-", "none")
        assert before["path"] == str(kept)
        assert before["tenants"][bob]["bound"] is None
        daemon.stop()
        daemon.start()
        after = bounds()
        assert after["default"] == 4 << 20
        assert after["tenants"][alice] == before["tenants"][alice]
        assert after["tenants"][bob]["bound"] is None
        assert not bounds("--salt", "alice", "default")["tenants"][alice]["is_own"]
        daemon.stop()
        kept.write_text("{")
        daemon.start()
        assert bounds()["error"]
        assert bounds("--salt", "alice", "1MiB")["error"] == "", "a new file replaces a broken one"
    assert main(["quota", "--salt", "a", "--socket", str(tmp_path / "d.sock")]) == 2


def test_what_serve_is_given_wins_at_each_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    options = ["--node", "here", "--salt-quota", "2MiB"]
    with ForkedDaemon(str(tmp_path / "d.sock"), "16MiB", options=options) as daemon:
        where = ["--socket", daemon.socket_path]
        assert main(["quota", "--default", "1MiB", *where]) == 0
        output = capsys.readouterr().out
        assert "every other tenant has the bound: 1MiB" in output
        assert "the next start has its --salt-quota of 2MiB again" in output
        daemon.stop()
        daemon.start()
        assert main(["quota", *where]) == 0
        assert "every other tenant has the bound: 2MiB" in capsys.readouterr().out
        log = Path(daemon.socket_path).with_suffix(".log").read_text()
        assert "salt-quota: 2MiB of this start wins over 1MiB" in log
    options = ["--node", "here", "--user-quota", "2MiB"]
    with ForkedDaemon(str(tmp_path / "u.sock"), "16MiB", options=options) as daemon:
        where = ["--socket", daemon.socket_path]
        for words in (["quota", "--salt", "a", "1MiB"], ["forget", "--salt", "a"]):
            assert main([*words, *where]) == 2
            assert "--user-quota" in capsys.readouterr().err
