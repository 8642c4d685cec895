"""Real engines for tests. Programs whose engines are other processes import no vLLM by this."""

import json
import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from hybridkv.client.control import ControlClient, DaemonUnreachableError
from hybridkv.lab.engine_process import EngineProcess
from hybridkv.lab.models import bundled_arguments, bundled_environment, bundled_models
from tests.engine.forked import ForkedEngine
from tests.waiting import DEADLINE_SECONDS, until

VOCABULARY = 2048
MEMORY, KV_BYTES = "--kv-cache-memory-bytes", 128 << 20
"""Half of what a bundled model's engine has, since it is all written to at the start."""
LOOKUP_TIMEOUT_MS = 20_000
"""Longer than any machine takes for an answer: where it is not what a test is about, a late answer
would be a miss that says nothing."""


def since_vllm(minor: int, why: str) -> pytest.MarkDecorator:
    """Skips a test before vLLM 0.`minor`, where it does not hold: `why`."""
    import vllm

    is_older = int(vllm.__version__.split(".")[1]) < minor
    return pytest.mark.skipif(is_older, reason=f"vLLM {vllm.__version__}: {why}")


def is_served(model: str) -> bool:
    """Whether vLLM leaves prefix caching on for this model here.

    The shim for MLA (tests/cpu-shims) says why it may not.
    """
    import torch

    return model != "deepseekv4" or torch.cpu._is_avx512_bf16_supported()


def engine(
    model: str,
    log_path: Path,
    server: str | None,
    *options: str,
    extra: dict[str, object] | None = None,
    environment: dict[str, str] | None = None,
    kind: type[EngineProcess] = ForkedEngine,
) -> EngineProcess:
    """Returns an engine on a bundled model, not started yet.

    `server` is a socket path, "auto", or None for an engine without a connector.
    """
    return kind(
        arguments_of(model, server, *options, extra=extra),
        log_path,
        lambda text: None,
        {**bundled_environment(model), **(environment or {})},
    )


def arguments_of(
    model: str,
    server: str | None,
    *options: str,
    extra: dict[str, object] | None = None,
    module: str | None = None,
    role: str = "kv_both",
) -> list[str]:
    """Returns vLLM's arguments of such an engine.

    `module` has another connector of the same name; else vLLM has ours by the plugin.
    """
    bundled = [word for word in bundled_arguments(model) if not word.startswith(MEMORY)]
    arguments = [f"--model={bundled_models()[model]}", *bundled, f"{MEMORY}={KV_BYTES}", *options]
    if server is not None:
        settings = {
            "server": "auto" if server == "auto" else f"unix://{server}",
            "lookup_timeout_ms": LOOKUP_TIMEOUT_MS,
            "audit": "off",  # An audited hit is a chunk shorter.
        }
        transfer = {
            "kv_connector": "HybridKVConnector",
            "kv_role": role,
            "kv_connector_extra_config": {**settings, **(extra or {})},
        }
        transfer |= {} if module is None else {"kv_connector_module_path": module}
        arguments += ["--kv-transfer-config", json.dumps(transfer)]
    return arguments


class CommandReport(NamedTuple):
    """The exit status of a command, and the JSON that it printed."""

    status: int
    report: dict[str, Any]


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(2, VOCABULARY), k=length)


def answer(result: dict[str, Any]) -> tuple[list[int], list[Any]]:
    """Returns the part of an answer that must be equal: tokens and exact log-probabilities."""
    return result["tokens"], result["logprobs"]


def stats(socket_path: str) -> dict[str, float]:
    with ControlClient(socket_path, DEADLINE_SECONDS) as control:
        return control.stats().values


def stats_if_served(socket_path: str) -> dict[str, float]:
    """Returns the daemon's values, or {} where no daemon listens, though its socket may exist."""
    try:
        return stats(socket_path)
    except DaemonUnreachableError:
        return {}


def begin_storing(running: EngineProcess, socket_path: str, prompts: list[list[int]]) -> None:
    """Begin long answers. Returns once all prompts are looked up and write slots are held."""
    lookups = stats(socket_path)["lookups"]
    running.begin_command("generate", prompts=prompts, max_tokens=2000)

    def is_storing() -> bool:
        held = stats(socket_path)
        are_looked_up = held["lookups"] >= lookups + len(prompts)
        return are_looked_up and held["bytes_writing"] > 0

    until(is_storing, "all requests are looked up, and write slots are held")


def forget(running: EngineProcess) -> None:
    """Empty the engine's own cache, and wait until its weights were read again.

    Until then nothing is stored, and a request does not wait for it long.
    """

    def readings() -> int:
        return running.log_path.read_text(errors="replace").count("were read in")

    before = readings()
    running.reset_caches()

    def is_read() -> bool:
        running.generate(prompt(9, 10), max_tokens=1)
        return readings() > before

    until(is_read, "the weights are read")
