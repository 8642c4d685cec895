"""Engine and daemon have one socket and a /dev/shm each, as containers often do."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from hybridkv.client.control import ControlClient
from hybridkv.lab.daemon_process import DaemonProcess
from hybridkv.wire.status import Status
from tests.waiting import until

pytestmark = pytest.mark.engine


def status(daemon: DaemonProcess) -> Status:
    """Return what the status page of a daemon shows."""
    with ControlClient(daemon.socket_path) as control:
        shown = control.stats(status=True).status
    assert shown is not None
    return shown


class Apart:
    """An engine of tests.programs.daemon.apart, whose log is `log`."""

    def __init__(self, directory: Path, words: Sequence[str], variables: Mapping[str, str]) -> None:
        command = ["unshare", "--mount", "--propagation=private"]
        if subprocess.run(
            [*command, "mount", "-t", "tmpfs", "none", "/dev/shm"], check=False
        ).returncode:
            pytest.skip("needs the right to mount")
        self.log = directory / "engine.log"
        self.report: dict[str, Any] = {}
        """The engine's report of its last step."""
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, sys.executable, "-m", "tests.programs.daemon.apart", *words],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, "VLLM_LOGGING_STREAM": "ext://sys.stderr", **variables},
            )

    def __enter__(self) -> "Apart":
        return self

    def __exit__(self, *exc: object) -> None:
        with self._process:
            assert self._process.stdin is not None
            self._process.stdin.close()

    def step(self, word: str = "step") -> dict[str, Any]:
        """Have the engine do a step. Returns its report."""
        assert self._process.stdout is not None
        print(word, file=self._process.stdin, flush=True)
        self.report = json.loads(self._process.stdout.readline())
        return self.report


def test_a_shared_memory_that_is_not_shared_is_told_by_everybody(
    daemon: DaemonProcess, tmp_path: Path
) -> None:
    with Apart(tmp_path, [daemon.socket_path], {}) as engine:
        engine.step()  # When vLLM is imported.
        until(lambda: engine.step()["failed"] >= 2, "it is tried again and again")
        log = engine.log.read_text().splitlines()
        (line,) = [line for line in log if "nothing is loaded or stored" in line]
        assert line.endswith("engine and daemon need one /dev/shm")
        assert engine.report["shed"] >= 2
        assert engine.report["doctor"]["arena"] == "FAIL"
        shown = status(daemon)
        assert shown.values["workers_unmapped"] == 1
        assert shown.values["mappings_failed"] >= 2
        problems = [problem for problem in shown.health if "cannot map the arena" in problem.text]
        assert [problem.level for problem in problems] == ["bad"]
        assert engine.step("together")["doctor"]["arena"] == "ok"
        until(lambda: bool(engine.step()["attached"]), "it is mapped")
        until(lambda: status(daemon).values["workers_unmapped"] == 0, "the daemon knows")


@pytest.mark.soak
def test_a_volume_may_be_at_another_path_for_the_engine(tmp_path: Path) -> None:
    """HYBRIDKV_SHM_DIR says where."""
    (here := tmp_path / "here").mkdir()
    with tempfile.TemporaryDirectory(prefix="hybridkv-test-", dir="/dev/shm") as volume:
        options = ["--shm-dir", volume]
        with DaemonProcess(str(tmp_path / "d.sock"), "16MiB", options=options) as daemon:
            words = [daemon.socket_path, volume, str(here)]
            with Apart(tmp_path, words, {"HYBRIDKV_SHM_DIR": str(here)}) as engine:
                until(lambda: bool(engine.step()["attached"]), "it is mapped")
                assert engine.report["doctor"]["arena"] == "ok"
                assert not engine.report["failed"]
            assert not status(daemon).values.get("mappings_failed")
        assert not list(Path(volume).iterdir())
