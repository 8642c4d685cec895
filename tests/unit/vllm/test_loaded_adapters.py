"""Adapters are told apart by the tensors that vLLM's LoRA manager has, each read once."""

import gc
import logging
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybridkv.core.keys import HASH_BYTES
from hybridkv.vllm.loaded_adapters import DEPTH_MAX, LoadedAdapters, digest_adapter
from tests.unit.vllm.small_adapters import Worker, adapter


def _flip(tensor: torch.Tensor) -> None:
    tensor.view(-1).view(torch.uint8)[-1] ^= 1


CHANGES: dict[str, Callable[[Any], object]] = {
    "a byte of a packed matrix": lambda model: _flip(model.loras["self_attn.qkv_proj"].lora_a[1]),
    "a byte of a matrix": lambda model: _flip(model.loras["self_attn.o_proj"].lora_b),
    "a byte of a bias": lambda model: _flip(model.modules_to_save["score"].bias),
    "another matrix without values": lambda model: model.loras[
        "self_attn.qkv_proj"
    ].lora_a.reverse(),
    "another shape": lambda model: setattr(
        model.loras["self_attn.o_proj"],
        "lora_a",
        model.loras["self_attn.o_proj"].lora_a.view(4, 64),
    ),
    "another type": lambda model: setattr(
        model.loras["self_attn.o_proj"],
        "lora_a",
        model.loras["self_attn.o_proj"].lora_a.view(torch.float16),
    ),
    "another scale": lambda model: setattr(model.loras["self_attn.o_proj"], "scaling", 2),
    "another layer": lambda model: model.loras.update(
        {"mlp.down_proj": model.loras.pop("self_attn.o_proj")}
    ),
    "one layer less": lambda model: model.loras.pop("self_attn.o_proj"),
    "no head": lambda model: model.modules_to_save.clear(),
    "another form of experts": lambda model: setattr(model, "is_3d_lora_weight", True),
}
HEAD_CHANGES = ("a byte of a bias", "no head")


@pytest.mark.parametrize("change", CHANGES)
def test_each_change_is_another_digest(change: str) -> None:
    model = adapter()
    if change in HEAD_CHANGES and not hasattr(model, "modules_to_save"):
        pytest.skip("vLLM 0.30 has no head in an adapter")
    before = digest_adapter(model)
    assert len(before) == HASH_BYTES
    CHANGES[change](model)
    assert digest_adapter(model) != before


def test_the_same_weights_have_the_same_digest() -> None:
    """Whatever the adapter's number, the order of its layers and the strides of its tensors are."""
    model, same = adapter(1), adapter(7)
    same.loras = dict(reversed([*same.loras.items()]))
    last = same.loras["self_attn.o_proj"]
    last.lora_b = last.lora_b.t().contiguous().t()
    assert not last.lora_b.is_contiguous()
    assert digest_adapter(same) == digest_adapter(model)
    assert digest_adapter(adapter(alpha=8)) != digest_adapter(model), "the scale is merged"
    assert digest_adapter(adapter(dtype=torch.float32)) != digest_adapter(model)


def test_what_is_no_tensor_and_no_scalar_is_not_passed_over() -> None:
    model = adapter()
    model.tensors = {torch.zeros(2)}
    with pytest.raises(TypeError, match=r"type set at .*tensors"):
        digest_adapter(model)
    model = adapter()
    model.itself = model
    with pytest.raises(TypeError, match=f"deeper than {DEPTH_MAX}"):
        digest_adapter(model)


def test_each_adapter_is_read_once_and_again_when_it_is_another_object(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read: list[object] = []

    def counted(model: object) -> bytes:
        read.append(model)
        return digest_adapter(model)

    monkeypatch.setattr("hybridkv.vllm.loaded_adapters.digest_adapter", counted)
    worker = Worker()
    adapters = LoadedAdapters(worker.runner)
    assert adapters.digests_now() == {}
    first, second = adapter(1), adapter(2, alpha=8)
    worker.add(first)
    worker.add(second)
    looks = [adapters.digests_now() for _ in range(3)]
    assert looks == [{1: digest_adapter(first), 2: digest_adapter(second)}] * 3
    assert read == [first, second]
    worker.manager.remove_adapter(1)
    assert adapters.digests_now() == {2: digest_adapter(second)}
    again = adapter(1)
    worker.add(again)
    assert adapters.digests_now() == looks[0], "the same files, loaded again"
    worker.manager.remove_adapter(1)
    worker.add(adapter(1, alpha=8))
    assert adapters.digests_now()[1] == digest_adapter(second), "another adapter under its number"
    assert len(read) == 4


def test_looks_leave_the_order_in_which_vllm_evicts() -> None:
    worker = Worker()
    adapters = LoadedAdapters(worker.runner)
    for number in (1, 2):
        worker.add(adapter(number))
    adapters.digests_now()
    worker.manager.get_adapter(1)
    adapters.digests_now()
    worker.manager.remove_oldest_adapter()
    assert adapters.digests_now().keys() == {1}


def test_an_adapter_that_vllm_let_go_of_is_not_kept() -> None:
    worker = Worker()
    adapters = LoadedAdapters(worker.runner)
    worker.add(adapter(1))
    adapters.digests_now()
    kept = weakref.ref(worker.manager.list_adapters()[1])
    worker.manager._registered_adapters.clear()
    gc.collect()
    assert kept() is None


def test_an_adapter_that_cannot_be_read_is_like_no_other(caplog: pytest.LogCaptureFixture) -> None:
    worker = Worker()
    adapters = LoadedAdapters(worker.runner)
    for number in (1, 2):
        model = adapter(number)
        model.loras["self_attn.o_proj"].lora_a = torch.empty(8, 32, device="meta")
        worker.add(model)
    with caplog.at_level(logging.WARNING, "vllm.hybridkv"):
        first, again = adapters.digests_now(), adapters.digests_now()
    assert first == again, "it is the same object"
    assert first[1] != first[2]
    assert {*map(len, first.values())} == {HASH_BYTES}
    assert len(caplog.records) == 1
    worker.manager.remove_adapter(1)
    model = adapter(1)
    model.loras["self_attn.o_proj"].lora_a = torch.empty(8, 32, device="meta")
    worker.add(model)
    assert adapters.digests_now()[1] != first[1]


@pytest.mark.parametrize(
    "runner", [None, SimpleNamespace(), SimpleNamespace(lora_manager=SimpleNamespace())]
)
def test_without_lora_there_are_no_adapters(runner: Any) -> None:
    assert LoadedAdapters(runner).digests_now() == {}
