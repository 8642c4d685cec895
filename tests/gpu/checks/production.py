"""`python -m tests.gpu.checks.production`: an engine as users run it, over a restart.

vLLM's defaults: its own process, CUDA graphs, asynchronous scheduling and the default model
runner. The same prompts are asked of an engine without a connector, twice; of one that stores; and
of one that is started after it, whose answers must be those of the first engine's own prefix hits.
It finds what the other one stored only if both have the same identity of their weights. Only hits
of the same length are compared: a first hit may be a chunk shorter, because it is audited.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from hybridkv.lab.daemon_process import DaemonProcess
from hybridkv.lab.engine_process import CONNECTOR
from hybridkv.lab.models import bundled_arguments, bundled_environment, bundled_models

PROMPTS, ANSWER_TOKENS = 5, 16
HIT_TOKENS = 1920
"""The engine's own hit of a prompt, and ours: a multiple of 128, and of the 160 tokens that the
chunks of bundled models with states have on a GPU."""
PROMPT_TOKENS = HIT_TOKENS + 8
ENGINE_SECONDS = 200.0


def prompts(vocabulary: int = 1000) -> list[list[int]]:
    """Draw the token ids of all prompts. They are the same in each process."""
    chosen = random.Random(7)
    return [
        [chosen.randrange(10, vocabulary) for _ in range(PROMPT_TOKENS)] for _ in range(PROMPTS)
    ]


def run_engine(
    model: str, socket_path: str, passes: int, answers_path: Path, words: list[str]
) -> int:
    """Start one engine, ask all prompts so many times, one after another, and write the answers."""
    from vllm import LLM, SamplingParams
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    arguments = [word for word in bundled_arguments(model) if word != "--enforce-eager"]
    arguments += [f"--model={bundled_models()[model]}", *words]
    if socket_path:
        transfer = {
            "kv_connector": CONNECTOR,
            "kv_connector_module_path": "hybridkv.connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "server": f"unix://{socket_path}",
                "load_policy": "always",
                "lookup_timeout_ms": 5000,
            },
        }
        arguments += ["--kv-transfer-config", json.dumps(transfer)]
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    asked = EngineArgs.from_cli_args(parser.parse_args(arguments))
    engine = LLM.from_engine_args(asked)
    sampling = SamplingParams(
        temperature=0.0, ignore_eos=True, detokenize=False, max_tokens=ANSWER_TOKENS
    )
    answers: list[list[dict[str, Any]]] = []
    for _ in range(passes):
        row = []
        for prompt in prompts():
            started = time.perf_counter()
            output = engine.generate({"prompt_token_ids": prompt}, sampling, use_tqdm=False)[0]
            milliseconds = round(1e3 * (time.perf_counter() - started), 1)
            tokens = [*output.outputs[0].token_ids]
            row.append({"tokens": tokens, "cached": output.num_cached_tokens, "ms": milliseconds})
        answers.append(row)
    answers_path.write_text(json.dumps(answers))
    return 0


def ask(model: str, socket_path: str, passes: int, words: list[str]) -> Any:
    """Return the answers of an engine in processes of its own, by pass and prompt."""
    with tempfile.NamedTemporaryFile(suffix=".json") as answers:
        command = [sys.executable, "-m", "tests.gpu.checks.production", f"--model={model}"]
        command += [f"--socket={socket_path}", f"--passes={passes}", f"--engine={answers.name}"]
        environment = {**os.environ, **bundled_environment(model)}
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
        subprocess.run(
            [*command, "--", *words],
            stdout=sys.stderr,
            env=environment,
            timeout=ENGINE_SECONDS,
            check=True,
        )
        return json.loads(Path(answers.name).read_text())


def main() -> int:
    """Print the figures; 1 where an answer is wrong or nothing came from the daemon."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="qwen3")
    parser.add_argument("--socket", default="")
    parser.add_argument("--passes", type=int, default=1)
    parser.add_argument("--engine", type=Path, help="run one engine; its answers go to this file")
    parser.add_argument("words", nargs="*", help="vLLM's arguments, after --")
    asked = parser.parse_args()
    if asked.engine:
        return run_engine(asked.model, asked.socket, asked.passes, asked.engine, asked.words)
    with tempfile.TemporaryDirectory(prefix="hybridkv-gpu-") as directory:
        own = ask(asked.model, "", 2, asked.words)
        socket_path = str(Path(directory) / "daemon.sock")
        with DaemonProcess(socket_path, "1GiB"):
            (stored,) = ask(asked.model, socket_path, 1, asked.words)
            (loaded,) = ask(asked.model, socket_path, 1, asked.words)
    facts = {
        "model": asked.model,
        "same_as_own_hit": [
            here["tokens"] == there["tokens"]
            for here, there in zip(loaded, own[1], strict=True)
            if here["cached"] == there["cached"]
        ],
        "same_as_computed": [
            here["tokens"] == there["tokens"] for here, there in zip(stored, own[0], strict=True)
        ],
        "own_cached": [answer["cached"] for answer in own[1]],
        "cached": [answer["cached"] for answer in loaded],
        "answer_ms": {
            "computed": [answer["ms"] for answer in own[0]],
            "own hit": [answer["ms"] for answer in own[1]],
            "stored": [answer["ms"] for answer in stored],
            "loaded": [answer["ms"] for answer in loaded],
        },
        "distinct_tokens": len({token for answer in own[0] for token in answer["tokens"]}),
    }
    compared = facts["same_as_own_hit"]
    ok = all(compared) and len(compared) >= PROMPTS - 1 and all(facts["cached"])
    print(json.dumps({"ok": ok, **facts}))
    return int(not ok)


if __name__ == "__main__":
    sys.exit(main())
