"""What the runner of the random programs says of seeds that fail, and of processes that end."""

import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator

import pytest

from tests.seeds import Case, Options, Program, Result, RunSeed, main, outcomes, passed

NAME = "tests.test_seeds"


@contextlib.contextmanager
def opened() -> Iterator[RunSeed]:
    """A program that only counts its seeds."""
    yield run_seed


def run_seed(seed: int, options: Options) -> dict[str, int]:
    """Do what the option `fate` says where the seed is odd."""
    fate = options.get("fate") if seed % 2 else None
    if fate == "fails":
        raise ValueError(f"of {seed}")
    if fate == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if fate == "ends":
        os._exit(7)
    return {"ran": 1, "seed": seed}


PROGRAM = Program(NAME, opened, {"fate": "what becomes of odd seeds"})


def cases(fate: str, seeds: range) -> list[Case]:
    return [Case(NAME, seed, {"fate": fate}) for seed in seeds]


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_seed_that_fails_is_one_failure_and_the_next_one_runs(jobs: int) -> None:
    result = Result()
    for outcome in outcomes(cases("fails", range(4)), jobs):
        result.add(outcome)
    assert (result.seeds, result.failed, result.killed) == (4, 2, 0)
    assert result.counts == {"ran": 2, "seed": 2}
    first = min(result.failures, key=lambda failure: failure.seed)
    assert first.message == "ValueError: of 1"
    assert first.command == f"python -m {NAME} --seeds 1 --fate fails"


def test_a_killed_process_has_neither_passed_nor_failed() -> None:
    result = Result()
    for outcome in outcomes(cases("killed", range(3))):
        result.add(outcome)
    assert (result.seeds, result.failed, result.killed) == (2, 0, 1)


def test_a_process_that_ends_has_failed() -> None:
    result = Result()
    for outcome in outcomes(cases("ends", range(3))):
        result.add(outcome)
    assert (result.seeds, result.failed, result.killed) == (3, 1, 0)
    assert result.failures[0].message == "the process ended with 7"


def test_nothing_passes_unless_all_of_it_ran_and_passed() -> None:
    assert passed(cases("fails", range(0, 4, 2)))["ran"] == 2
    for fate in ("fails", "killed", "ends"):
        with pytest.raises(AssertionError):
            passed(cases(fate, range(2)))
    with pytest.raises(AssertionError, match="no case ran"):
        passed([])


@pytest.mark.parametrize(
    ("arguments", "status", "seeds"),
    [
        ("--seeds 0:4", 0, 4),
        ("--seeds 1:9 --fate fails", 1, 1),
        ("--seeds 1:5 --fate fails --keep-going", 1, 4),
        ("--seeds 0:3 --fate killed --jobs 2", 137, 2),
        ("--minutes 0.001", 0, None),
    ],
)
def test_the_last_line_is_the_result(
    arguments: str,
    status: int,
    seeds: int | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", [NAME, *arguments.split()])
    assert main(PROGRAM, None) == status
    output = capsys.readouterr().out
    result = json.loads(output.splitlines()[-1].removeprefix("result "))
    assert result["seeds"] == (seeds if seeds is not None else result["counts"]["ran"]) > 0
    assert len(result["failures"]) == result["failed"]
    assert ("FAILED: python -m " in output) == (status == 1)
