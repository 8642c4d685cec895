"""The kernels without a GPU: see kernels_check and kernels_compile."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.engine


def run(module: str, *arguments: str) -> str:
    """Run a program that must not fail, and that needs Triton. Returns what it prints."""
    pytest.importorskip("triton")
    process = subprocess.run(
        [sys.executable, "-m", f"tests.unit.connector.{module}", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    return process.stdout


@pytest.mark.soak
def test_triton_torch_and_xxhash_agree_for_every_layout() -> None:
    assert "are equal" in run("kernels_check")


def test_triton_torch_and_xxhash_agree_for_a_layout() -> None:
    assert "1 layouts" in run("kernels_check", "windows LHBNC")


def test_the_kernels_compile_for_a_gpu() -> None:
    assert run("kernels_compile").count("bytes") == 5
