"""What `scripts/demo` says of the answers, and the demo itself."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.demo import Scene, has_hit, verdict

from tests.engine.server import Streamed

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[3]


def scene(*tokens: int, cached: int = 0) -> Scene:
    """A scene with one answer to a prompt of 100 tokens."""
    return Scene("", [Streamed(1.0, 2.0, [*tokens], 100, cached)])


@pytest.mark.parametrize(
    ("later", "own", "expected"),
    [
        (scene(1, 2), scene(1, 2), "yes"),
        (scene(1, 2), scene(1, 3), "yes"),
        (scene(1, 3), scene(1, 3), "as vLLM's own hit"),
        (scene(1, 3), scene(1, 2), "no"),
        (scene(1), scene(1, 2), "no"),
    ],
)
def test_an_answer_is_that_of_the_prefill_or_of_the_engines_own_hit(
    later: Scene, own: Scene, expected: str
) -> None:
    assert verdict(later, scene(1, 2), own) == expected


def test_a_hit_covers_most_of_the_first_prompt() -> None:
    assert has_hit(scene(1, cached=96))
    assert not has_hit(scene(1, cached=16))


def test_what_the_demo_imports_of_this_checkout_needs_no_pytest() -> None:
    """Its environment has what users have."""
    statements = ast.walk(ast.parse((ROOT / "benchmarks" / "demo.py").read_text()))
    names = {each.module or "" for each in statements if isinstance(each, ast.ImportFrom)}
    own = [name for name in sorted(names) if name.startswith(("tests", "benchmarks", "hybridkv"))]
    assert "tests.waiting" in own
    program = f"import sys; sys.modules['pytest'] = None; import {', '.join(own)}"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_the_demo() -> None:
    """Three restarts of a real model; without PyPI, the proof on tiny models."""
    subprocess.run(["scripts/demo"], cwd=ROOT, check=True)
