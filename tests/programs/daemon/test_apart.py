"""Engine and daemon have one socket and a /dev/shm each, as containers often do."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hybridkv.client.control import ControlClient
from hybridkv.lab.daemon_process import DaemonProcess
from hybridkv.wire.status import Status
from tests.waiting import until

pytestmark = pytest.mark.engine


def status(daemon: DaemonProcess) -> Status:
    """What the status page shows."""
    with ControlClient(daemon.socket_path) as control:
        found = control.stats(status=True).status
    assert found is not None
    return found


def test_a_shared_memory_that_is_not_shared_is_told_by_everybody(
    daemon: DaemonProcess, tmp_path: Path
) -> None:
    command = ["unshare", "--mount", "--propagation=private"]
    if subprocess.run(
        [*command, "mount", "-t", "tmpfs", "none", "/dev/shm"], check=False
    ).returncode:
        pytest.skip("needs the right to mount")
    log = (tmp_path / "engine.log").open("wb")
    engine = subprocess.Popen(
        [*command, sys.executable, "-m", "tests.programs.daemon.apart", daemon.socket_path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        env={**os.environ, "VLLM_LOGGING_STREAM": "ext://sys.stderr"},
    )
    with log, engine:
        assert engine.stdin is not None
        assert engine.stdout is not None
        told: dict[str, Any] = {}

        def step(word: str = "step") -> dict[str, Any]:
            print(word, file=engine.stdin, flush=True)
            said = engine.stdout.readline() if engine.stdout is not None else ""
            told.update(json.loads(said))
            return told

        try:
            step()  # When vLLM is imported.
            until(lambda: step()["failed"] >= 3, "it is tried again and again")
            said = (tmp_path / "engine.log").read_text().splitlines()
            (line,) = [line for line in said if "nothing is loaded or stored" in line]
            assert line.endswith("engine and daemon need one /dev/shm")
            assert told["shed"] >= 3
            assert told["doctor"]["arena"] == "FAIL"
            shown = status(daemon)
            assert shown.values["workers_unmapped"] == 1
            assert shown.values["mappings_failed"] >= 2
            assert [one.level for one in shown.health if "cannot map the arena" in one.text] == [
                "bad"
            ]
            assert step("together")["doctor"]["arena"] == "ok"
            until(lambda: bool(step()["attached"]), "it is mapped")
            until(lambda: status(daemon).values["workers_unmapped"] == 0, "the daemon knows")
        finally:
            engine.stdin.close()
