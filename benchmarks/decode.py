"""What an attached connector costs a decode step: `python -m benchmarks.decode [--models NAMES]`.

Real engines decode the same new prompts in turns: one with the connector and a daemon, one without
a connector, and one with a connector that does nothing. Nothing is hit, and what is generated is
stored. Each round's times are compared with those of the engine without a connector.
"""

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.rows import print_rows
from hybridkv.client.control import ControlClient
from hybridkv.core.errors import HybridKVError
from hybridkv.lab.daemon_process import DaemonProcess
from hybridkv.lab.engine_process import EngineProcess
from hybridkv.lab.models import bundled_arguments, bundled_environment, bundled_models
from hybridkv.vllm.preflight import CONNECTOR

MODELS = ("qwen3", "qwen3_ngram", "qwen3_draft", "llama_eagle")
"""A model that does not draft, n-gram speculation, a draft model, and EAGLE."""
VOCABULARY = 2000
IDLE = {
    **CONNECTOR,
    "kv_connector": "IdleConnector",
    "kv_connector_module_path": "benchmarks.idle_connector",
}
MEASURES = {"decode_step_seconds": "wall", "decode_processor_seconds": "processor"}


@dataclass(frozen=True)
class Work:
    """What each engine decodes: rounds of so many prompts at once."""

    rounds: int
    requests: int
    tokens: int
    """To generate for each prompt."""
    prompt_tokens: int = 200


def measure(
    model: str, plain: list[str], environment: Mapping[str, str], work: Work, directory: Path
) -> dict[str, Any]:
    """Returns a row: milliseconds of a decode step of each engine, and the spread of ratios.

    `plain` are vLLM's arguments of an engine without a connector, and `model` names it in the row.
    """
    socket_path = str(directory / f"{model}.sock")
    transfer = {**CONNECTOR, "kv_connector_extra_config": {"server": f"unix://{socket_path}"}}
    arms = {
        "plain": plain,
        "idle": [*plain, f"--kv-transfer-config={json.dumps(IDLE)}"],
        "attached": [*plain, f"--kv-transfer-config={json.dumps(transfer)}"],
    }
    rng = random.Random(model)
    # By measure and engine, the seconds of a step in each round.
    seconds: dict[str, dict[str, list[float]]] = {
        name: {arm: [] for arm in arms} for name in MEASURES
    }
    with ExitStack() as stack:
        stack.enter_context(DaemonProcess(socket_path, "1GiB"))
        engines = {
            arm: stack.enter_context(
                EngineProcess(
                    arguments, directory / f"{model}.{arm}.log", lambda text: None, environment
                )
            )
            for arm, arguments in arms.items()
        }
        accepted = []
        # The first round makes both warm.
        for number in range(work.rounds + 1):
            prompts = [
                rng.choices(range(2, VOCABULARY), k=work.prompt_tokens)
                for _ in range(work.requests)
            ]
            for arm in arms if number % 2 else reversed(arms):
                first, *others = engines[arm].generate(*prompts, max_tokens=work.tokens)
                if number:
                    for name, of_arms in seconds.items():
                        of_arms[arm].append(_step_seconds(first[name]))
                    steps = [len(answer["step_tokens"]) - 1 for answer in (first, *others)]
                    accepted.append((work.tokens - 1) * work.requests / sum(steps))
        with ControlClient(socket_path) as control:
            stored = int(control.stats().values["objects_stored"])
    if not stored:
        raise HybridKVError(f"{model}: the connector stored nothing")
    row: dict[str, Any] = {"model": model, "tokens/step": round(statistics.mean(accepted), 2)}
    for name, what in MEASURES.items():
        for arm, of_arm in seconds[name].items():
            row[f"{what} ms, {arm}"] = round(statistics.median(of_arm) * 1e3, 2)
        for arm in ("idle", "attached"):
            pairs = zip(seconds[name][arm], seconds[name]["plain"], strict=True)
            row[f"{what} ratio, {arm}"] = _spread([of_arm / of_plain for of_arm, of_plain in pairs])
    return {**row, "objects stored": stored}


def _step_seconds(steps: Sequence[float]) -> float:
    """Returns the average seconds of a step, so that steps which store count."""
    return sum(steps) / len(steps)


def _spread(ratios: list[float]) -> str:
    return f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"


def main() -> int:
    """Measure each model, and print a row for each."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decode", description=__doc__)
    parser.add_argument("--models", default=",".join(MODELS), help="bundled models, with commas")
    parser.add_argument("--rounds", type=int, default=9, help="rounds that count (default: 9)")
    parser.add_argument("--requests", type=int, default=4, help="prompts at once (default: 4)")
    parser.add_argument("--tokens", type=int, default=128, help="to generate (default: 128)")
    parser.add_argument("--json", action="store_true", help="print one JSON array")
    parser.add_argument("words", nargs="*", help="vLLM's arguments of all engines, after --")
    arguments = parser.parse_args()
    models = arguments.models.split(",")
    if unknown := sorted({*models} - {*bundled_models()}):
        parser.error(f"--models {','.join(unknown)}: {','.join(MODELS)} works")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    work = Work(arguments.rounds, arguments.requests, arguments.tokens)
    rows = []
    with tempfile.TemporaryDirectory(prefix="hybridkv-bench-") as directory:
        for model in models:
            plain = [f"--model={bundled_models()[model]}", *bundled_arguments(model)]
            plain += arguments.words
            rows.append(measure(model, plain, bundled_environment(model), work, Path(directory)))
            print(f"decode of {model} done", file=sys.stderr)
    print_rows(rows, arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
