"""The directory tier over Linux' own NFS server and client, on a machine of its own.

`scripts/nfs-machine` unpacks the machine. NFS_MINUTES is the length of the long test.
"""

import os
import sys
from pathlib import Path

import pytest

from tests.fault.nfs.machine import CHECKOUT, run_inside

MINUTES = float(os.environ.get("NFS_MINUTES", "2"))
START_SECONDS = 120.0  # The longest that the machine takes to start and to end.
FAULTS_SECONDS = 400.0  # The longest that the short tests take over one kind of mount.
INSIDE = CHECKOUT / "tests" / "fault" / "nfs" / "inside.py"


@pytest.mark.soak
@pytest.mark.parametrize("mount", ["v42", "v40", "v3", "soft"])
def test_faults_of_nfs(tmp_path: Path, mount: str) -> None:
    print(run_inside(pytest_of(mount, minutes=0), tmp_path, FAULTS_SECONDS + START_SECONDS))


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_two_nodes_for_long(tmp_path: Path) -> None:
    words = pytest_of("two_nodes_for_long", minutes=MINUTES)
    print(run_inside(words, tmp_path, 2 * 60 * MINUTES + FAULTS_SECONDS + START_SECONDS))


def pytest_of(chosen: str, minutes: float) -> list[str]:
    options = ["-q", "-s", "--color=no", "-p", "no:cacheprovider", "-k", chosen]
    return ["env", f"NFS_MINUTES={minutes}", sys.executable, "-m", "pytest", *options, str(INSIDE)]
