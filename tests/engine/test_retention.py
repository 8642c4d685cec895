"""A history that a hint retains is there after a scan of ten times RAM, and not after its time."""

import json
import os
from pathlib import Path

import pytest

from hybridkv.lab.models import bundled_environment
from tests.engine.forked import lines_of
from tests.engine.retained import RAM
from tests.forked_daemon import ForkedDaemon

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]


@pytest.mark.soak
def test_a_retained_history_survives_a_scan_until_its_time_and_not_longer(tmp_path: Path) -> None:
    with ForkedDaemon(str(tmp_path / "daemon.sock"), str(RAM)) as daemon:
        variables = {**os.environ, **bundled_environment("qwen3")}
        printed = lines_of(
            "tests.engine.retained", [daemon.socket_path], tmp_path / "log", variables
        )
    (found,) = [json.loads(line) for line in printed if line.startswith("{")]
    assert found["retained"] == 31 * 128
    assert found["retained until then"] == found["not retained"] == 0
    assert 1 <= found["share"] < 1.1
