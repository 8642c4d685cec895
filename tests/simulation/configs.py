"""vLLM's configuration of a simulated engine."""

import copy
import functools
import json
from dataclasses import dataclass
from typing import Any

from vllm.config import CompilationConfig, KVEventsConfig, KVTransferConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.structured_output import StructuredOutputManager

from hybridkv.lab.models import bundled_arguments, bundled_models
from tests.simulation.layouts import Layout, Placement


@dataclass(frozen=True)
class Shape:
    """Sizes and settings of a simulated engine."""

    layout: Layout
    num_blocks: int
    max_model_len: int
    budget: int
    """vLLM's max_num_batched_tokens: the tokens that a step computes at most."""
    max_seqs: int
    retention: int | None
    ranks: int  # Those of all stages.
    placement: Placement
    settings: dict[str, object]
    is_async: bool = False
    """Asynchronous scheduling: vLLM plans a step before it has the results of the last one."""
    staging: float | None = None
    """Room in each worker's staging, in objects of the largest size, or None for no bound."""
    device: int | None = None
    """The seed of a simulated device that copies the blocks, or None for the processor."""
    drafts: int = 0  # Tokens that the layout's drafter proposes in a step.
    match_unit: int | None = None  # vLLM's prefix_match_unit, which divides a block.
    drafter_tokens_max: int | None = None  # The draft model's max_model_len; None = the target's.
    is_block_dropped: bool = True  # Whether vLLM's own hits leave out the block before their end.
    is_padded: bool = True  # Whether the drafter runs on padded batches.
    is_v2: bool = False  # Whether vLLM's V2 model runner is used, the default on GPUs.
    cuts: tuple[int, ...] = ()
    """The layers of each group on the first of two stages of a pipeline. Empty = one stage."""
    nodes: int = 1  # Over which the ranks are spread, with a daemon each.
    shards: int = 0  # In which KV heads are stored, for engines of other sizes; 0 = not at all.

    @property
    def stages(self) -> int:
        """Stages of the pipeline."""
        return 2 if self.cuts else 1

    def stage(self, rank: int) -> int:
        """The stage of a rank."""
        return rank * self.stages // self.ranks


SPECULATIVE = {"ngram": "qwen3_ngram", "eagle": "llama_eagle", "draft_model": "qwen3_draft"}
SPECULATIVE_HYBRIDS = {"ngram": "qwen3next_ngram", "eagle": "qwen3next_mtp"}
"""The bundled models whose configuration of speculation a method has."""


class _V2Config(VllmConfig):
    """The configuration of an engine that has the V2 model runner."""

    use_v2_model_runner = True


@functools.cache
def base_config(name: str = "qwen3") -> Any:
    """vLLM's configuration of the bundled model `name`, as its command line makes it.

    A layout without drafts takes the default: only speculation depends on the model. Without the
    CPU's kernel for rotary embeddings, MLA is stored too (`vllm.batch_faults`).
    """
    given = bundled_arguments(name)
    option = "--speculative-config"
    drafting = json.loads(given[given.index(option) + 1]) if option in given else None
    arguments = EngineArgs(
        model=str(bundled_models()[name]),
        speculative_config=drafting,
        skip_tokenizer_init=True,
        load_format="dummy",
        enforce_eager=True,
        max_model_len=4096,
        dtype="float32",
        async_scheduling=False,
        compilation_config=CompilationConfig(custom_ops=["-rotary_embedding"]),
    )
    return arguments.create_engine_config()


@functools.cache
def structured_output_manager() -> Any:
    """The manager that vLLM's scheduler asks for. No simulated request has structured output."""
    return StructuredOutputManager(base_config())


def config_of(shape: Shape, socket_path: str, engine_id: str) -> Any:
    """vLLM's configuration of an engine of this shape, with our connector to a daemon's socket.

    Of several daemons the path has "{node}" in the place of the number.
    """
    drafting = shape.layout.drafting
    known = SPECULATIVE_HYBRIDS if shape.layout.has_recurrent else SPECULATIVE
    config = copy.copy(base_config(known[drafting.method] if drafting else "qwen3"))
    if shape.is_v2:
        config.__class__ = _V2Config
    if drafting is not None:
        speculative = config.speculative_config = copy.copy(config.speculative_config)
        speculative.num_speculative_tokens = shape.drafts
        speculative.disable_eagle_block_drop = not shape.is_block_dropped
        speculative.disable_padded_drafter_batch = not shape.is_padded
        draft = speculative.draft_model_config = copy.copy(speculative.draft_model_config)
        draft.max_model_len = shape.drafter_tokens_max or shape.max_model_len
    for part in ("model_config", "cache_config", "scheduler_config", "parallel_config"):
        setattr(config, part, copy.copy(getattr(config, part)))
    config.model_config.max_model_len = shape.max_model_len
    config.cache_config.num_gpu_blocks = shape.num_blocks
    config.cache_config.block_size = shape.layout.block_size
    config.cache_config.prefix_cache_retention_interval = shape.retention
    config.cache_config.prefix_match_unit = shape.match_unit
    config.cache_config.mamba_cache_mode = "align" if shape.layout.has_recurrent else "none"
    config.scheduler_config.max_num_batched_tokens = shape.budget
    config.scheduler_config.max_num_seqs = shape.max_seqs
    config.scheduler_config.max_model_len = shape.max_model_len
    config.scheduler_config.async_scheduling = shape.is_async
    config.parallel_config.tensor_parallel_size = shape.ranks // shape.stages
    config.parallel_config.pipeline_parallel_size = shape.stages
    config.parallel_config.distributed_executor_backend = "mp"
    config.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="HybridKVConnector",
        kv_connector_module_path="hybridkv.connector",
        kv_role="kv_both",
        engine_id=engine_id,
        kv_connector_extra_config={
            "server": f"unix://{socket_path}",
            "nodes": shape.nodes,
            **shape.settings,
        },
    )
    return config


@functools.cache
def block_hasher(hash_tokens: int) -> Any:
    """vLLM's function from a request to its block hashes, one for each `hash_tokens` tokens."""
    hash_fn = get_hash_fn_by_name("sha256")
    init_none_hash(hash_fn)
    return get_request_block_hasher(hash_tokens, hash_fn)
