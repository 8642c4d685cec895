"""An engine's configuration looked at in a child process. See hybridkv.cli.previewer for the other side."""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from hybridkv.core.errors import ConfigError, HybridKVError
from hybridkv.core.findings import Finding
from hybridkv.core.plan import Preview
from hybridkv.core.settings import Settings
from hybridkv.testing.models import bundled_arguments, bundled_environment, bundled_models

PREVIEW_SECONDS_MAX = 600.0
PREVIEW_ENVIRONMENT = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
"""Defaults for the child; what the user has set wins."""
_EXIT_USAGE = 2
_LOG_TAIL_LINES = 15


@dataclass
class Answer:
    """What the child found."""

    findings: list[Finding] = field(default_factory=list)
    preview: Preview | None = None
    settings: Settings = Settings()
    transfer_named: bool = False
    """Whether the arguments had a `--kv-transfer-config` with our connector."""
    identity: str = ""
    """The namespace that the engine will have, in hex."""
    facts: dict[str, str] = field(default_factory=dict)


def look(arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> Answer:
    """Ask a child what `vllm serve` with these arguments would be; raises ConfigError where vLLM cannot read them."""
    with tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as answers:
        try:
            status = subprocess.run(
                [sys.executable, "-m", "hybridkv.cli.previewer", str(answers.fileno()), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                pass_fds=(answers.fileno(),),
                env={**PREVIEW_ENVIRONMENT, **os.environ, **(environment or {})},
                timeout=PREVIEW_SECONDS_MAX,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired as error:
            raise HybridKVError(f"vLLM did not read its configuration within {PREVIEW_SECONDS_MAX:g} s") from error
        answers.seek(0)
        if answer := answers.read():
            return msgspec.json.decode(answer, type=Answer)
        said.seek(0)
        lines = said.read().decode(errors="replace").strip().splitlines()
    if status == _EXIT_USAGE and lines:
        raise ConfigError(f"{lines[-1].removeprefix('vllm serve: error: ')}; vllm serve --help=all lists what works")
    raise HybridKVError(f"vLLM ended with status {status}:\n" + "\n".join(lines[-_LOG_TAIL_LINES:]))


def add_model_arguments(parser: argparse.ArgumentParser, otherwise: str) -> None:
    """What `look_at_model` takes; `otherwise` says what is meant without `--model`."""
    parser.add_argument(
        "--model",
        metavar="DIR_OR_NAME",
        help="a model directory (its config.json is enough), a hub name, or a bundled tiny model: "
        f"{', '.join(bundled_models())} (default: {otherwise})",
    )
    parser.add_argument("vllm_arguments", nargs="*", metavar="-- VLLM ARGS", help="passed to vLLM as they are")


def look_at_model(model: str | None, vllm_arguments: Sequence[str]) -> Answer:
    """As `look`, of a model directory, a hub name or a bundled tiny model; None: of what the arguments name."""
    bundled = bundled_models().get(model or "")
    words = [*bundled_arguments(model or ""), *vllm_arguments] if bundled else vllm_arguments
    named = [] if model is None else [str(bundled or model)]
    answer = look([*named, *serve_arguments(words)], bundled_environment(model or "") if bundled else None)
    if answer.preview is not None and model is not None:
        answer.preview = replace(answer.preview, model=model)
    return answer


def serve_arguments(words: Sequence[str]) -> list[str]:
    """The arguments of a command line that may begin with "vllm serve"."""
    rest = list(words)
    for word in ("vllm", "serve"):
        if rest[:1] == [word]:
            rest = rest[1:]
    return rest
