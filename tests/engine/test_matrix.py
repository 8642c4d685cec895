"""Every architecture on the real engine, and as on a processor without AVX-512."""

import os
import subprocess
import sys
from collections.abc import Sequence

import msgspec
import pytest

from tests.avx2 import is_avx2
from tests.engine.forked import lines_of
from tests.engine.matrix.cases import CASES
from tests.engine.matrix.report import CaseReport

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]


def by_case(lines: Sequence[str]) -> dict[str, CaseReport]:
    """Returns the reports that a process printed, by the case's name."""
    decoded = [msgspec.json.decode(line, type=CaseReport) for line in lines if line.startswith("{")]
    return {report.case: report for report in decoded}


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> dict[str, CaseReport]:
    """The reports with this processor, or with the one that HYBRIDKV_TEST_CPU names."""
    variables = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"}
    log_path = tmp_path_factory.mktemp("matrix") / "log"
    module = "tests.engine.matrix.arms"
    return by_case(lines_of(module, [*CASES], log_path, variables))


@pytest.fixture(scope="module")
def avx2() -> dict[str, CaseReport]:
    """The reports without AVX-512 and AMX, of a process of its own that imports vLLM so."""
    ran = subprocess.run(
        [sys.executable, "-m", "tests.engine.matrix", *CASES],
        stdout=subprocess.PIPE,
        env={**os.environ, "HYBRIDKV_TEST_CPU": "avx2"},
        text=True,
        check=False,
    )
    return by_case(ran.stdout.splitlines())


def check(found: dict[str, CaseReport], case: str) -> None:
    """A case without a report is a fault."""
    assert case in found, f"no report of {case}"
    faults = list(found[case].faults())
    assert not faults, "\n".join(faults)
    if found[case].skipped:
        pytest.skip(found[case].skipped)
    assert found[case].served is not None


@pytest.mark.parametrize("case", CASES)
def test_hits_from_outside_are_the_engines_own(case: str, here: dict[str, CaseReport]) -> None:
    check(here, case)


@pytest.mark.skipif(
    is_avx2(), reason="this processor has nothing newer: the test above is this one"
)
@pytest.mark.parametrize("case", CASES)
def test_the_same_without_avx512(case: str, avx2: dict[str, CaseReport]) -> None:
    check(avx2, case)
