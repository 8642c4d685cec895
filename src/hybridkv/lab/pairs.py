"""Whether two engines would find each other's KV: the reports on two command lines, compared.

Engines share what is stored under one identity, in one daemon. Where two identities differ, the
options from which that comes are named, and not what follows from them, such as block sizes.
"""

import json
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from hybridkv.core.findings import Finding, fail, ok, warn
from hybridkv.core.settings import Settings
from hybridkv.lab.configuration import ConfigReport, OptionValue

OPTIONS: Mapping[str, str] = {
    "--block-size": "cache_config.block_size",
    "--dtype": "model_config.dtype",
    "--kv-cache-dtype": "cache_config.cache_dtype",
    "--mamba-cache-dtype": "cache_config.mamba_cache_dtype",
    "--mamba-ssm-cache-dtype": "cache_config.mamba_ssm_cache_dtype",
    "--max-model-len": "model_config.max_model_len",
    "--pipeline-parallel-size": "parallel_config.pipeline_parallel_size",
    "--prefix-caching-hash-algo": "cache_config.prefix_caching_hash_algo",
    "--prefix-match-unit": "cache_config.prefix_match_unit",
    "--quantization": "model_config.quantization",
    "--tensor-parallel-size": "parallel_config.tensor_parallel_size",
}
"""Options of vLLM that shape the KV or its names, and the field of a VllmConfig for each."""
WEIGHTS_OPTIONS: Mapping[str, str] = {
    "--model": "model_config.model",
    "--revision": "model_config.revision",
}
"""Options that say which weights are loaded. The identity has the weights themselves."""
HASH_SEED = "PYTHONHASHSEED"
_CHECK = "pair"
_SETTINGS = ("hybrid_chunk_size", "share_tp", "weights_identity")
_VARIABLE = "environment."  # What the fact of a variable begins with.
_SHOWN_MAX, _TEXT_MAX = 3, 60
_PRODUCER, _CONSUMER = "kv_producer", "kv_consumer"


class EngineOfPair(NamedTuple):
    """One of two command lines, as the engine that it would start."""

    report: ConfigReport
    socket_path: str  # Of its daemon. "" = not known.


class Difference(NamedTuple):
    """An option, a setting or a variable in which two engines differ."""

    name: str
    first: OptionValue
    second: OptionValue

    def finding(self) -> Finding:
        """Return the FAIL that names both values, and that of the first engine as one that works.

        ("--dtype", "half", "float32") -> "--dtype is half for the first and float32 for the second
        engine, so neither finds the other's KV; --dtype half for both works"
        """
        values = f"{_said(self.first)} for the first and {_said(self.second)}"
        what = f"{self.name} is {values} for the second engine, so neither finds the other's KV"
        return fail(_CHECK, what, self._works())

    def _works(self) -> str:
        name, value = self.name, self.first
        if name.startswith("--"):
            works = f"leaving {name} out" if value is None else f"{name} {value}"
        elif name in _SETTINGS:
            works = f"leaving {name} out" if value is None else f'"{name}": {json.dumps(value)}'
        else:
            works = f"unset {name}" if value is None else f"{name}={value}"
        return f"{works} for both works"


def pair_findings(first: EngineOfPair, second: EngineOfPair) -> Iterator[Finding]:
    """Yield by what the two engines would not find each other's KV, or one OK for each part."""
    yield _role_finding(first.report.role, second.report.role)
    if first.socket_path and second.socket_path:
        yield _daemon_finding(first.socket_path, second.socket_path)
    if not (first.report.identity and second.report.identity):
        what = "identities are not compared, because one of the engines would not start"
        yield warn(_CHECK, what, "mending what fails above works")
        return
    yield from _identity_findings(first.report, second.report)
    yield from _weights_findings(first.report, second.report)


def _role_finding(first: str, second: str) -> Finding:
    """Return whether the roles of two engines fit. Others wait for what a producer computes."""
    roles = f"the first engine is {first}, the second {second}"
    if first == second == _PRODUCER:
        what = f"{roles}: the KV of answers is not stored, so no next turn hits it"
        return warn(_CHECK, what, f'"kv_role":"{_CONSUMER}" for the one that answers works')
    if first == second == _CONSUMER:
        what = f"{roles}: nobody waits for what either of them computes"
        return warn(_CHECK, what, f'"kv_role":"{_PRODUCER}" for the one that gets prompts works')
    return ok(_CHECK, roles)


def _daemon_finding(first: str, second: str) -> Finding:
    if first == second:
        return ok(_CHECK, f"one daemon, at {first}")
    what = f"the engines have two daemons, at {first} and {second}"
    return fail(_CHECK, what, f'"server":"unix://{first}" for both works')


def _identity_findings(first: ConfigReport, second: ConfigReport) -> Iterator[Finding]:
    if first.identity == second.identity:
        yield ok(_CHECK, f"one identity, {first.identity[:12]}, but for the weights")
        return
    differences = [*_differences(first, second)]
    for difference in differences:
        yield difference.finding()
    others = [
        name
        for name in sorted({*first.all_facts, *second.all_facts})
        if first.all_facts.get(name) != second.all_facts.get(name)
    ]
    if differences or not others:
        return
    # No option of the table explains it.
    texts = [
        f"{name} ({_cut(first.all_facts.get(name))} and {_cut(second.all_facts.get(name))})"
        for name in others[:_SHOWN_MAX]
    ]
    more = f" and {len(others) - _SHOWN_MAX} more" if len(others) > _SHOWN_MAX else ""
    what = f"the identities of the first and the second engine differ in {', '.join(texts)}{more}"
    yield fail(_CHECK, what, "the same options and variables for both work")


def _differences(first: ConfigReport, second: ConfigReport) -> Iterator[Difference]:
    """Yield the options, settings and variables that are not the same."""
    for name in (*OPTIONS, HASH_SEED):
        yield from _difference(name, first.options.get(name), second.options.get(name))
    for name in _SETTINGS:
        yield from _difference(
            name, _setting(first.settings, name), _setting(second.settings, name)
        )
    names = {name for report in (first, second) for name in report.all_facts}
    for fact in sorted(name for name in names if name.startswith(_VARIABLE)):
        yield from _difference(
            fact.removeprefix(_VARIABLE),
            json.loads(first.all_facts.get(fact, "null")),
            json.loads(second.all_facts.get(fact, "null")),
        )


def _difference(name: str, first: OptionValue, second: OptionValue) -> Iterator[Difference]:
    if first != second:
        yield Difference(name, first, second)


def _setting(settings: Settings, name: str) -> OptionValue:
    value: OptionValue = getattr(settings, name)
    return value


def _weights_findings(first: ConfigReport, second: ConfigReport) -> Iterator[Finding]:
    """Yield a WARN where the engines may load other weights, which only a start can tell."""
    named = first.settings.weights_identity
    if named is not None and named == second.settings.weights_identity:
        return
    for name in WEIGHTS_OPTIONS:
        mine, other = first.options.get(name), second.options.get(name)
        if mine != other:
            what = f"{name} is {_said(mine)} for the first and {_said(other)} for the second engine"
            works = f"{name} {mine}" if mine is not None else f"leaving {name} out"
            why = "they share only if the weights are the same, byte for byte"
            yield warn(_CHECK, f"{what}: {why}", f"{works} for both works")


def _said(value: OptionValue) -> str:
    return "not set" if value is None else str(value)


def _cut(text: str | None) -> str:
    """Return a fact as it is shown: "none", or its beginning."""
    if text is None:
        return "none"
    return text if len(text) <= _TEXT_MAX else f"{text[:_TEXT_MAX]}..."
