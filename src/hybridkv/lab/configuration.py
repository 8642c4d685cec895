"""Previews of an engine from its configuration, by a child that asks vLLM (configuration_child)."""

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
from hybridkv.lab.engine_process import AnsweringChild, ChildEnvironment, log_tail
from hybridkv.lab.models import (
    bundled_arguments,
    bundled_environment,
    bundled_models,
    check_readable,
)
from hybridkv.wire.messages import WireEngine, geometry_from_wire

PREVIEW_SECONDS_MAX = 600.0
PREVIEW_ENVIRONMENT = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
"""Defaults for the child. Variables of the user win."""


@dataclass
class ConfigReport:
    """The child's answer: what an engine of the configuration would be."""

    findings: list[Finding] = field(default_factory=list)
    preview: ConfigPreview | None = None
    settings: Settings = Settings()
    identity: str = ""
    """The namespace that the engine will have, in hex, if `weights_identity` is set, else the
    fingerprint of all its facts but the weights.
    """
    facts: dict[str, str] = field(default_factory=dict)
    """Facts of the identity by name, as JSON."""
    unreadable: str = ""  # Why vLLM cannot read the arguments; nothing else is known then.


def inspect_arguments(
    arguments: Sequence[str],
    environment: Mapping[str, str] | None = None,
    waiting: Callable[[float], None] = lambda seconds: None,
) -> ConfigReport:
    """Return what `vllm serve` with these arguments would be.

    `waiting` is called every few seconds, with the seconds since vLLM was asked. Raises ConfigError
    where vLLM cannot read the arguments, and HybridKVError where it ends or does not answer.
    """
    model = _model_of(arguments)
    if model.startswith(("/", "./", "../")) and not Path(model).exists():
        raise ConfigError(f"model: there is no {model}", "a directory with a config.json works")
    with tempfile.TemporaryFile() as log:
        variables = ChildEnvironment(PREVIEW_ENVIRONMENT, environment)
        with AnsweringChild("hybridkv.lab.configuration_child", arguments, log, variables) as child:
            try:
                answer = child.receive_answer(PREVIEW_SECONDS_MAX, waiting)
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
    """Return the model that vLLM's arguments name. Empty where they name none in a usual way."""
    for word, next_word in pairwise([*arguments, ""]):
        if word == "--model":
            return next_word
        if word.startswith("--model="):
            return word.removeprefix("--model=")
    first = arguments[0] if arguments else ""
    return "" if first.startswith("-") else first


def inspect_model(
    model: str | None,
    vllm_arguments: Sequence[str],
    waiting: Callable[[float], None] = lambda seconds: None,
) -> ConfigReport:
    """Return `inspect_arguments` of a model directory, a hub name or a bundled tiny model.

    With None, the arguments name the model. Raises what `inspect_arguments` raises, and ConfigError
    where vLLM lacks what it needs to read a bundled model.
    """
    name = model or ""
    bundled = bundled_models().get(name)
    if bundled:
        check_readable(name)
    words = [*bundled_arguments(name), *vllm_arguments] if bundled else vllm_arguments
    model_words = [] if model is None else [str(bundled or model)]
    environment = bundled_environment(name) if bundled else None
    report = inspect_arguments([*model_words, *serve_arguments(words)], environment, waiting)
    if report.preview is not None and model is not None:
        report.preview = replace(report.preview, model=model)
    return report


def serve_arguments(words: Sequence[str]) -> list[str]:
    """Return the arguments of a command line: ["vllm", "serve", "--seed=1"] -> ["--seed=1"]."""
    rest = list(words)
    for word in ("vllm", "serve"):
        if rest[:1] == [word]:
            del rest[0]
    return rest


def preview_of(engine: WireEngine) -> ConfigPreview:
    """Return what the daemon knows of an engine that is connected."""
    geometry, model = geometry_from_wire(engine.geometry), engine.model
    layers = [] if model is None else model.layers
    groups = [
        GroupPreview(
            gid=group.gid,
            kind=str(group.kind),
            tokens_per_block=group.tokens_per_block,
            layers=count,
            block_bytes=group.block_bytes,
            window_tokens=group.window_tokens,
        )
        for group, count in zip(geometry.groups, chain(layers, repeat(0)), strict=False)
    ]
    preview = ConfigPreview(
        model=engine.engine_id,
        max_model_len=0,
        kv_dtype="unknown",
        ranks=geometry.ranks,
        stages=geometry.stages,
        groups=tuple(groups),
        geometry=geometry,
    )
    if model is None:
        return preview
    return replace(
        preview,
        model=model.name,
        max_model_len=model.max_model_len,
        kv_dtype=model.kv_dtype,
        states=StateRule(model.retention_tokens, model.step_tokens),
    )
