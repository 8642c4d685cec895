"""`forget` of a tenant and the hint to demote, on a real engine with real tiers."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from hybridkv.lab.models import bundled_environment
from tests.engine.forgotten import CHUNKS, MODEL
from tests.engine.forked import lines_of
from tests.forked_daemon import ForkedDaemon
from tests.programs.tiers.servers import ValkeyServer

pytestmark = [pytest.mark.engine, pytest.mark.soak, pytest.mark.timeout(900)]


def found_by(scene: str, ram: str, place: Path, *tiers: str) -> dict[str, Any]:
    options = ["--node", "here", *(word for url in tiers for word in ("--tier", url))]
    with ForkedDaemon(str(place / "daemon.sock"), ram, options=options) as daemon:
        variables = {**os.environ, **bundled_environment(MODEL)}
        words = [daemon.socket_path, scene]
        printed = lines_of("tests.engine.forgotten", words, place / "log", variables)
    (found,) = [json.loads(line) for line in printed if line.startswith("{")]
    return dict(found)


def test_forget_of_a_salt_leaves_nothing_of_it_and_everything_of_the_others(tmp_path: Path) -> None:
    with ValkeyServer(tmp_path) as valkey:
        disk = f"disk://{tmp_path}/disk?bytes=1GiB"
        found = found_by("forget", "256MiB", tmp_path, disk, valkey.url)
    removed = found["removed"]
    assert removed["RAM"] == removed["disk"] == removed["valkey"] > 0
    assert found["proven"]
    assert found["left"] == []
    assert found["alice"] == 0
    assert found["bob, RAM"] == found["bob, tiers"] == CHUNKS * 128


def test_what_is_demoted_is_in_a_tier_and_goes_first(tmp_path: Path) -> None:
    disk = f"disk://{tmp_path}/disk?bytes=1GiB&write=back"
    found = found_by("demote", "16MiB", tmp_path, disk)
    assert found["written"] == 1.0
    assert (found["bob"], found["bob, from the tier"]) == (CHUNKS * 128, 0)
    assert 0 < found["evicted"] <= 1, "the test is of what goes first"
    assert found["alice"] == CHUNKS * 128
    assert found["alice, from the tier"] > 0
