"""Every measurement runs and gives its numbers; none of them is judged here."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hybridkv.lab.daemon_process import DaemonProcess


def bench(*arguments: str) -> Any:
    result = subprocess.run(
        [sys.executable, "-m", "hybridkv", "bench", *arguments, "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


HOOKS = """
import json, sys
from benchmarks.hooks import measure_hooks
from hybridkv.core.geometry import Geometry, Group, GroupKind
groups = Group(0, GroupKind.FULL, 128, (256,)), Group(1, GroupKind.RECURRENT, 128, (256,))
print(json.dumps(measure_hooks([sys.argv[1]], Geometry(groups, 128, 128, 128), 1024, 512, 4)))
"""


@pytest.mark.engine
@pytest.mark.soak
def test_every_hook_is_measured(daemon: DaemonProcess) -> None:
    result = subprocess.run(
        [sys.executable, "-c", HOOKS, daemon.socket_path],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    rows = json.loads(result.stdout.splitlines()[-1])
    hooks = {row["hook"] for row in rows}
    assert {"on_new_request (hit)", "build_connector_meta (prefill)", "request_finished"} <= hooks
    assert all(row["calls"] and row["p50_us"] > 0 for row in rows)


@pytest.mark.engine
@pytest.mark.soak
def test_the_byte_path_of_each_group_of_a_model_is_measured() -> None:
    rows = bench("path", "--bytes", "4MiB", "--model", "gemma3")
    assert {row["group"].partition(":")[2] for row in rows} == {"full", "sliding"}
    assert all(row["store_GBps"] > 0 for row in rows)


@pytest.mark.engine
@pytest.mark.soak
def test_the_byte_path_is_measured() -> None:
    rows = bench("path", "--bytes", "4MiB", "--block", "16KiB", "--layers", "4")
    assert rows
    assert all(value > 0 for row in rows for name, value in row.items() if "GB" in name)


@pytest.mark.engine
@pytest.mark.soak
def test_loads_beside_a_busy_interpreter_are_measured() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks.copies", "--bytes", "64MiB", "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    rows = json.loads(result.stdout)
    assert [row["object"] for row in rows] == ["1 MiB", "5 MiB", "16 MiB", "32 MiB"]
    rates = [value for row in rows for name, value in row.items() if name != "object"]
    assert all(0 < rate < 60 for rate in rates)


@pytest.mark.soak
def test_a_lookup_of_every_length_hits_and_is_measured() -> None:
    rows = bench("lookup")
    assert [row["hit tokens"] for row in rows] == [1024, 4096, 16384, 32768, 65536, 131072]
    assert all(0 < row["p50_ms"] <= row["p99_ms"] for row in rows)


@pytest.mark.engine
@pytest.mark.soak
def test_prompts_that_ram_cannot_hold_are_measured() -> None:
    """An eighth of what four prompts need is half of what one needs."""
    options = "--tokens", "2048", "--ram-share", "0.125", "--load-policy", "always"
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks.large_hits", *options],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr
    *rows, total = [json.loads(line) for line in result.stdout.splitlines()]
    assert [row["prompt"] for row in rows] == [0, 1, 2, 3]
    assert all(row["computed"] > 0 and row["from the cache"] > 0 for row in rows)
    assert all(0 <= row["hit tokens"] < 1920 for row in rows), "RAM cannot hold a whole one"
    assert 0 < total["RAM MiB"] < total["prompt MiB"]


@pytest.mark.soak
def test_the_directory_is_measured(tmp_path: Path) -> None:
    rows = bench("disk", "--directory", str(tmp_path), "--bytes", "64MiB")
    assert len(rows) == 3
    assert all(value > 0 for row in rows for name, value in row.items() if "GB" in name)


def test_too_few_bytes_for_the_largest_objects() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "hybridkv", "bench", "disk", "--bytes", "8MiB"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2
    assert (
        result.stderr
        == "hybridkv: --bytes 8MiB is less than what 4 threads write at once; 64MiB works\n"
    )
