"""Each reason for which vLLM does not use its own prefix cache is known, and has an answer.

vLLM's source is searched for all that sets or reads its two switches, and compared with
`hybridkv.vllm.prefix_caching`; what a step gives is compared with `hybridkv.vllm.step_outputs`.
`scripts/test --vllm VERSION tests/unit/vllm/test_reasons.py` asks another version.
"""

import ast
import typing
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import vllm
from vllm import PoolingParams, SamplingParams
from vllm.config import pooler
from vllm.platforms import CpuArchEnum, current_platform
from vllm.tasks import POOLING_TASKS
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec
from vllm.v1.outputs import ModelRunnerOutput

from hybridkv.core.findings import Finding, Verdict
from hybridkv.vllm import prefix_caching
from hybridkv.vllm.prefix_caching import COMPARED, REASONS, caching_findings, layer_findings
from hybridkv.vllm.proven import PROVEN
from hybridkv.vllm.step_outputs import LAST, LAST_TOKEN_TASKS, OUTPUTS, why_all_computed
from hybridkv.vllm.step_outputs import why_computed as why_request_computed
from hybridkv.vllm.versions import minor_version
from tests.simulation.layouts import Member
from tests.unit.vllm import describe_reasons

pytestmark = pytest.mark.engine

SOURCE = Path(vllm.__file__).parent
SWITCHES = ("enable_prefix_caching", "skip_reading_prefix_cache")
ALIASES = (*SWITCHES, "is_prefix_caching_supported", "get_skip_reading_prefix_cache")
OTHERS = ("benchmarks", "distributed/kv_transfer", "v1/simple_kv_offload")
"""Parts of vLLM that decide nothing for this connector: its benchmarks and other connectors."""


class Function(NamedTuple):
    """A function of vLLM's source."""

    module: str
    name: str


NEUTRAL = {
    Function("config/cache.py", "CacheConfig"): "the switch itself",
    Function("sampling_params.py", "SamplingParams"): "the switch itself",
    Function("pooling_params.py", "PoolingParams"): "the switch itself",
    Function("engine/arg_utils.py", "EngineArgs"): "the switch itself",
    Function("engine/arg_utils.py", "EngineArgs.create_engine_config"): "hands it on",
    Function("config/cache.py", "CacheConfig.compute_hash"): "of compiled code",
    Function("config/vllm.py", "VllmConfig.__str__"): "shows it",
    Function("config/vllm.py", "VllmConfig.validate_mamba_block_size"): "refuses another setting",
    Function("config/vllm.py", "VllmConfig._verify_aux_output_compatibility"): "needs it on",
    Function("config/vllm.py", "VllmConfig.num_hash_lookahead_tokens"): "0 beside a connector",
    Function("engine/arg_utils.py", "EngineArgs.add_cli_args"): "the user's option",
    Function(
        "entrypoints/openai/decisions/strategies.py", "NextTokenStrategy._warm_shared_prefix"
    ): "asks prompts in another order",
    Function(
        "model_executor/models/config.py", "MambaModelConfig.verify_and_update_config"
    ): "sets mamba_cache_mode, which is asked for",
    Function(
        "models/deepseek_v41/attention.py", "DeepseekV4Attention.__init__"
    ): "switches swa_bounded_replay off",
    Function(
        "models/deepseek_v41/nvidia/model.py", "DeepseekV4Model.__init__"
    ): "refuses context parallelism",
    Function("pooling_params.py", "PoolingParams.__repr__"): "shows it",
    Function(
        "v1/core/kv_cache_manager.py", "KVCacheManager.prefix_cache_lookup_enabled"
    ): "the engine's own lookup",
    Function(
        "v1/core/kv_cache_utils.py", "resolve_cache_hit_alignment_tokens"
    ): "where hits end; the geometry has it",
    Function(
        "v1/core/kv_cache_utils.py", "resolve_kv_cache_block_sizes"
    ): "which hashes are made; the geometry has it",
    Function("v1/core/sched/scheduler.py", "Scheduler.__init__"): "hands it on",
    Function("v1/core/sched/scheduler.py", "Scheduler.schedule"): "takes no hit of a connector",
    Function("v1/engine/core.py", "EngineCore.__init__"): "makes hashes, also for a connector",
    Function("v1/request.py", "Request.get_skip_reading_prefix_cache"): "hands it on",
    Function("v1/utils.py", "report_usage_stats"): "counts it",
    Function("v1/worker/mamba_utils.py", "preprocess_mamba"): "needs it on",
}
"""Functions that set or read a switch and refuse no prefix, on one of the versions at least."""


