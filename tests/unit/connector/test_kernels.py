"""The kernels without a GPU: see kernels_check and kernels_compile."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.engine


def run(module: str, *arguments: str) -> str:
    """What a program says that must not fail; it needs Triton."""
    pytest.importorskip("triton")
    said = subprocess.run(
        [sys.executable, "-m", f"tests.unit.connector.{module}", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert said.returncode == 0, said.stderr[-3000:]
    return said.stdout


@pytest.mark.soak
def test_triton_torch_and_xxhash_agree_for_every_layout() -> None:
    assert "are equal" in run("kernels_check")


def test_triton_torch_and_xxhash_agree_for_two_layouts() -> None:
    assert "2 layouts" in run("kernels_check", "LBNHC", "windows LHBNC")


def test_the_kernels_compile_for_a_gpu() -> None:
    assert run("kernels_compile").count("bytes") == 5
