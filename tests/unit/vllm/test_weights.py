"""Every byte, name, shape, dtype and place of the weights in memory counts, and nothing else."""

import random
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from hybridkv.vllm import weights
from hybridkv.vllm.weights import EngineWeights, device_content, digest_weights


class Model(torch.nn.Module):
    """Two layers, one of them with a buffer, as a seed makes them."""

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = torch.nn.Linear(24, 16, dtype=dtype)
        self.second = torch.nn.Linear(16, 16, dtype=dtype)
        self.second.register_buffer("scale", torch.rand(3), persistent=False)


def digest(model: torch.nn.Module) -> str:
    found = digest_weights({"model": model})
    assert not found.unread
    assert len(found.digest) == 2 * weights.DIGEST_BYTES
    return found.digest


def flip(tensor: torch.Tensor, at: int = 5, bit: int = 0) -> None:
    tensor.data.view(-1).view(torch.uint8)[at] ^= 1 << bit


def swap(model: Model) -> None:
    model.first, model.second = model.second, model.first


def rename(model: Model) -> None:
    model.third = model.second
    del model.second


def swap_rows(model: Model) -> None:
    weight = model.second.weight.data
    weight[[0, 1]] = weight[[1, 0]]


def reshape(model: Model) -> None:
    model.first.weight = torch.nn.Parameter(model.first.weight.data.view(24, 16))


CHANGES: dict[str, Callable[[Model], object]] = {
    "lowest bit of a weight": lambda model: flip(model.first.weight),
    "lowest bit of the last weight": lambda model: flip(model.second.bias, 63),
    "a buffer": lambda model: flip(model.second.scale),
    "a layer's name": rename,
    "the layers' order": swap,
    "two rows": swap_rows,
    "a shape": reshape,
    "a dtype": lambda model: model.second.to(torch.float64),
    "nothing but a smaller dtype": lambda model: model.to(torch.bfloat16),
    "one more buffer": lambda model: model.register_buffer("extra", torch.zeros(1)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_each_change_is_another_digest(change: Callable[[Model], object]) -> None:
    model = Model()
    before = digest(model)
    assert digest(Model()) == before, "the same weights"
    change(model)
    assert digest(model) != before


def test_a_drafter_counts_and_models_have_their_places() -> None:
    one, other = Model(1), Model(2)
    found = [
        digest_weights({"model": one}),
        digest_weights({"model": one, "drafter": other}),
        digest_weights({"model": other, "drafter": one}),
    ]
    assert len({each.digest for each in found}) == 3
    assert found[1].size_bytes == 2 * found[0].size_bytes


def test_views_are_read_without_a_copy_of_their_meaning() -> None:
    """A transposed weight is read as it lies in memory; its strides are a part of the digest."""
    plain, turned = Model(), Model()
    turned.first.weight = torch.nn.Parameter(turned.first.weight.data.t().contiguous().t())
    assert torch.equal(plain.first.weight, turned.first.weight)
    assert digest(plain) != digest(turned), "other kernels read it"
    flip(turned.first.weight.data.t())
    assert digest(turned) != digest(plain)


def test_a_device_reads_every_byte_and_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """The arithmetic of devices, here on the CPU, across the borders of its pieces."""
    monkeypatch.setattr(weights, "WORDS_MAX", 4)
    source = random.Random(7)
    for length in (0, 1, 7, 8, 9, 31, 32, 33, 40, 100):
        run = torch.tensor([source.randrange(256) for _ in range(length)], dtype=torch.uint8)
        words = {tuple(device_content(run).tolist())}
        for at in range(length):
            flip(run, at, at % 8)
            words.add(tuple(device_content(run).tolist()))
            flip(run, at, at % 8)
        assert len(words) == 1 + length, f"of {length} bytes one does not count"
        assert tuple(device_content(run).tolist()) in words
    run = torch.arange(64, dtype=torch.uint8)
    swapped = torch.cat([run[8:16], run[:8], run[16:]])
    assert not torch.equal(device_content(run), device_content(swapped))
    monkeypatch.setattr(weights, "WORDS_MAX", 1 << 22)
    assert torch.equal(device_content(run), torch.tensor(device_content(run.clone()).tolist())), (
        "however it is cut"
    )


def packed(model: Model) -> None:
    """As vLLM's CPU kernels leave a layer: the weight is emptied, a function has it."""
    weight = model.first.weight.data.clone()
    model.first.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)
    model.first.cpu_linear = lambda x, _, bias: torch.nn.functional.linear(x, weight, bias)


def test_a_packed_weight_is_read_where_it_went() -> None:
    one, same, other = Model(), Model(), Model()
    flip(other.first.weight)
    for model in (one, same, other):
        packed(model)
    assert digest(one) == digest(same)
    assert digest(one) != digest(other)


def test_a_weight_that_nobody_can_read_has_no_digest() -> None:
    model = Model()
    model.first.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)
    found = digest_weights({"model": model})
    assert (found.digest, found.unread) == ("", ("model.first",))


class Runner:
    """A model runner that registers KV caches, as vLLM's do."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    def initialize_kv_cache(self) -> EngineWeights | None:
        return EngineWeights.of_caller()

    def reload_weights(self) -> None:
        raise OSError("no such checkpoint")


class Worker:
    def __init__(self, runner: Runner) -> None:
        self.model_runner = runner

    def initialize(self) -> EngineWeights | None:
        return self.model_runner.initialize_kv_cache()

    def update_weights(self) -> str:
        return "done"


def test_the_callers_model_is_found_and_its_changes_are_followed() -> None:
    assert EngineWeights.of_caller() is None
    worker = Worker(Runner(Model()))
    found = worker.initialize()
    assert found is not None
    assert found.digest().digest == digest(worker.model_runner.model)
    worker.model_runner.drafter = SimpleNamespace(model=Model(3))  # type: ignore[attr-defined]
    assert found.digest().digest != digest(worker.model_runner.model)
    changes: list[bool] = []
    found.watch(lambda: changes.append(True))
    assert worker.update_weights() == "done"
    with pytest.raises(OSError, match="no such checkpoint"):
        worker.model_runner.reload_weights()
    assert len(changes) == 2, "also where a part of it may have happened"
