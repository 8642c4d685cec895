"""What vLLM makes of a configuration, asked of a child: hybridkv.lab.configuration_child."""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise, repeat
from pathlib import Path

import msgspec

from hybridkv.core.errors import ConfigError, HybridKVError
from hybridkv.core.findings import Finding
from hybridkv.core.settings import Settings
from hybridkv.core.state_boundaries import StateRule
from hybridkv.lab.capacity import ConfigPreview, GroupPreview
from hybridkv.lab.engine_process import AnsweringChild, log_tail
from hybridkv.lab.models import bundled_arguments, bundled_environment, bundled_models
from hybridkv.wire.messages import WireEngine, geometry_from_wire

PREVIEW_SECONDS_MAX = 600.0
PREVIEW_ENVIRONMENT = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
"""Defaults for the child; what the user has set wins."""


@dataclass
class ConfigReport:
    """What the child found."""

    findings: list[Finding] = field(default_factory=list)
    preview: ConfigPreview | None = None
    settings: Settings = Settings()
    identity: str = ""
    """The namespace that the engine will have, in hex, if `weights_identity` is set; else the
    fingerprint of all that makes it but the weights.
    """
    facts: dict[str, str] = field(default_factory=dict)
    unreadable: str = ""  # Why vLLM cannot read the arguments at all; then nothing else is known.


def inspect_arguments(
    arguments: Sequence[str],
    environment: Mapping[str, str] | None = None,
    waiting: Callable[[float], None] = lambda seconds: None,
) -> ConfigReport:
    """What `vllm serve` with these arguments would be; raises ConfigError where it is none.

    `waiting` is called every few seconds, with the seconds since vLLM was asked.
    """
    model = _model_of(arguments)
    if model.startswith(("/", "./", "../")) and not Path(model).exists():
        raise ConfigError(f"model: there is no {model}", "a directory with a config.json works")
    with tempfile.TemporaryFile() as log:
        module, variables = "hybridkv.lab.configuration_child", (PREVIEW_ENVIRONMENT, environment)
        with AnsweringChild(module, arguments, log, *variables) as child:
            try:
                answer = child.receive(PREVIEW_SECONDS_MAX, waiting)
            except TimeoutError as error:
                child.close(0.0)
                what = f"vLLM did not read its configuration within {PREVIEW_SECONDS_MAX:g} s"
                raise HybridKVError(what) from error
            if answer is None:
                status = child.process.wait()
                log.seek(0)
                raise HybridKVError(f"vLLM ended with status {status}:\n{log_tail(log.read())}")
    report = msgspec.json.decode(answer, type=ConfigReport)
    if report.unreadable:
        raise ConfigError(report.unreadable, "vllm serve --help=all lists what works")
    return report


def _model_of(arguments: Sequence[str]) -> str:
    """The model that vLLM's arguments name; empty where they name none in a usual way."""
    for word, after in pairwise([*arguments, ""]):
        if word == "--model":
            return after
        if word.startswith("--model="):
            return word.removeprefix("--model=")
    first = arguments[0] if arguments else ""
    return "" if first.startswith("-") else first


def inspect_model(
    model: str | None,
    vllm_arguments: Sequence[str],
    waiting: Callable[[float], None] = lambda seconds: None,
) -> ConfigReport:
    """As `inspect_arguments`, of a model directory, a hub name or a bundled tiny model.

    With None, the arguments name the model.
    """
    name = model or ""
    bundled = bundled_models().get(name)
    words = [*bundled_arguments(name), *vllm_arguments] if bundled else vllm_arguments
    named = [] if model is None else [str(bundled or model)]
    environment = bundled_environment(name) if bundled else None
    report = inspect_arguments([*named, *serve_arguments(words)], environment, waiting)
    if report.preview is not None and model is not None:
        report.preview = replace(report.preview, model=model)
    return report


def serve_arguments(words: Sequence[str]) -> list[str]:
    """The arguments of a command line that may begin with "vllm serve"."""
    rest = list(words)
    for word in ("vllm", "serve"):
        if rest[:1] == [word]:
            del rest[0]
    return rest


def preview_of(engine: WireEngine) -> ConfigPreview:
    """What the daemon knows of an engine that is connected."""
    geometry, model = geometry_from_wire(engine.geometry), engine.model
    named, layers, rule = (engine.engine_id, 0, "unknown"), [], StateRule()
    if model is not None:
        named, layers = (model.name, model.max_model_len, model.kv_dtype), model.layers
        rule = StateRule(model.retention_tokens, model.step_tokens)
    groups = [
        GroupPreview(
            *(group.gid, str(group.kind), group.tokens_per_block),
            *(count, group.block_bytes, group.window_tokens),
        )
        for group, count in zip(geometry.groups, chain(layers, repeat(0)), strict=False)
    ]
    return ConfigPreview(*named, geometry.ranks, tuple(groups), geometry, rule)