class Use(NamedTuple):
    """A place in vLLM's source that names a switch."""

    function: Function
    is_set: bool


def uses(path: Path) -> Iterator[Use]:
    """Yield each place of a source that sets, reads or names one of ALIASES."""
    text = path.read_text()
    if not any(name in text for name in ALIASES):
        return
    module = path.relative_to(SOURCE).as_posix()

    def search(node: ast.AST, scope: tuple[str, ...]) -> Iterator[Use]:
        for child in ast.iter_child_nodes(node):
            inner = scope
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inner = (*scope, child.name)
                if child.name == "is_prefix_caching_supported":
                    yield Use(Function(module, ".".join(inner)), is_set=True)
            found = (
                getattr(child, "attr", None)
                or getattr(child, "arg", None)
                or getattr(child, "id", None)
                or getattr(child, "value", None)
            )
            if isinstance(found, str) and found in ALIASES:
                is_set = isinstance(getattr(child, "ctx", None), ast.Store)
                is_argument = isinstance(child, ast.keyword)
                yield Use(Function(module, ".".join(scope)), is_set or is_argument)
            yield from search(child, inner)

    yield from search(parsed(module), ())


@cache
def parsed(module: str) -> ast.Module:
    return ast.parse((SOURCE / module).read_text())


@cache
def found() -> frozenset[Use]:
    """Return every place that names a switch in the installed version."""
    paths = (path for path in SOURCE.rglob("*.py"))
    return frozenset(
        use
        for path in paths
        if not path.relative_to(SOURCE).as_posix().startswith(OTHERS)
        for use in uses(path)
    )


def functions() -> set[Function]:
    return {Function(reason.module, reason.function) for reason in REASONS}


def test_each_place_that_sets_a_switch_has_an_answer() -> None:
    setting = {use.function for use in found() if use.is_set}
    assert setting - functions() - {*NEUTRAL} == set()


def test_each_place_that_reads_a_switch_has_an_answer() -> None:
    reading = {use.function for use in found()}
    assert reading - functions() - {*NEUTRAL} == set()


def test_each_answer_has_a_place() -> None:
    """Every function of REASONS is in each version from its first one on, and in none before."""
    for reason in REASONS:
        tree: Any = parsed(reason.module)
        for name in reason.function.split("."):
            tree = next((node for node in tree.body if getattr(node, "name", "") == name), None)
            if tree is None:
                break
        assert (tree is not None) == (minor_version() >= reason.since), reason


def test_no_neutral_function_is_a_place() -> None:
    assert functions().isdisjoint(NEUTRAL)


def test_the_versions_that_are_served_were_compared() -> None:
    assert {version.rpartition(".")[0] for version in COMPARED} == {*PROVEN}


def test_nothing_else_makes_a_layer_read_later_tokens() -> None:
    """One class of layers sets `non_causal`, on the spec of an attention layer that is no MLA."""
    setting = {
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        if "non_causal=True" in (text := path.read_text())
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.keyword)
        and node.arg == "non_causal"
        and getattr(node.value, "value", None) is True
    }
    assert setting == {"model_executor/layers/attention/prefill_prefix_lm_attention.py"}


