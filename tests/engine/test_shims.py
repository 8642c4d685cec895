"""What is put in place for bundled models: nowhere else, and it computes what it says."""

import os
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

LATENT, ROPE, HEADS = 512, 64, 4

SAYS = """
import sys
from vllm.platforms import current_platform
from vllm.platforms.cpu import CpuPlatform
if sys.argv[1] == "other build":
    type(current_platform).is_cpu = lambda self: False
before = CpuPlatform.check_and_update_config
import hybridkv.lab.shims
print(CpuPlatform.check_and_update_config == before)
"""


@pytest.mark.soak
@pytest.mark.parametrize(
    ("environment", "build", "untouched"),
    [
        ({"HYBRIDKV_SHIMS": "deepseekv2"}, "this build", "False"),
        ({"HYBRIDKV_SHIMS": "deepseekv2"}, "other build", "True"),
        ({"HYBRIDKV_SHIMS": "qwen3"}, "this build", "True"),
    ],
)
def test_only_for_its_model_and_only_on_the_cpu_build(
    environment: dict[str, str], build: str, untouched: str
) -> None:
    needs_avx512()
    said = subprocess.run(
        [sys.executable, "-c", SAYS, build],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )
    assert said.stdout.split() == [untouched], said.stderr


def needs_avx512() -> None:
    import torch

    if not torch.cpu._is_avx512_bf16_supported():
        pytest.skip("MLA prefix hits need a processor with AVX-512 BF16")


@pytest.mark.parametrize(("new", "cached"), [(300, 0), (40, 700), (1, 300)])
def test_the_mla_kernels_are_right_without_tiles(new: int, cached: int) -> None:
    """Attention over a cached prefix and the new tokens, next to plain torch."""
    needs_avx512()
    import torch
    from vllm import _custom_ops as ops
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    torch.manual_seed(0)
    total = new + cached
    kv = (torch.randn(4096, 1, LATENT + ROPE) * 0.3).bfloat16()
    query = (torch.randn(new, HEADS, LATENT + ROPE) * 0.3).bfloat16()
    slots = torch.randperm(4096)[:total]
    table = torch.zeros(1, 4096, dtype=torch.int64)
    table[0, :total] = slots
    out = torch.zeros(new, HEADS, LATENT, dtype=torch.bfloat16)
    first, length = torch.zeros(1, dtype=torch.int64), torch.tensor([total])
    rest = (0.05, 0.0, False, 0, None, None)
    if new > 1:
        fresh = kv[slots[cached:]].contiguous()
        mine = (
            fresh,
            fresh[..., :LATENT],
            out,
            kv,
            kv[..., :LATENT],
            table,
            first,
            length,
            torch.tensor([new]),
        )
        ops.cpu_mla_extend(query, *mine, torch.tensor([0]), new, *rest, None)
    else:
        partial = torch.zeros(1, HEADS, 2, LATENT + 1)
        cache = (kv, kv[..., :LATENT], out, None, None, None, partial, table.int())
        ops.cpu_mla_decode(query, *cache, first, length, *rest)

    keys = kv[slots, 0].float()
    scores = torch.einsum("qhd,kd->qhk", query.float(), keys) * 0.05
    future = torch.arange(total)[None, :] > torch.arange(new)[:, None] + cached
    weights = scores.masked_fill(future[:, None], float("-inf")).softmax(-1)
    expected = torch.einsum("qhk,kd->qhd", weights, keys[:, :LATENT])
    torch.testing.assert_close(out.float(), expected, atol=2e-3, rtol=2e-2)
