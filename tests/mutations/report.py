"""A pytest plugin for runs on a copy of the package: says what failed, and that the copy is what was tested."""

import json
import os
from pathlib import Path
from typing import Any

import hybridkv

PACKAGE_VARIABLE = "HYBRIDKV_MUTATIONS_PACKAGE"
RESULTS_VARIABLE = "HYBRIDKV_MUTATIONS_RESULTS"

_results: dict[str, bool] = {}


def is_the_copy() -> bool:
    """Whether this process uses the package that the runner made."""
    return Path(hybridkv.__file__).parent == Path(os.environ[PACKAGE_VARIABLE])


def pytest_configure(config: Any) -> None:
    """Nothing is tested if it is not the copy."""
    if not is_the_copy():
        raise RuntimeError(f"{hybridkv.__file__} is tested, and not {os.environ[PACKAGE_VARIABLE]}")


def pytest_runtest_logreport(report: Any) -> None:
    """Only what a test itself finds counts: a fixture that fails proves little."""
    if report.when == "call" and not report.skipped:
        _results[report.nodeid] = bool(report.failed)


def pytest_sessionfinish(session: Any, exitstatus: Any) -> None:
    """Tell the runner."""
    Path(os.environ[RESULTS_VARIABLE]).write_text(json.dumps(_results))
