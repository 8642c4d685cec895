"""The child behind `hybridkv plan` and `doctor`: vLLM's configuration is read, and not served.

It answers once, with a ConfigReport. The arguments after the descriptor are those of `vllm serve`.
"""

import contextlib
import copy
import importlib
import logging
import os
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import msgspec
from pydantic import ValidationError
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.triton_utils import triton
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser

from hybridkv.core.errors import ConfigError, HybridKVError
from hybridkv.core.findings import Verdict, fail, failure, ok
from hybridkv.core.geometry import Geometry, length_finding
from hybridkv.core.keys import fingerprint
from hybridkv.core.state_boundaries import state_findings
from hybridkv.lab.configuration import ConfigReport
from hybridkv.lab.preview import EnginePreview, describe, preview_engine
from hybridkv.multi.children import check_hma, child_specs, parse_multi
from hybridkv.vllm import preflight
from hybridkv.vllm.identity import identity_facts
from hybridkv.vllm.layout import build_geometry
from hybridkv.vllm.preflight import CONNECTOR

logger = logging.getLogger("vllm.hybridkv")

_TRANSFER_CHECKS = ("settings", "kv_load_failure_policy")
"""Checks of the `--kv-transfer-config`: they say nothing where another one was put in its place."""
_FACTS_SHOWN = (
    *("weights", "dtype", "kv_dtype", "quantization", "parallel", "layout", "chunk", "abi", "hash"),
)


def inspect(arguments: list[str]) -> ConfigReport:
    """Everything that can be known of an engine before it is served."""
    if "HYBRIDKV_SHIMS" in os.environ:
        # Of a bundled model: as the engine's process does, before vLLM asks the platform.
        importlib.import_module("hybridkv.lab.shims")
    if not hasattr(triton, "set_allocator"):
        # vLLM's stand-in where there is no Triton backend; some models ask for it while built.
        triton.set_allocator = lambda allocate: None

    def refuse(message: str) -> NoReturn:
        raise HybridKVError(message)

    report = ConfigReport()
    parser = make_arg_parser(FlexibleArgumentParser(prog="vllm serve"))
    parser.error = refuse
    try:
        parsed = parser.parse_args(arguments)
    except HybridKVError as error:
        return ConfigReport(unreadable=str(error))
    if parsed.model_tag is not None:
        parsed.model = parsed.model_tag
    report.findings += preflight.transfer_findings(parsed.kv_transfer_config)
    is_named = all(one.verdict is not Verdict.FAIL for one in report.findings)
    if not is_named:
        # The one that works.
        parsed.kv_transfer_config = KVTransferConfig(**CONNECTOR)
    asked, usage = AsyncEngineArgs.from_cli_args, UsageContext.OPENAI_API_SERVER
    config = _guarded("vllm arguments", report, lambda: asked(parsed).create_engine_config(usage))
    if config is None:
        return report
    seen = _as_children_see_it(config, is_named, report)
    for child, says in seen:
        report.findings += [one for one in preflight.config_findings(child) if says(one.check)]
    config = seen[0][0]
    with contextlib.suppress(ConfigError):
        report.settings = preflight.settings_of(config)
    engine = _guarded("KV cache groups", report, lambda: preview_engine(config))
    if engine is not None:
        _judge_cache(config, engine, report)
    return report


def _as_children_see_it(
    config: Any, is_named: bool, report: ConfigReport
) -> list[tuple[Any, Callable[[str], bool]]]:
    """The configuration as each HybridKVConnector sees it, the first one's for all that follows.

    With each whether a check says something of it that was not said yet.
    """
    if not is_named:
        return [(config, lambda check: check not in _TRANSFER_CHECKS)]
    if config.kv_transfer_config.kv_connector != preflight.SEVERAL:
        return [(config, lambda check: True)]

    def inside() -> list[Any]:
        try:
            parse_multi(config.kv_transfer_config.kv_connector_extra_config)
            check_hma(config)
            return list(child_specs(config))
        except (ConfigError, TypeError) as error:
            report.findings.append(failure("connectors", error))
            return []

    specs = _guarded("connectors", report, inside) or []
    if specs:
        report.findings.append(ok("connectors", ", ".join(spec.name for spec in specs)))
    ours = [spec.config for spec in specs if spec.connector.__name__ == CONNECTOR["kv_connector"]]
    if not ours:
        one = copy.copy(config)
        one.kv_transfer_config = KVTransferConfig(**CONNECTOR)
        return [(one, lambda check: check not in _TRANSFER_CHECKS)]
    others = ((child, _TRANSFER_CHECKS.__contains__) for child in ours[1:])
    return [(ours[0], lambda check: True), *others]


def _guarded(check: str, report: ConfigReport, make: Any) -> Any:
    """What `make` returns; None and a FAIL in vLLM's words where that refuses in any way."""
    try:
        return make()
    except Exception as error:
        logger.exception("hybridkv: vLLM refuses")
        what = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        said = next(filter(None, map(str.strip, what.splitlines())), type(error).__name__)
        report.findings.append(fail(check, f"vLLM says: {said}"))
        return None


def _judge_cache(config: Any, engine: EnginePreview, report: ConfigReport) -> None:
    """Add what the groups and layouts tell: preview, geometry, identity."""
    kv_cache_config, layouts = engine
    groups = list(preflight.group_findings(kv_cache_config, config.speculative_config))
    report.findings += groups
    geometry: Geometry | None = None
    if all(one.verdict is not Verdict.FAIL for one in groups):
        try:
            asked = report.settings.hybrid_chunk_size
            geometry = build_geometry(kv_cache_config, layouts, asked)
        except HybridKVError as error:
            report.findings.append(failure("chunk", error))
    report.preview = describe(config, engine, geometry)
    if geometry is None:
        return
    chunk, alignment = geometry.chunk_tokens, geometry.alignment_tokens
    report.findings += [
        ok("chunk", f"{chunk} tokens; hits are aligned to {alignment}"),
        length_finding(geometry, config.model_config.max_model_len),
        *state_findings(geometry, preflight.state_rule(config)),
    ]
    try:
        facts = identity_facts(config, kv_cache_config, geometry, layouts, report.settings)
    except HybridKVError as error:
        report.findings.append(failure("identity", error))
        return
    report.identity = fingerprint(facts).hex()
    shown = {key: facts[key] for key in _FACTS_SHOWN if key in facts}
    report.facts = {key: msgspec.json.encode(fact).decode() for key, fact in shown.items()}
    report.findings.append(ok("identity", f"{report.identity[:12]}; weights {facts['weights']}"))


if __name__ == "__main__":
    with Connection(int(sys.argv[1])) as pipe:
        pipe.send_bytes(msgspec.json.encode(inspect(sys.argv[2:])))