def test_each_output_of_a_step_has_an_answer() -> None:
    """Both ways: on each version all fields are known, and each that is known is on a version."""
    known = {name for output in OUTPUTS for name in output.fields.split()}
    given = {field.name for field in fields(ModelRunnerOutput)}
    assert given <= known
    missing = {"0.30": {"aux_output_connector_output", "prompt_token_id_logprobs_dict"}}
    assert known - given == missing.get(minor_version(), {"routed_experts"})


def test_poolers_and_tasks_are_known() -> None:
    assert {*typing.get_args(pooler.SequencePoolingType)} == {LAST, "MEAN", "CLS"}
    assert {*typing.get_args(pooler.TokenPoolingType)} == {"ALL", "STEP"}
    assert {*LAST_TOKEN_TASKS} <= {*POOLING_TASKS}
    whole = {"token_embed", "token_classify", "plugin", "embed&token_classify"}
    assert {*POOLING_TASKS} - {*LAST_TOKEN_TASKS} <= whole


def test_the_document_has_the_tables() -> None:
    shown = describe_reasons.DOCUMENT.read_text()
    assert shown == describe_reasons.document(), (
        "python -m tests.unit.vllm.describe_reasons --write"
    )


# What follows from them


def engine(*, is_on: bool = True, **model: Any) -> Any:
    """The parts of a VllmConfig that are asked for reasons: those of a causal decoder."""
    values: dict[str, Any] = {
        "pooler_config": None,
        "is_prefix_caching_supported": True,
        "is_diffusion": False,
        "use_mla": False,
    } | model
    return SimpleNamespace(
        model_config=SimpleNamespace(**values),
        cache_config=SimpleNamespace(enable_prefix_caching=is_on),
        scheduler_config=SimpleNamespace(enable_chunked_prefill=is_on),
        compilation_config=SimpleNamespace(static_forward_context={}),
    )


def failures(findings: Iterator[Finding]) -> str:
    return "\n".join(each.sentence for each in findings if each.verdict is Verdict.FAIL)


def pooling(seq: str | None, tok: str = "ALL", supported: bool = True) -> dict[str, Any]:
    types = SimpleNamespace(seq_pooling_type=seq, tok_pooling_type=tok)
    return {"pooler_config": types, "is_prefix_caching_supported": supported}


@pytest.mark.parametrize("is_on", [True, False])
@pytest.mark.parametrize(
    ("pooler_config", "is_computed"),
    [
        (pooling("LAST"), False),
        (pooling(None), False),
        (pooling("MEAN", supported=False), True),
        (pooling("CLS", supported=False), True),
        (pooling("LAST", "STEP", supported=False), True),
        (pooling("ATTENTION"), True),
    ],
)
def test_a_pooler_of_all_tokens_is_the_reason(
    pooler_config: Any, is_computed: bool, is_on: bool
) -> None:
    """Also where the user has switched the cache on, or off for another reason."""
    config = engine(is_on=is_on, **pooler_config)
    assert bool(why_all_computed(config)) == is_computed
    warned = [each for each in caching_findings(config) if each.verdict is Verdict.WARN]
    assert len(warned) == is_computed
    assert not failures(caching_findings(config))


def test_routed_experts_are_the_reason() -> None:
    """vLLM 0.30 has the flag in the model's configuration, later versions in one of its own."""
    assert not why_all_computed(engine())
    assert why_all_computed(engine(enable_return_routed_experts=True))
    config = engine()
    config.aux_output_config = SimpleNamespace(enabled=True)
    assert why_all_computed(config)


def test_a_cache_that_is_off_for_no_reason_is_the_users_wish_where_the_source_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not failures(caching_findings(engine(is_on=False)))
    monkeypatch.setattr(vllm, "__version__", "0.32.1+cpu")
    assert "why vllm 0.32.1 switches it off" in failures(caching_findings(engine(is_on=False)))
    assert not failures(caching_findings(engine()))


def test_another_platforms_reasons_are_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(current_platform), "is_out_of_tree", lambda self: True)
    refused = failures(caching_findings(engine(is_on=False)))
    assert refused.endswith("--enable-prefix-caching works")


