"""Tiers of other packages, as docs/tiers-of-your-own.md says, and the check of any tier.

The page's package is installed as its users install it.
"""

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from hybridkv.core.tier_urls import parse_tier
from hybridkv.lab.daemon_process import DaemonProcess
from hybridkv.tiers.conformance.samples import make_sample
from hybridkv.tiers.factory import make_tier
from tests.documents import DOCS
from tests.programs.tiers.cluster import ValkeyCluster
from tests.programs.tiers.master import Master, needs_mooncake
from tests.programs.tiers.servers import (
    ACCESS_KEY,
    AZURE_KEY,
    SECRET_KEY,
    AzureServer,
    OpenServer,
    S3Server,
    ValkeyServer,
    free_port,
)
from tests.programs.tiers.test_valkey import Relay
from tests.unit.daemon.tierclient import Client, stats
from tests.waiting import until

PAGE = DOCS / "tiers-of-your-own.md"
CHUNKS = 4
CHECK_SECONDS = 300
HASTE = "timeout=1"

_FILE = re.compile(r"^`([\w.]+)`:\n\n```\w+\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a directory with the page's package, installed by pip."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("installed")
    for name, text in _FILE.findall(PAGE.read_text()):
        (source / name).write_text(text)
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--target", target, source], check=True)
    return target


def path_with(package: Path | None) -> str:
    """Returns PYTHONPATH with one more directory of packages."""
    paths = [*map(str, [package] if package else []), os.environ.get("PYTHONPATH", "")]
    return ":".join(filter(None, paths))


def check(url: str, *options: str, path: Path | None = None) -> "subprocess.CompletedProcess[str]":
    """Run `hybridkv tier-check`, with one more directory of packages."""
    return subprocess.run(
        [sys.executable, "-m", "hybridkv", "tier-check", url, *options],
        check=False,
        env={**os.environ, "PYTHONPATH": path_with(path)},
        capture_output=True,
        text=True,
        timeout=CHECK_SECONDS,
    )


def assert_passes(
    url: str, *options: str, path: Path | None = None, skipped: Sequence[str] = ()
) -> None:
    """The suite passes, and leaves out only the tests in `skipped`."""
    done = check(url, *options, path=path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "keeps the contract of tiers" in done.stdout
    assert set(re.findall(r"::(test_\w+) SKIPPED", done.stdout)) == set(skipped)
    assert done.stdout.count(" PASSED ") > 20


def test_the_pages_package_passes_the_check(package: Path, tmp_path: Path) -> None:
    assert_passes(
        f"sqlite://{tmp_path}/kv.db",
        *("--away", f"sqlite://{tmp_path}/nowhere/kv.db"),
        path=package,
        skipped=["test_a_storage_that_stops_is_an_error_in_time"],
    )


def test_a_daemon_keeps_objects_in_it_over_a_restart(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", path_with(package))
    options = ["--tier", f"sqlite://{tmp_path}/kv.db?bytes=1GiB&codec=zplanes"]

    def value(name: str) -> float:
        return stats(daemon.socket_path).get(f"tier_sqlite_{name}", 0)

    daemon = DaemonProcess(str(tmp_path / "daemon.sock"), "64MiB", options=options)
    with daemon:
        with Client(daemon.socket_path) as client:
            client.store(1, CHUNKS)
            objects = client.values()["objects"]
            until(lambda: value("objects_written") == objects, "everything is written")
        daemon.end()
        daemon.start()
        until(lambda: value("is_open") == 1, "it is open")
        with Client(daemon.socket_path) as client:
            found = client.look_up(1, CHUNKS, wait_ms=20_000).found
            assert found.chunks == CHUNKS
            client.prove(found, 1)
        until(lambda: value("objects") == objects, "it says what it holds")


def test_a_class_in_the_url_needs_no_package(package: Path, tmp_path: Path) -> None:
    module = tmp_path / "hybridkv_sqlite.py"
    module.write_bytes((package / module.name).read_bytes())
    url = f"mine://{tmp_path}/kv.db?class=hybridkv_sqlite:SqliteTier"
    done = check(url, "--only", "comes_back or no_such_test", path=tmp_path)
    assert "1 passed" in done.stdout, done.stderr
    done = check(url, "--only", "comes_back")
    assert done.returncode == 2
    assert "No module named 'hybridkv_sqlite'" in done.stderr
    assert "PYTHONPATH works" in done.stderr


def test_a_wrong_tier_does_not_pass(package: Path, tmp_path: Path) -> None:
    text = (package / "hybridkv_sqlite.py").read_text()
    right = "contract.zero_after(item.pieces, len(rest))"
    assert right in text
    (tmp_path / "wrong.py").write_text(text.replace(right, "pass"))
    some = ("--only", "shorter or comes_back")
    done = check(f"wrong://{tmp_path}/kv.db?class=wrong:SqliteTier", *some, path=tmp_path)
    assert done.returncode == 1
    assert "test_behind_a_shorter_record_is_nothing FAILED" in done.stdout
    assert "does not keep the contract" in done.stdout
    assert "1 failed" in done.stdout


def test_what_is_there_is_not_removed_unasked(tmp_path: Path) -> None:
    url, sample = f"disk://{tmp_path}/kv?bytes=64MiB", make_sample(1)
    tier = make_tier(parse_tier(url, "tier"), "here")
    tier.open()
    assert tier.put([sample.write_request()]) == [None]
    tier.close()
    done = check(url)
    assert done.returncode == 2
    assert "has 1 records, which the tests would remove" in done.stderr
    assert check(url, "--empty", "--only", "comes_back").returncode == 0
    done = check(f"disk://{tmp_path}/kv/CHECK?bytes=64MiB", "--stop", "true")
    assert "--stop and --start need each other" in done.stderr


STOPPED = "test_a_storage_that_stops_is_an_error_in_time"
AWAY = "test_opening_asks_the_storage"
CUT = "test_a_record_that_ends_within_a_page_is_damaged"
BOUND = "test_the_bound_of_bytes_is_kept"
ALONE = ("--only", "not many_threads")
"""For rclone, which breaks off the answer to who reads an object while others change it."""


@pytest.mark.soak
def test_the_check_stops_and_starts_a_real_server(tmp_path: Path) -> None:
    with ValkeyServer(tmp_path) as server:
        away = f"valkey://127.0.0.1:{free_port()}/0"
        stop = ("--stop", f"kill -STOP {server.pid}", "--start", f"kill -CONT {server.pid}")
        assert_passes(f"{server.url}?{HASTE}", "--away", away, *stop, skipped=[BOUND])


@pytest.mark.soak
def test_a_directory_passes(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    away = f"disk://{tmp_path}/file/kv"
    assert_passes(f"disk://{tmp_path}/kv?bytes=64MiB", "--away", away, skipped=[STOPPED])


@pytest.mark.soak
def test_each_scheme_of_a_server_passes(tmp_path: Path) -> None:
    with ValkeyServer(tmp_path) as server:
        for url in (
            f"valkey+unix://{server.socket}?db=2",
            f"redis://127.0.0.1:{server.port}/1?codec=zplanes",
        ):
            skipped = [STOPPED, AWAY, BOUND, *([CUT] if "codec" in url else [])]
            assert_passes(url, skipped=skipped)


@pytest.mark.soak
def test_each_scheme_with_tls_passes(tmp_path: Path) -> None:
    with ValkeyServer(tmp_path) as server, contextlib.closing(Relay(tmp_path, server.port)) as tls:
        for scheme in ("valkeys", "rediss"):
            url = f"{scheme}://localhost:{tls.port}/0?ca={tls.certificate}"
            assert_passes(url, skipped=[STOPPED, AWAY, BOUND])


@pytest.mark.soak
def test_a_cluster_passes(tmp_path: Path) -> None:
    with ValkeyCluster(tmp_path) as cluster:
        away = f"valkey://127.0.0.1:{free_port()},127.0.0.1:{free_port()}/0"
        assert_passes(cluster.url(), "--away", away, skipped=[STOPPED, BOUND])


@pytest.mark.soak
def test_a_bucket_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    with S3Server(tmp_path) as server:
        away = f"s3://bucket/kv?endpoint=http://127.0.0.1:{free_port()}"
        assert_passes(server.url("kv"), "--away", away, *ALONE, skipped=[STOPPED, BOUND])


@pytest.mark.soak
def test_a_bucket_by_googles_protocol_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GOOGLE_BEARER_TOKEN", "any")
    with OpenServer(tmp_path) as server:
        assert_passes(server.url("kv"), *ALONE, skipped=[STOPPED, AWAY, BOUND])


@pytest.mark.soak
def test_a_container_of_azure_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", AZURE_KEY)
    with AzureServer(tmp_path) as server:
        assert_passes(server.url("kv"), skipped=[STOPPED, AWAY, BOUND])


@needs_mooncake
@pytest.mark.soak
def test_mooncake_passes(tmp_path: Path) -> None:
    master = Master(tmp_path / "master.log", lease="5s")
    try:
        keeper = master.tier(size="64MiB")
        keeper.open()
        assert_passes(master.url(), "--without", "prompt-discards", skipped=[STOPPED, AWAY, BOUND])
        keeper.close()
    finally:
        master.kill()
