"""Commands where vLLM is not installed: what needs it says so in one sentence."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.waiting import DEADLINE_SECONDS

NEEDED = ("msgspec", "prometheus_client", "rich", "xxhash", "markdown_it", "mdurl", "pygments")
"""What hybridkv itself needs, with what that needs."""
SOURCES = Path(__file__).parents[3] / "src"
MAIN = "import sys; from hybridkv.cli.main import main; sys.exit(main(sys.argv[1:]))"


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Variables with which Python, without its own packages, finds these alone."""
    packages = tmp_path / "packages"
    packages.mkdir()
    (packages / "hybridkv").symlink_to(SOURCES / "hybridkv")
    for name in NEEDED:
        found = find_spec(name)
        assert found is not None
        assert found.origin is not None
        (packages / name).symlink_to(Path(found.origin).parent)
    return {**os.environ, "PYTHONPATH": str(packages)}


@pytest.mark.parametrize(
    "words",
    [
        ["plan", "--model", "qwen3"],
        ["replay", "TRACE", "--model", "qwen3"],
        ["doctor", "--", "vllm", "serve", "qwen3"],
        ["verify"],
    ],
    ids=lambda words: words[0],
)
def test_what_needs_vllm_says_so(
    words: list[str], environment: dict[str, str], tmp_path: Path
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(json.dumps({"input_length": 600, "hash_ids": [1, 2]}))
    result = subprocess.run(
        [sys.executable, "-S", "-c", MAIN, *(str(trace) if w == "TRACE" else w for w in words)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=False,
    )
    lines = [line for line in result.stderr.splitlines() if line.startswith("hybridkv: ")]
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    assert lines == [result.stderr.splitlines()[-1]]
    assert "vLLM is not installed" in lines[0]
