"""Engine and daemon have one socket and a /dev/shm each, as containers often do."""

import json
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from hybridkv.client.control import ControlClient
from hybridkv.lab.daemon_process import DaemonProcess
from hybridkv.lab.engine_process import ENGINE_ENVIRONMENT, STOP_SECONDS, ChildEnvironment
from hybridkv.wire.status import Status
from tests.engine.forked import ForkedChild
from tests.seeds import ONE_THREAD
from tests.waiting import DEADLINE_SECONDS, until

pytestmark = pytest.mark.engine


def status(daemon: DaemonProcess) -> Status:
    """Return what the status page of a daemon shows."""
    with ControlClient(daemon.socket_path) as control:
        shown = control.stats(status=True).status
    assert shown is not None
    return shown


class Apart(ForkedChild):
    """An engine of tests.engine.apart, whose log is `log`."""

    def __init__(self, directory: Path, words: Sequence[str], variables: Mapping[str, str]) -> None:
        mount = ["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/dev/shm"]
        if subprocess.run(mount, check=False).returncode:
            pytest.skip("needs the right to mount")
        self.log = directory / "engine.log"
        self.report: dict[str, Any] = {}
        """The engine's report of its last step."""
        environment = ChildEnvironment({**ENGINE_ENVIRONMENT, **ONE_THREAD}, variables)
        self._file = self.log.open("wb")
        super().__init__("tests.engine.apart", words, self._file, environment)

    def close(self, patience_seconds: float = STOP_SECONDS) -> None:
        """End the engine."""
        super().close(patience_seconds)
        self._file.close()

    def step(self, word: str = "step") -> dict[str, Any]:
        """Have the engine do a step. Returns its report."""
        self._pipe.send(word)
        answer = self.receive_answer(DEADLINE_SECONDS)
        assert answer is not None, self.log.read_text()[-3000:]
        self.report = json.loads(answer)
        return self.report


def test_a_shared_memory_that_is_not_shared_is_told_by_everybody(
    daemon: DaemonProcess, tmp_path: Path
) -> None:
    with Apart(tmp_path, [daemon.socket_path], {}) as engine:
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
