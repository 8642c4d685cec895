"""The directory tier over Linux' own NFS server and client, on a machine of its own.

`scripts/nfs-machine` unpacks the machine. NFS_MINUTES is the length of the long test.
"""

import os
import sys
from pathlib import Path

import pytest

from tests.fault.nfs.machine import CHECKOUT, run_inside

MINUTES = float(os.environ.get("NFS_MINUTES", "4"))
START_SECONDS = 120.0  # The longest that the machine takes to start and to end.
FAULTS_SECONDS = 400.0  # The longest that the short tests take over one kind of mount.
HERE = CHECKOUT / "tests" / "fault" / "nfs"


@pytest.mark.soak
@pytest.mark.parametrize("mount", ["v42", "v40", "v3", "soft"])
def test_faults_of_nfs(tmp_path: Path, mount: str) -> None:
    words = pytest_of("inside.py", "-k", mount)
    print(run_inside(words, tmp_path, FAULTS_SECONDS + START_SECONDS))


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_two_daemons_for_long(tmp_path: Path) -> None:
    words = ["env", f"NFS_MINUTES={MINUTES}", *pytest_of("long.py")]
    print(run_inside(words, tmp_path, 2 * 60 * MINUTES + FAULTS_SECONDS + START_SECONDS))


def pytest_of(name: str, *options: str) -> list[str]:
    words = [sys.executable, "-m", "pytest", "-q", "-s", "--color=no", "-p", "no:cacheprovider"]
    return [*words, *options, str(HERE / name)]
