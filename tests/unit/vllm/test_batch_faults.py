"""Which engines compute KV that depends on the batch, and so store less."""

from types import SimpleNamespace

import pytest
import torch
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum as Kind
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, MambaSpec, MLAAttentionSpec

from hybridkv.vllm import batch_faults, seams
from hybridkv.vllm.batch_faults import BatchFaults

ATTENTION = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32)

LATENT = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.float32)


def state(kind: Kind) -> MambaSpec:
    return MambaSpec(block_size=16, shapes=((2, 8),), dtypes=(torch.float32,), mamba_type=kind)


def faults(*specs: KVCacheSpec, lora: object = None) -> BatchFaults:
    return batch_faults.batch_faults(SimpleNamespace(lora_config=lora), specs)


def test_sessions_are_stored_where_each_recurrent_layer_is_of_a_kind_that_was_compared() -> None:
    assert not faults(ATTENTION).in_sessions
    assert not faults(ATTENTION, state(Kind.MAMBA2)).in_sessions
    for kind in set(Kind) - {Kind.MAMBA2}:
        assert faults(ATTENTION, state(Kind.MAMBA2), state(kind)).in_sessions


@pytest.mark.parametrize("is_wrong", [True, False])
def test_lfm2_stores_nothing_on_a_cpu_whose_rotary_embedding_mixes_heads(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_wrong: bool
) -> None:
    monkeypatch.setattr(seams, "mixes_heads", lambda config: is_wrong)
    assert faults(ATTENTION, state(Kind.SHORT_CONV)).in_all_steps is is_wrong
    assert ("nothing is stored" in caplog.text) is is_wrong
    assert not faults(ATTENTION, state(Kind.MAMBA2)).in_all_steps
    monkeypatch.setattr(current_platform, "is_cpu", lambda: False)
    assert not faults(ATTENTION, state(Kind.SHORT_CONV)).in_all_steps


@pytest.mark.parametrize("is_wrong", [True, False])
def test_mla_stores_nothing_there_unless_its_rotary_embedding_is_deepseeks(
    monkeypatch: pytest.MonkeyPatch, is_wrong: bool
) -> None:
    monkeypatch.setattr(seams, "mixes_heads", lambda config: is_wrong)

    def is_stored(rope: str, architecture: str) -> bool:
        text = SimpleNamespace(rope_parameters={"rope_type": rope})
        model = SimpleNamespace(hf_text_config=text, architectures=[architecture])
        config = SimpleNamespace(lora_config=None, model_config=model)
        return not batch_faults.batch_faults(config, [LATENT]).in_all_steps

    assert is_stored("default", "DeepseekV2ForCausalLM") is not is_wrong
    assert is_stored("yarn", "Glm4MoeLiteForCausalLM") is not is_wrong
    assert is_stored("yarn", "DeepseekV3ForCausalLM")
    monkeypatch.setattr(current_platform, "is_cpu", lambda: False)
    assert is_stored("default", "DeepseekV2ForCausalLM")


@pytest.mark.parametrize("is_wrong", [True, False])
def test_the_lora_kernel_is_asked_where_the_engine_has_adapters(
    monkeypatch: pytest.MonkeyPatch, is_wrong: bool
) -> None:
    monkeypatch.setattr(seams, "adapts_base_rows", lambda: is_wrong)
    assert faults(ATTENTION, lora=object()).beside_adapters is is_wrong
    assert not faults(ATTENTION).beside_adapters
    monkeypatch.setattr(current_platform, "is_cpu", lambda: False)
    assert not faults(ATTENTION, lora=object()).beside_adapters