def test_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_caching, "current_platform", platform := SimpleNamespace())
    platform.is_cpu, platform.get_cpu_architecture = lambda: True, lambda: CpuArchEnum.X86
    platform.is_out_of_tree = lambda: False
    assert prefix_caching.why_computed_here(engine(is_on=False, use_mla=True))
    assert not prefix_caching.why_computed_here(engine(use_mla=True))
    platform.get_cpu_architecture = lambda: CpuArchEnum.RISCV
    assert "RISC-V" in failures(caching_findings(engine(is_on=False)))


def test_diffusion_is_refused() -> None:
    assert "diffusion" in failures(caching_findings(engine(is_diffusion=True)))


def groups(*specs: Any, **flags: Any) -> Any:
    return SimpleNamespace(
        kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec, **flags) for spec in specs]
    )


def test_a_layer_that_reads_later_tokens_is_refused() -> None:
    """Whether the group is cacheable or not, and whatever other groups there are."""
    causal = Member("full", 16).spec(1, 1)
    base = {"block_size": 16, "num_kv_heads": 1, "head_size": 8, "dtype": causal.dtype}
    prefix_lm = FullAttentionSpec(**base, non_causal=True)
    drafting = MLAAttentionSpec(**base, non_causal_multi_token_decode=True)
    assert not failures(layer_findings(groups(causal), engine()))
    for spec in (prefix_lm, drafting):
        refused = failures(layer_findings(groups(causal, spec), engine()))
        assert refused.startswith("KV cache group 1 attends to later tokens")


def test_a_model_without_a_kv_cache_is_refused() -> None:
    """Bidirectional pooling models, and the encoder of a multimodal model alone."""
    assert "this model has no KV cache" in failures(layer_findings(groups(), engine()))


def test_hisparse_is_refused() -> None:
    causal = Member("full", 16).spec(1, 1)
    for flags in ({"enable_kv_transfer": False}, {"host_resident": True}):
        assert "not in the device's memory" in failures(
            layer_findings(groups(causal, **flags), engine())
        )


@pytest.mark.parametrize("name", ["FLASHINFER", "TRITON_MLA", "FLASH_ATTN"])
def test_batch_invariance(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels with which vLLM's own hits are not invariant are refused, and only with the wish."""
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    class Layer(AttentionLayerBase):
        def get_attn_backend(self) -> Any:
            return SimpleNamespace(get_name=lambda: name)

        def get_kv_cache_spec(self, vllm_config: Any) -> None:
            return None

    config = engine()
    config.compilation_config.static_forward_context = {"layer": Layer()}
    causal = groups(Member("full", 16).spec(1, 1))
    assert not failures(layer_findings(causal, config))
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert (name in failures(layer_findings(causal, config))) == (name != "FLASH_ATTN")


@pytest.mark.parametrize(
    ("params", "is_computed"),
    [
        (SamplingParams(), False),
        (SamplingParams(prompt_logprobs=0), True),
        (SamplingParams(prompt_logprobs=1, skip_reading_prefix_cache=False), True),
        (SamplingParams(skip_reading_prefix_cache=True), True),
        (PoolingParams(task="embed"), False),
        (PoolingParams(task="classify"), False),
        (PoolingParams(task="token_embed", skip_reading_prefix_cache=False), True),
        (PoolingParams(task="token_classify"), True),
        (PoolingParams(task="plugin", skip_reading_prefix_cache=False), True),
    ],
)
def test_a_request_that_needs_each_token_is_computed(params: Any, is_computed: bool) -> None:
    """Also where its client says that cached prefixes may be read."""
    is_sampled = isinstance(params, SamplingParams)
    request = SimpleNamespace(
        sampling_params=params if is_sampled else None,
        pooling_params=None if is_sampled else params,
        skip_reading_prefix_cache=params.skip_reading_prefix_cache,
    )
    assert bool(why_request_computed(request)) == is_computed
