"""The child behind `hybridkv plan` and `hybridkv doctor`: vLLM's configuration, looked at and not served.

The answer goes as JSON to the descriptor named by the first argument; everything after it is `vllm serve`'s.
"""

import contextlib
import copy
import importlib
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

import msgspec
from pydantic import ValidationError
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.triton_utils import triton
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser

from hybridkv.cli.preview import Answer
from hybridkv.connector.children import check_hma, child_specs, parse_multi
from hybridkv.connector.identity import identity_facts
from hybridkv.connector.preflight import (
    CONNECTOR,
    SEVERAL,
    config_findings,
    group_findings,
    settings_of,
    state_rule,
    transfer_findings,
)
from hybridkv.connector.preview import EnginePreview, describe, geometry_of, preview_engine
from hybridkv.core.errors import ConfigError, HybridKVError
from hybridkv.core.findings import Verdict, fail, failure, ok
from hybridkv.core.geometry import Geometry
from hybridkv.core.keys import fingerprint
from hybridkv.core.plan import length_finding, state_findings

logger = logging.getLogger("vllm.hybridkv")

_TRANSFER_CHECKS = ("settings", "kv_load_failure_policy")
"""Checks of the `--kv-transfer-config`: they say nothing where another one was put in its place."""
_FACTS_SHOWN = ("weights", "dtype", "kv_dtype", "quantization", "parallel", "layout", "chunk", "abi", "hash")


def look(arguments: list[str]) -> Answer:
    """Everything that can be known of an engine before it is served."""
    if "HYBRIDKV_SHIMS" in os.environ:
        # Of a bundled model: as the engine's process does, before vLLM asks the platform.
        importlib.import_module("hybridkv.testing.shims")
    if not hasattr(triton, "set_allocator"):
        # vLLM's stand-in where there is no Triton backend; some models ask for it while they are built.
        triton.set_allocator = lambda allocate: None
    answer = Answer()
    parsed = make_arg_parser(FlexibleArgumentParser(prog="vllm serve")).parse_args(arguments)
    if parsed.model_tag is not None:
        parsed.model = parsed.model_tag
    parsed.kv_transfer_config = _transfer(parsed.kv_transfer_config, answer)
    config = _guarded("vllm arguments", answer, lambda: _config(parsed))
    if config is None:
        return answer
    seen = _as_children_see_it(config, answer)
    for child, says_something in seen:
        answer.findings += [finding for finding in config_findings(child) if says_something(finding.check)]
    config = seen[0][0]
    with contextlib.suppress(ConfigError):
        answer.settings = settings_of(config)
    engine = _guarded("KV cache groups", answer, lambda: preview_engine(config))
    if engine is not None:
        _judge_cache(config, engine, answer)
    return answer


def _config(parsed: Any) -> Any:
    return AsyncEngineArgs.from_cli_args(parsed).create_engine_config(UsageContext.OPENAI_API_SERVER)


def _as_children_see_it(config: Any, answer: Answer) -> list[tuple[Any, Callable[[str], bool]]]:
    """The configuration as each HybridKVConnector sees it, the first one's for all that follows.

    With each whether a check says something of it that was not said yet.
    """
    if not answer.transfer_named:
        return [(config, lambda check: check not in _TRANSFER_CHECKS)]
    if config.kv_transfer_config.kv_connector != SEVERAL:
        return [(config, lambda check: True)]

    def inside() -> list[Any]:
        try:
            parse_multi(config.kv_transfer_config.kv_connector_extra_config)
            check_hma(config)
            return list(child_specs(config))
        except ConfigError as error:
            answer.findings.append(failure("connectors", error))
        except TypeError as error:
            answer.findings.append(fail("connectors", str(error)))
        return []

    specs = _guarded("connectors", answer, inside) or []
    if specs:
        answer.findings.append(ok("connectors", ", ".join(spec.name for spec in specs)))
    ours = [spec.config for spec in specs if spec.connector.__name__ == CONNECTOR["kv_connector"]]
    if not ours:
        one = copy.copy(config)
        one.kv_transfer_config = KVTransferConfig(**CONNECTOR)
        return [(one, lambda check: check not in _TRANSFER_CHECKS)]
    first, *others = ours
    return [(first, lambda check: True), *((child, _TRANSFER_CHECKS.__contains__) for child in others)]


def _transfer(given: Any, answer: Answer) -> Any:
    """The given `--kv-transfer-config`, or the one that works where it is missing or names something else."""
    findings = list(transfer_findings(given))
    answer.findings += findings
    answer.transfer_named = not any(finding.verdict is Verdict.FAIL for finding in findings)
    return given if answer.transfer_named else KVTransferConfig(**CONNECTOR)


def _guarded(check: str, answer: Answer, make: Any) -> Any:
    """What `make` returns; where vLLM refuses, with whatever exception, a FAIL in its words and None."""
    try:
        return make()
    except Exception as error:
        logger.exception("hybridkv: vLLM refuses")
        what = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        lines = [line.strip() for line in what.splitlines() if line.strip()]
        answer.findings.append(fail(check, f"vLLM says: {lines[0] if lines else type(error).__name__}"))
        return None


def _judge_cache(config: Any, engine: EnginePreview, answer: Answer) -> None:
    """Add what the groups and layouts tell: preview, geometry, identity."""
    answer.findings += group_findings(engine.kv_cache_config, config.speculative_config)
    geometry: Geometry | None = None
    if not any(finding.check.startswith("group ") and finding.verdict is Verdict.FAIL for finding in answer.findings):
        try:
            geometry = geometry_of(engine, answer.settings.hybrid_chunk_size)
        except HybridKVError as error:
            answer.findings.append(failure("chunk", error))
    answer.preview = describe(config, engine, geometry)
    if geometry is None:
        return
    answer.findings += [
        ok("chunk", f"{geometry.chunk_tokens} tokens; hits are aligned to {geometry.alignment_tokens}"),
        length_finding(geometry, config.model_config.max_model_len),
        *state_findings(geometry, state_rule(config)),
    ]
    try:
        facts = identity_facts(config, engine.kv_cache_config, geometry, engine.layouts, answer.settings)
    except HybridKVError as error:
        answer.findings.append(failure("identity", error))
        return
    answer.identity = fingerprint(facts).hex()
    answer.facts = {key: msgspec.json.encode(facts[key]).decode() for key in _FACTS_SHOWN if key in facts}
    answer.findings.append(ok("identity", f"{answer.identity[:12]}; weights {facts['weights']}"))


def main() -> None:
    """Answer once."""
    with os.fdopen(int(sys.argv[1]), "wb") as answers:
        answers.write(msgspec.json.encode(look(sys.argv[2:])))


if __name__ == "__main__":
    main()
