"""Replacements for what vLLM's CPU build lacks or computes wrongly, for some bundled models.

This is a plugin of vLLM, which a checkout's environment has and a release has not. vLLM calls
`put_in_place` in each of its processes: in the engine's before the platform is asked for its part
of the configuration, in a worker before its class is imported. `HYBRIDKV_BUNDLED_MODEL` names the
model; a bundled model's environment sets it (`hybridkv.lab.models`). Without it, and on other
builds of vLLM, nothing is put in place.
"""

import ctypes
import importlib.util
import os
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from vllm.platforms import current_platform

from hybridkv.lab.models import BUNDLED_MODEL_ENV, V2_RUNNER_ENV


def _mamba2() -> None:
    """The CPU kernel returns only the last state of a forward pass, and none within it."""
    from vllm.model_executor.layers.mamba.abstract import MambaBase
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

    MambaMixer2.get_kv_cache_spec = MambaBase.get_kv_cache_spec


def _mla() -> None:
    """Prefixes of MLA models are cached, which vLLM leaves off where there are no AMX tiles."""
    if torch.cpu._is_avx512_bf16_supported():
        _mla_without_tiles()
    else:
        _mla_without_avx512()


def _mla_without_tiles() -> None:
    """Kernels that read a cached prefix run on AVX-512 BF16 too, and are right there.

    Only the platform is told that there are tiles: kernels that do need them ask torch themselves.
    """
    from vllm.platforms.cpu import CpuPlatform

    for name in ("check_and_update_config", "get_attn_backend_cls"):
        tiles = patch.object(torch.cpu, "_is_amx_tile_supported", lambda: True)
        setattr(CpuPlatform, name, classmethod(tiles(getattr(CpuPlatform, name).__func__)))


def _mla_without_avx512() -> None:
    """Attention over blocks of any size, in plain torch, which reads all tokens from the cache.

    vLLM's backend of such processors decodes from blocks of 16 tokens, and computes prompts whole.
    """
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.attention.backend import MultipleOf
    from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend, CPUMLAImpl

    check, make_builder = CpuPlatform.check_and_update_config, CPUMLABackend.get_builder_cls

    def check_and_keep(cls: Any, config: Any) -> None:
        scheduler, cache = config.scheduler_config, config.cache_config
        is_chunked, is_caching = scheduler.enable_chunked_prefill, cache.enable_prefix_caching
        step_tokens = scheduler.max_num_batched_tokens
        block_tokens = cache.block_size if cache.user_specified_block_size else _BLOCK_TOKENS
        check(config)
        scheduler.enable_chunked_prefill, cache.enable_prefix_caching = is_chunked, is_caching
        scheduler.max_num_batched_tokens, cache.block_size = step_tokens, block_tokens

    class BuilderWithLengths(make_builder()):  # type: ignore[misc]
        """Says how many tokens each prompt has that is computed, with the cached ones."""

        def build(self, common_prefix_len: int, common: Any, fast_build: bool = False) -> Any:
            metadata = super().build(common_prefix_len, common, fast_build)
            if metadata.prefill is not None:
                metadata.prefill.seq_lens = common.seq_lens[metadata.num_decodes :]
            return metadata

    CpuPlatform.check_and_update_config = classmethod(check_and_keep)
    CPUMLABackend.get_builder_cls = staticmethod(lambda: BuilderWithLengths)
    CPUMLABackend.get_supported_kernel_block_sizes = staticmethod(
        lambda spec=None: [MultipleOf(16)]
    )
    CPUMLABackend.supports_block_size = classmethod(lambda cls, size: not (size or 0) % 16)
    CPUMLAImpl.forward_mha, CPUMLAImpl.forward_mqa = _compute_prompts, _decode


_BLOCK_TOKENS = 128  # As vLLM has it where there are AMX tiles.


