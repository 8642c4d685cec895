"""`python -m tests.gpu.checks.decode`: what a connector costs a decode step of a true size.

The program is benchmarks.decode, for a shape of tests.gpu.shapes.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

from benchmarks.decode import Work, measure

from hybridkv.lab.models import bundled_models
from tests.gpu.shapes import SHAPES, shaped_engine

PROMPT_TOKENS = 2000  # A block of a recurrent model may have more than 500 tokens.


def main() -> int:
    """Print the row as one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="qwen3.5-9b", choices=[*SHAPES, *bundled_models()])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("words", nargs="*", help="vLLM's arguments, after --")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hybridkv-gpu-") as directory:
        engine = shaped_engine(asked.model, Path(directory) / "model")
        arguments = [*engine.arguments, *asked.words]
        work = Work(asked.rounds, asked.requests, tokens=128, prompt_tokens=PROMPT_TOKENS)
        row = measure(asked.model, arguments, engine.environment, work, Path(directory))
    print(json.dumps({**row, "shape": engine.said}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
