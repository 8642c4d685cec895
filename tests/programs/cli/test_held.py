"""`hybridkv ls` of a real daemon with a directory and a real Valkey server."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from hybridkv.cli.main import main
from hybridkv.core.keys import tenant_of
from hybridkv.lab.daemon_process import DaemonProcess
from tests.forked_daemon import ForkedDaemon
from tests.programs.tiers.servers import ValkeyServer
from tests.unit.daemon.tierclient import Client, hashes, stats
from tests.waiting import until

ALICE, BOB = 1, 2  # Prompts.


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