def _latents(cache: torch.Tensor, blocks: torch.Tensor, count: int) -> torch.Tensor:
    """Returns the first `count` rows of the blocks of one request: (tokens, latent and rope)."""
    rows = -(-count // cache.shape[1])
    return cache[blocks[:rows].long()].flatten(0, 1)[:count]


def _attention(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> torch.Tensor:
    """Returns the attention of the last tokens to all: all of shape (tokens, heads, size)."""
    scores = torch.einsum("qhd,khd->hqk", queries.float(), keys.float()) * scale
    positions = torch.arange(len(keys))
    future = positions > positions[-len(queries) :, None]
    weights = scores.masked_fill(future, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values.float()).to(queries.dtype)


def _compute_prompts(
    self: Any,
    q: torch.Tensor,
    _: Any,
    rope: Any,
    cache: torch.Tensor,
    metadata: Any,
    *scales: Any,
    **outputs: Any,
) -> None:
    output, prefill = outputs["output"], metadata.prefill
    starts = prefill.query_start_loc.tolist()
    for number, total in enumerate(prefill.seq_lens.tolist()):
        new = slice(starts[number], starts[number + 1])
        known = _latents(cache, prefill.block_table[number], total)
        latent, rope = known.split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        heads = self.kv_b_proj(latent)[0].view(total, self.num_heads, -1)
        keys, values = heads.split([self.qk_nope_head_dim, self.v_head_dim], dim=-1)
        keys = torch.cat([keys, rope[:, None].expand(-1, self.num_heads, -1)], dim=-1)
        output[new] = _attention(q[new], keys, values, self.scale).flatten(1)


def _decode(self: Any, q: Any, cache: torch.Tensor, metadata: Any, layer: Any) -> Any:
    queries = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
    decode, attended = metadata.decode, []
    for query, blocks, total in zip(
        queries, decode.block_table, decode.seq_lens.tolist(), strict=True
    ):
        keys = _latents(cache, blocks, total)[:, None].expand(-1, self.num_heads, -1)
        attended += _attention(query[None], keys, keys[..., : self.kv_lora_rank], self.scale)
    return torch.stack(attended), None


def flat_heads() -> None:
    """The rotary embedding's kernel takes heads that lie apart, as LFM2 hands them, for one."""
    from vllm import _custom_ops

    rotate = _custom_ops.rotary_embedding

    def rotate_flat(
        positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None, *others: Any
    ) -> None:
        flat = query.view(positions.numel(), -1)
        rotate(positions, flat, key if key is None else key.view(len(flat), -1), *others)

    _custom_ops.rotary_embedding = rotate_flat


class _Anything(ModuleType):
    """A module that has every name, of which no text prompt calls any."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def torchvision_stand_in() -> None:
    """Image processing, which the text model's module imports."""
    if importlib.util.find_spec("torchvision") is not None:
        return
    for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.v2"):
        module = sys.modules[name] = _Anything(name)
        module.__spec__, module.__path__ = ModuleSpec(name, None, is_package=True), []
    functional = _Anything("torchvision.transforms.v2.functional")
    sys.modules[functional.__name__] = vars(module)["functional"] = functional

    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda inspect: inspect()


def _drafted_states() -> None:
    """Recurrent states under speculation: vLLM copies them with Triton, and its CPU kernel errs.

    The copies are made here, on the same metadata. Where a step has fewer drafts than the most,
    vLLM 0.32's CPU kernel puts the step's tokens to the wrong end of the inputs that the
    convolution keeps, or fails. `_drafted_step` puts them where the kernel of a GPU does.
    `vllm.seams.has_wrong_drafted_states` sees that vLLM's own kernel is not in place any more.
    """
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
    from vllm.v1.worker import mamba_utils

    context = mamba_utils.MambaSpecDecodeGPUContext
    context.run_fused_precopy, context.run_fused_postprocess = _before_step, _after_step
    gdn_attention._spec_forward = _drafted_step


class _DraftedStep(NamedTuple):
    """The arguments of vLLM's `_spec_forward`, in its order."""

    layer: Any
    metadata: Any
    mixed_qkv: torch.Tensor
    b: torch.Tensor
    a: torch.Tensor
    inputs: torch.Tensor
    """The inputs that the convolution keeps, `[block, channel, token]`."""
    states: torch.Tensor
    width: int
    state_len: int


def _drafted_step(*arguments: Any) -> torch.Tensor:
    """Return what vLLM's `_spec_forward` does, with the tokens at the right end of the inputs."""
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    step = _DraftedStep(*arguments)
    layer, metadata, mixed_qkv = step.layer, step.metadata, step.mixed_qkv
    rows = metadata.num_spec_decodes
    starts = metadata.spec_query_start_loc[: rows + 1].to(torch.int32).contiguous()
    blocks = metadata.spec_state_indices_tensor[:rows].to(torch.int32).contiguous()
    accepted = metadata.num_accepted_tokens[:rows].to(torch.int32).contiguous()
    weight = gdn_attention._unpacked_conv_weight(layer).unsqueeze(1)
    mixed = torch.empty_like(mixed_qkv)
    for row in range(rows):
        part = slice(int(starts[row]), int(starts[row + 1]))
        kept, first = step.inputs[int(blocks[row, 0])], int(accepted[row]) - 1
        fresh = mixed_qkv[part].transpose(0, 1).to(kept.dtype)
        if not fresh.numel():
            continue
        read = torch.cat([kept[:, first : first + step.width - 1], fresh], -1)
        out = torch.conv1d(read[None], weight, layer.conv1d.bias, groups=len(kept))[0]
        out = torch.nn.functional.silu(out) if layer.activation == "silu" else out
        mixed[part] = out.transpose(0, 1).to(mixed.dtype)
        kept[:, : read.shape[1] - 1] = read[:, 1:]
    query, key, value = (part.squeeze(0) for part in layer.rearrange_mixed_qkv(mixed))
    return ops.fused_sigmoid_gating_delta_rule_update_spec_cpu(
        A_log=layer.A_log,
        dt_bias=layer.dt_bias,
        q=query,
        k=key,
        v=value,
        a=step.a,
        b=step.b,
        initial_state_source=step.states,
        spec_state_indices=blocks,
        num_accepted_tokens=accepted,
        cu_seqlens=starts,
        use_qk_l2norm_in_kernel=True,
    )


def _copy_states(context: Any, row: int, source: int, target: int, offset: int) -> None:
    """Copy one request's states between columns, as vLLM's `_copy_mamba_state_block` does."""
    from vllm.v1.worker.mamba_utils import is_conv_state_dim_first

    assert not is_conv_state_dim_first(), "the CPU build keeps tokens before channels"
    names = ("base_addrs", "block_strides", "elem_sizes", "inner_sizes", "conv_widths")
    for state in range(context.num_states):
        base, stride, size, inner, width = (
            int(getattr(context, f"state_{name}")[state]) for name in names
        )
        table = int(context.block_table_ptrs[int(context.state_group_indices[state])])
        rows = ctypes.c_int32 * (max(source + offset, target) + 1)
        blocks = rows.from_address(table + row * context.block_table_stride_req * 4)
        token = inner * size
        at, count = base + blocks[source] * stride + offset * token, (width - offset) * token
        if not width:
            at, count = base + blocks[source + offset] * stride, token
        ctypes.memmove(base + blocks[target] * stride, at, count)


def _before_step(
    context: Any, num_reqs: int, state_idx_gpu: Any, src_col_gpu: Any, token_bias_gpu: Any, **_: Any
) -> None:
    """Copy states before a step, as vLLM's `precopy_mamba_align_fused_kernel` does."""
    for row in range(num_reqs):
        source, target = int(src_col_gpu[row]), int(state_idx_gpu[row])
        if source not in (-1, target):
            _copy_states(context, row, source, target, int(token_bias_gpu[row]))


def _after_step(context: Any, num_reqs: int, **counts: torch.Tensor) -> None:
    """Copy states after a step, as vLLM's `postprocess_mamba_fused_kernel` does.

    `counts` has a tensor with a number for each request, by vLLM's names of its arguments.
    """
    accepted = counts["num_accepted_tokens_gpu"]
    context.num_accepted_tokens_out[:num_reqs].copy_(accepted[:num_reqs])
    for row in range(num_reqs):
        source = int(counts["mamba_state_idx_gpu"][row])
        known = int(counts["num_computed_tokens_gpu"][row])
        known += int(counts["num_scheduled_tokens_gpu"][row])
        known -= int(counts["num_draft_tokens_gpu"][row])
        end = known + int(accepted[row]) - 1
        end -= end % context.block_size
        target = end // context.block_size - 1
        if end >= known:
            if source == target:
                context.num_accepted_tokens_out[row] = 1
            if (source, end) != (target, known):
                _copy_states(context, row, source, target, end - known)


def _interpreted_triton() -> None:
    """Run vLLM's Triton kernels in Triton's interpreter: a CPU build takes its CPU backend only.

    The model's environment sets TRITON_INTERPRET, which Triton reads when it is imported: before
    this plugin. Modules that vLLM imports before the plugin hold no kernel.
    """
    import triton
    import vllm.triton_utils as used

    used.triton, used.tl = triton, triton.language


def _v2_runner() -> None:
    """vLLM's V2 model runner asks for Triton, whose CPU backend no package has."""
    import vllm.config.vllm as config
    import vllm.triton_utils as used

    _interpreted_triton()
    config.HAS_TRITON = used.HAS_TRITON = True


def _stages() -> None:
    """Room for what a stage of a pipeline gets from the one before it.

    On a GPU, vLLM makes it in the profiling run that its CPU build has not.
    """
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    sync_and_gather = GPUModelRunner.sync_and_gather_intermediate_tensors

    def with_room(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.intermediate_tensors is None:
            self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
                batch_size=self.max_num_tokens, dtype=self.model_config.dtype, device=self.device
            )
        return sync_and_gather(self, *args, **kwargs)

    GPUModelRunner.sync_and_gather_intermediate_tensors = with_room


def _tile_schedules() -> None:
    """Keys that the CPU's builder leaves out of a dictionary that its caller reads."""
    from vllm.models.deepseek_v4.cpu import cpu_mla

    builder, empty = cpu_mla.DeepseekV4CPUSparseSWAMetadataBuilder, {"c1a": None, "c2a": None}
    build = builder.build_tile_scheduler
    builder.build_tile_scheduler = lambda self, tokens: {**empty, **build(self, tokens)}


SHIMS: dict[str, tuple[Callable[[], None], ...]] = {
    "deepseekv2": (_mla,),
    "deepseekv4": (_interpreted_triton, _mla, _tile_schedules),
    "falconh1": (_mamba2,),
    "granitehybrid": (_mamba2,),
    "lfm2": (flat_heads,),
    "qwen35": (torchvision_stand_in,),
    "qwen35_mtp": (torchvision_stand_in, _drafted_states),
    "qwen35_ngram": (torchvision_stand_in, _drafted_states),
    "qwen3next_eagle": (_drafted_states,),
    "qwen3next_mtp": (_drafted_states,),
    "qwen3next_ngram": (_drafted_states,),
}


def put_in_place() -> None:
    """Put the shims of the process's bundled model in place, on a CPU build of vLLM."""
    model = os.environ.get(BUNDLED_MODEL_ENV)
    if model is None or not current_platform.is_cpu():
        return
    if os.environ.get(V2_RUNNER_ENV) == "1":
        _v2_runner()
    for shim in SHIMS.get(model, ()):
        shim()
    # Last: it imports vLLM's own modules, and with them some that hold Triton kernels.
    _stages()
