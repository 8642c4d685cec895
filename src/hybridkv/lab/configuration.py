"""Previews of an engine from its configuration, by a child that asks vLLM (configuration_entry)."""

import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise, repeat
from pathlib import Path
from typing import NamedTuple

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
MODEL_WORKS = "a directory with a config.json works (`hybridkv model DIR` makes a tiny one)"
_API_SERVER, _CLI = "vllm.entrypoints.openai.api_server", "vllm.entrypoints.cli.main"
OptionValue = str | int | None
"""The value of an option of vLLM. None = none."""
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
    all_facts: dict[str, str] = field(default_factory=dict)
    """All facts of that fingerprint, each setting of a mapping alone, as the daemon gets them."""
    role: str = ""  # vLLM's kv_role.
    options: dict[str, OptionValue] = field(default_factory=dict)
    """What came of the options and variables that two engines must share (hybridkv.lab.pairs)."""
    unreadable: str = ""  # Why vLLM cannot read the arguments; nothing else is known then.
    readable: str = "vllm serve --help=all lists what works"  # The remedy where it cannot.


class ServeCommand(NamedTuple):
    """A command line that serves: the arguments of `vllm serve`, and variables before it."""

    arguments: list[str]
    variables: dict[str, str]


def inspect_arguments(
    arguments: Sequence[str],
    environment: Mapping[str, str] | None = None,
    waiting: Callable[[float], None] = lambda seconds: None,
    *,
    with_environment: bool = False,
) -> ConfigReport:
    """Return what `vllm serve` with these arguments would be.

    `waiting` is called every few seconds, with the seconds since vLLM was asked. With
    `with_environment` there are findings about the environment too, and without arguments no
    others. Raises ConfigError where vLLM cannot read the arguments, and HybridKVError where it ends
    or does not answer.
    """
    model = _model_of(arguments)
    if model.startswith(("/", "./", "../")) and not Path(model).exists():
        raise ConfigError(f"model: there is no {model}", MODEL_WORKS)
    with tempfile.TemporaryFile() as log:
        variables = ChildEnvironment(PREVIEW_ENVIRONMENT, environment)
        words = [str(int(with_environment)), *arguments]
        with AnsweringChild("hybridkv.lab.configuration_entry", words, log, variables) as child:
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
        raise ConfigError(report.unreadable, report.readable)
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
    serving = serve_command(words)
    environment = serving.variables | (bundled_environment(name) if bundled else {})
    report = inspect_arguments([*model_words, *serving.arguments], environment, waiting)
    if report.preview is not None and model is not None:
        report.preview = replace(report.preview, model=model)
    return report


def serve_command(words: Sequence[str]) -> ServeCommand:
    """Return the arguments of a command line in any of the forms in which vLLM is started.

    ["SEED=1", "vllm", "serve", "m", "--seed=1"] -> ["m", "--seed=1"] and {"SEED": "1"};
    ["python3", "-m", "vllm.entrypoints.openai.api_server", "--seed=1"] -> ["--seed=1"]
    """
    for at in range(len(words)):
        first, *rest = words[at:]
        starts = (
            (Path(first).name == "vllm" and rest[:1] == ["serve"], 1),
            (first == "-m" and rest[:1] == [_API_SERVER], 1),
            (first == "-m" and rest[:2] == [_CLI, "serve"], 2),
        )
        for is_start, count in starts:
            if is_start:
                pairs = (re.fullmatch(r"([A-Za-z_]\w*)=(.*)", word, re.S) for word in words[:at])
                return ServeCommand(rest[count:], {p[1]: p[2] for p in pairs if p})
    return ServeCommand([*words[1:]] if words[:1] == ["serve"] else [*words], {})


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
        states=StateRule(model.retention_tokens, model.step_tokens, model.keeps_junctions),
    )
