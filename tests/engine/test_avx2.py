"""HYBRIDKV_TEST_CPU=avx2: vLLM finds AVX2 and nothing newer, in every process."""

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.avx2 import CPU_ENV, is_avx2

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[2]

ASK = """
import json, sys, torch
from vllm import _custom_ops
from vllm.platforms import current_platform
current_platform.import_kernels()
with open("/proc/self/maps") as maps:
    loaded = {line.rsplit("/", 1)[-1].strip() for line in maps if "/vllm/_C" in line}
answers = {name: getattr(torch.cpu, name)() for name in sys.argv[1:]}
answers["_custom_ops.cpu_has_amx_fp8"] = _custom_ops.cpu_has_amx_fp8()
capability = torch.backends.cpu.get_cpu_capability()
capabilities = dict(torch.cpu.get_capabilities())
print(json.dumps([answers, sorted(loaded), capability, capabilities]))
"""

START = """
import subprocess, sys
from tests.avx2 import choose_cpu
choose_cpu()
sys.exit(subprocess.run([sys.executable, "-c", *sys.argv[1:]]).returncode)
"""


def questions() -> list[str]:
    """Returns the names of vLLM's questions about the processor, as `_is_avx512_supported`."""
    (vllm,) = find_spec("vllm").submodule_search_locations  # type: ignore[union-attr, misc]
    sources = (path.read_text() for path in Path(vllm).rglob("*.py"))
    return sorted(
        {name for source in sources for name in re.findall(r"torch\.cpu\.(_is_\w+)", source)}
    )


class Processor(NamedTuple):
    """What a process finds of its processor."""

    answers: dict[str, bool]
    """To the questions, by name."""
    kernels: list[str]
    """The builds of vLLM's kernels that are loaded."""
    capability: str
    capabilities: dict[str, Any]


def asked(environment: dict[str, str], *names: str) -> Processor:
    """Returns what a child of a process with this environment finds."""
    hidden = (CPU_ENV, "PYTHONPATH", "ATEN_CPU_CAPABILITY")
    inherited = {name: value for name, value in os.environ.items() if name not in hidden}
    paths = os.pathsep.join((str(ROOT), str(ROOT / "src")))
    child = subprocess.run(
        [sys.executable, "-c", START, ASK, *names],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**inherited, "PYTHONPATH": paths, **environment},
    )
    assert child.returncode == 0, child.stderr[-3000:]
    answers, kernels, capability, capabilities = json.loads(child.stdout.splitlines()[-1])
    return Processor(answers, kernels, capability, capabilities)


@pytest.mark.soak
def test_every_question_that_vllm_asks_is_answered_as_on_avx2() -> None:
    names = questions()
    assert {"_is_avx512_supported", "_is_avx512_bf16_supported", "_is_amx_tile_supported"} <= set(
        names
    )
    processor = asked({CPU_ENV: "avx2"}, *names)
    assert not any(processor.answers.values()), processor.answers
    assert processor.kernels == ["_C_AVX2.abi3.so"], "of vLLM's three builds of its kernels"
    assert processor.capability == "AVX2"
    assert processor.capabilities["avx2"] is True, "what it has without AVX-512 is still said"
    assert not [name for name in processor.capabilities if name.startswith(("avx512", "amx"))]


@pytest.mark.soak
def test_without_the_switch_the_processor_answers() -> None:
    assert {"avx512_f", "avx512_bf16", "amx_tile"} <= set(asked({}).capabilities)


def test_another_processor_than_avx2_is_refused() -> None:
    with pytest.raises(AssertionError, match="HYBRIDKV_TEST_CPU='sse': avx2 works"):
        asked({CPU_ENV: "sse"})


@pytest.mark.skipif(is_avx2(), reason="this processor has nothing newer")
def test_packed_integers_are_read_exactly_without_vnni() -> None:
    """An identity is the same on every machine, so the answers about weights are."""
    name = "tests/unit/vllm/test_checkpoints.py::test_answers_about_integers_are_exact"
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", name],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, CPU_ENV: "avx2"},
    )
    assert result.returncode == 0, result.stdout[-3000:]
    assert "2 passed" in result.stdout
