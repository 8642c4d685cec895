"""The workflows run scripts of this repository, and have no logic of their own."""

import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomlkit
import yaml  # type: ignore[import-untyped]

from hybridkv import __version__

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PROGRAMS = {"apt-get", "gh"}
"""What a workflow may run beside scripts of this repository."""
named = pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)


def workflow(path: Path) -> dict[Any, Any]:
    """Returns a workflow. A key `on` is True, as YAML 1.1 has it."""
    read: dict[Any, Any] = yaml.safe_load(path.read_text())
    return read


def steps(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the steps of all jobs of a workflow."""
    for job in workflow(path)["jobs"].values():
        yield from job.get("steps", ())


@named
def test_each_command_is_a_script_that_is_there(path: Path) -> None:
    commands = [
        command
        for step in steps(path)
        for command in re.split(r"\n|&&|\|\||;", step.get("run", ""))
        if command.strip()
    ]
    for command in commands:
        words = shlex.split(command)
        program = next(word for word in words if word not in ("bash", "sudo"))
        if "/" in program:
            assert (ROOT / program).is_file(), command
            assert "bash" in words or os.access(ROOT / program, os.X_OK), command
        else:
            assert program in PROGRAMS, command


@named
def test_the_jobs_that_it_needs_and_the_workflows_that_it_uses_are_there(path: Path) -> None:
    jobs = workflow(path)["jobs"]
    for job in jobs.values():
        needs = job.get("needs", [])
        assert ({needs} if isinstance(needs, str) else set(needs)) <= jobs.keys()
        if "uses" in job:
            assert "workflow_call" in workflow(ROOT / job["uses"])[True]
        else:
            assert job["timeout-minutes"] > 0


def test_a_release_passes_the_gate_and_is_tried_on_every_python() -> None:
    path = next(path for path in WORKFLOWS if path.stem == "release")
    jobs = workflow(path)["jobs"]
    assert workflow(path)[True] == {"push": {"tags": ["v*"]}}
    assert jobs["gate"]["uses"].endswith("/ci.yml")
    assert jobs["release"]["needs"] == "gate"
    (given,) = (step["with"]["python-version"] for step in steps(path) if "with" in step)
    project = tomlkit.parse((ROOT / "pyproject.toml").read_text())["project"]
    assert isinstance(project, dict)
    classifiers = [str(text) for text in project["classifiers"]]
    versions = [text.rpartition(":: ")[2] for text in classifiers if ":: Python :: 3" in text]
    assert sorted(given.split()) == versions
    tried = re.search(r"^versions=\((.*)\)$", (ROOT / "scripts" / "wheel").read_text(), re.M)
    assert tried is not None
    assert tried[1].split() == versions


def test_a_tag_that_is_not_the_version_is_refused() -> None:
    words = ["scripts/release", "--check", "v99.0.0"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("error: the tag 'v99.0.0' is not that of the version")
    assert done.stderr.endswith(f": v{__version__} works\n")
