"""Puts each fault into a copy of the package and expects its tests to fail.

`python -m tests.mutations [NAME|REQUIREMENT ...]` first runs all their tests on an unchanged copy,
where they must pass. It exits with 1 where one does not, or where a fault is not noticed by every
test that is named for it.
"""

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.mutations.mutation import PACKAGE, ROOT, Mutation, is_command, nodes
from tests.mutations.report import PACKAGE_VARIABLE, RESULTS_VARIABLE, results
from tests.mutations.table import MUTATIONS

TEST_SECONDS = 300
"""A test that takes longer is red: a stall is a fault as well."""
COMMAND_SECONDS = 300


def main() -> int:
    """Run the chosen faults. Returns 1 where tests did not notice one."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__)
    parser.add_argument(
        "names", nargs="*", help="names of faults, or ids of requirements; none: all"
    )
    parser.add_argument(
        "--skip-green", action="store_true", help="do not run the tests on the unchanged copy first"
    )
    options = parser.parse_args()
    chosen = [
        mutation
        for mutation in MUTATIONS
        if not options.names or {mutation.name, *mutation.requirements.split()} & set(options.names)
    ]
    if stale := [
        f"{mutation.name}: {problem}" for mutation in chosen if (problem := mutation.problem())
    ]:
        print("\n".join(stale))
        return 1
    started = time.monotonic()
    if not options.skip_green and not _are_green(chosen):
        return 1
    survived = 0
    for number, mutation in enumerate(chosen, 1):
        began = time.monotonic()
        missed = [test for test, red in _run(mutation.tests, mutation).items() if not red]
        survived += bool(missed)
        verdict = "red" if not missed else "SURVIVED"
        seconds = time.monotonic() - began
        head = f"{number:3}/{len(chosen)}  {verdict:8} {seconds:5.1f} s"
        print(f"{head}  {mutation.name}: {mutation.fault}", flush=True)
        for test in missed:
            print(f"{'':22} not red: {test}", flush=True)
    print(f"{len(chosen)} faults, {survived} not noticed, {time.monotonic() - started:.0f} s")
    return int(survived > 0)


def _are_green(mutations: Iterable[Mutation]) -> bool:
    """Whether every test that is needed passes on an unchanged copy."""
    tests = sorted({test for mutation in mutations for test in mutation.tests})
    began = time.monotonic()
    outcomes = _run(tests, None)
    for test, red in outcomes.items():
        if red is not False:
            print(
                f"not green without a fault: {test}" + (" (it did not run)" if red is None else "")
            )
    print(f"{len(tests)} tests on an unchanged copy, {time.monotonic() - began:.0f} s", flush=True)
    return all(red is False for red in outcomes.values())


def _run(tests: Sequence[str], mutation: Mutation | None) -> dict[str, bool | None]:
    """Returns for each test whether it failed on a copy of the package.

    None stands for a test that did not run.
    """
    with tempfile.TemporaryDirectory(prefix="hybridkv-mutation-") as directory:
        source = Path(directory) / "src"
        package = source / "hybridkv"
        shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
        if mutation is not None:
            mutation.apply(package)
        environment = {
            **os.environ,
            "PYTHONPATH": f"{source}:{ROOT}",
            "HYPOTHESIS_STORAGE_DIRECTORY": f"{directory}/hypothesis",
            PACKAGE_VARIABLE: str(package),
            RESULTS_VARIABLE: f"{directory}/results.json",
        }
        if mutation is not None:
            environment["HYBRIDKV_TEST_DEADLINE"] = "10"
        outcomes: dict[str, bool | None] = {}
        ours = [test for test in tests if not is_command(test)]
        if ours:
            red = _pytest(ours, environment)
            outcomes.update(
                {test: any(nodes(red, test)) if nodes(red, test) else None for test in ours}
            )
        outcomes.update({test: _command(test, environment) for test in tests if is_command(test)})
        return outcomes


def _pytest(tests: Sequence[str], environment: dict[str, str]) -> dict[str, bool]:
    """Returns for each node that ran whether it failed."""
    options = "-q --no-header --tb=no -p tests.mutations.report -p no:cacheprovider"
    command = [
        sys.executable,
        "-m",
        "pytest",
        *options.split(),
        f"--timeout={TEST_SECONDS}",
        "--hypothesis-seed=0",
        "-m",
        "not gpu",
        *tests,
    ]
    subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, check=False)
    results_path = Path(environment[RESULTS_VARIABLE])
    return results(results_path.read_text()) if results_path.is_file() else {}


def _command(test: str, environment: dict[str, str]) -> bool | None:
    """Returns whether a command failed as it does where it finds something.

    Returns None where it could not run.
    """
    module, *arguments = shlex.split(test)
    begin = "import sys, runpy; from tests.mutations.report import is_the_copy; "
    run = f"runpy.run_module({module!r}, run_name='__main__')"
    words = f"assert is_the_copy(); sys.argv = {[module, *arguments]!r}; {run}"
    command = [sys.executable, "-c", begin + words]
    try:
        ended = subprocess.run(
            command,
            env=environment,
            cwd=ROOT,
            capture_output=True,
            check=False,
            timeout=COMMAND_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return True
    if ended.returncode and b"FAILED: " not in ended.stdout:
        return None
    return {0: False, 1: True}.get(ended.returncode)


if __name__ == "__main__":
    sys.exit(main())
