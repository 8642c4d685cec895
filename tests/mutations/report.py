"""A pytest plugin for runs on a copy of the package.

It says what failed, and that the copy is what was tested.
"""

import json
import os
from pathlib import Path
from typing import Any

import hybridkv

PACKAGE_VARIABLE = "HYBRIDKV_MUTATIONS_PACKAGE"
RESULTS_VARIABLE = "HYBRIDKV_MUTATIONS_RESULTS"

_red: set[str] = set()


def is_the_copy() -> bool:
    """Whether this process uses the package that the runner made."""
    return Path(hybridkv.__file__).parent == Path(os.environ[PACKAGE_VARIABLE])


def pytest_configure(config: Any) -> None:
    """Fail where pytest imports another package than the copy with the fault."""
    if not is_the_copy():
        raise RuntimeError(f"{hybridkv.__file__} is tested, and not {os.environ[PACKAGE_VARIABLE]}")


def pytest_runtest_logstart(nodeid: str, location: Any) -> None:
    """A test whose process dies under it is red."""
    _tell(nodeid, True)


def pytest_runtest_logreport(report: Any) -> None:
    """Write down whether a test failed, and only what the test itself found.

    A fixture that fails proves little, and takes no finding back.
    """
    if report.when == "call" and not report.skipped:
        _tell(report.nodeid, bool(report.failed))
        if report.failed:
            _red.add(report.nodeid)
    elif not report.passed and report.nodeid not in _red:
        _tell(report.nodeid, None)


def results(text: str) -> dict[str, bool]:
    """Returns by node id whether it failed. Nodes that did not run are left out."""
    outcomes: dict[str, bool | None] = {}
    for line in text.splitlines():
        outcomes.update(json.loads(line))
    return {node: red for node, red in outcomes.items() if red is not None}


def _tell(node: str, red: bool | None) -> None:
    with Path(os.environ[RESULTS_VARIABLE]).open("a") as file:
        file.write(f"{json.dumps({node: red})}\n")
