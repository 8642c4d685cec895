"""Every byte, name, shape, dtype and place of the weights in memory counts, and nothing else."""

import random
import sys
import time
from collections.abc import Callable
from threading import Event
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch

from hybridkv.vllm import weights as weights_module
from hybridkv.vllm.weights import EngineWeights, PackedWeights, device_content, digest_weights
from tests.waiting import DEADLINE_SECONDS, until

pytestmark = pytest.mark.engine


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
    assert len(found.digest) == 2 * weights_module.DIGEST_BYTES
    return found.digest


def flip(tensor: torch.Tensor, at: int = 5, bit: int = 0) -> None:
    tensor.data.view(-1).view(torch.uint8)[at] ^= 1 << bit


def swap(model: Model) -> None:
    model.first, model.second = model.second, model.first


def rename(model: Model) -> None:
    model.third = model.second
    del model.second


def reorder(model: Model) -> None:
    first = model.first
    del model.first
    model.first = first


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
    "the layers' places": swap,
    "the layers' order": reorder,
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
    monkeypatch.setattr(weights_module, "WORDS_MAX", 4)
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
    monkeypatch.setattr(weights_module, "WORDS_MAX", 1 << 22)
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
    found = [digest_weights({"model": model}) for _ in range(2)]
    assert [one.unread for one in found] == [("model.first",)] * 2
    assert found[0].digest != found[1].digest, "no other engine's, and no later one's"


class Runner:
    """A model runner that registers KV caches, as vLLM's do."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    def initialize_kv_cache(self) -> EngineWeights:
        return EngineWeights.of_caller()

    def reload_weights(self) -> None:
        raise OSError("no such checkpoint")


class Worker:
    def __init__(self, runner: Runner) -> None:
        self.model_runner = runner

    def initialize(self) -> EngineWeights:
        return self.model_runner.initialize_kv_cache()

    def update_weights(self) -> str:
        return "done"


def answered(weights: EngineWeights) -> weights_module.WeightsAnswer:
    """What a worker says after a step, once the weights are read."""
    until(lambda: bool(weights.answer[1]), "the weights are read")
    return weights.answer


def test_the_callers_model_is_found_and_its_drafter_counts() -> None:
    worker = Worker(Runner(Model()))
    found = worker.initialize()
    assert found.read().digest == digest(worker.model_runner.model)
    worker.model_runner.drafter = SimpleNamespace(model=Model(3))  # type: ignore[attr-defined]
    assert found.read().digest != digest(worker.model_runner.model)


def test_weights_that_nobody_found_are_like_no_others() -> None:
    class Nobody:
        def register(self) -> EngineWeights:
            return EngineWeights.of_caller()

    found = [Nobody().register().read() for _ in range(2)]
    assert found[0].unread == found[1].unread == ("no model",)
    assert found[0].digest != found[1].digest


def test_weights_are_read_again_after_every_question_and_every_change() -> None:
    worker = Worker(Runner(Model()))
    weights = worker.initialize()
    first = weights.read().digest
    weights.step(0)
    assert weights.answer[:3] == (0, first, 0)
    flip(worker.model_runner.model.first.weight)
    weights.step(0)
    assert weights.answer[:3] == (0, first, 0), "nobody was told"
    weights.step(1)
    assert answered(weights)[:3] == (1, digest(worker.model_runner.model), 0)
    assert worker.update_weights() == "done"
    assert weights.answer[:3] == (1, "", 1), "unknown at once"
    weights.step(1)
    flip(worker.model_runner.model.first.weight)
    with pytest.raises(OSError, match="no such checkpoint"):
        worker.model_runner.reload_weights()
    assert weights.answer[1] == "", "also where a part of it may have happened"
    weights.step(1)
    assert answered(weights)[:2] == (1, first)
    weights.close()


def test_weights_that_change_while_they_are_read_are_read_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker = Worker(Runner(Model()))
    weights = worker.initialize()
    whole, updates = weights_module.digest_weights, iter([worker.model_runner.model.first.weight])

    def changing(*arguments: Any) -> Any:
        found = whole(*arguments)
        for tensor in updates:
            tensor.data.neg_()
        return found

    weights.read()
    monkeypatch.setattr(weights_module, "digest_weights", changing)
    weights.step(1)
    assert weights._reader is not None
    weights._reader[0].join(DEADLINE_SECONDS)
    assert weights.answer.digest == "", "it is a digest of neither"
    weights.step(1)
    assert answered(weights).digest == digest(worker.model_runner.model)
    weights.close()


def test_steps_of_one_era_had_the_same_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a reading takes long each step looks at a few words, and sees every other weight."""
    worker = Worker(Runner(Model()))
    weights = worker.initialize()
    weights.read()
    reading = Event()

    def endless(*arguments: Any) -> Any:
        reading.set()
        while not arguments[2]():
            pass
        raise weights_module.StoppedError

    monkeypatch.setattr(weights_module, "digest_weights", endless)
    era, updated = weights.answer.era, worker.model_runner.model.first.weight.data
    try:
        for question in range(1, 4):
            weights.step(question)
            assert reading.wait(DEADLINE_SECONDS)
            assert weights.answer == (question, "", 0, era), "nothing changed"
        updated.neg_()
        weights.step(4)
        assert weights.answer.era == era + 1
        updated.neg_()
        weights.step(5)
        assert weights.answer.era == era + 2, "the steps between were of other weights"
        worker.update_weights()
        weights.step(5)
        assert weights.answer.era == era + 3, "whatever a method has changed"
    finally:
        weights.close()


def test_an_engine_that_never_yields_gives_way_to_a_reading(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker = Worker(Runner(Model()))
    weights = worker.initialize()
    first, interval, asked = weights.read().digest, sys.getswitchinterval(), Event()
    whole = weights_module.digest_weights

    def late(*arguments: Any) -> Any:
        assert asked.wait(DEADLINE_SECONDS)
        return whole(*arguments)

    monkeypatch.setattr(weights_module, "digest_weights", late)
    sys.setswitchinterval(1000 * DEADLINE_SECONDS)
    try:
        weights.step(1)
        asked.set()
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not weights.answer[1] and time.monotonic() < deadline:
            weights.give_way()
        assert weights.answer[:3] == (1, first, 0)
    finally:
        sys.setswitchinterval(interval)
        weights.close()


def test_a_reading_ends_before_the_weights_change(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(Runner(Model()))
    weights = worker.initialize()
    weights.read()
    begun, ended = Event(), Event()

    def endless(*arguments: Any) -> Any:
        begun.set()
        while not arguments[2]():
            pass
        ended.set()
        raise weights_module.StoppedError

    monkeypatch.setattr(weights_module, "digest_weights", endless)
    weights.step(1)
    assert begun.wait(DEADLINE_SECONDS)
    worker.update_weights()
    assert ended.is_set(), "memory that is read may be gone after the change"
    assert weights.answer[:3] == (1, "", 1)


class CPUDNNLGEMMHandler:
    """oneDNN's matrix, as vLLM names it: what it multiplies with cannot be read otherwise."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.n, self.k = weight.shape


def kept(model: Model) -> None:
    """As vLLM leaves a layer whose weights oneDNN keeps."""
    memory: WeakKeyDictionary[Any, torch.Tensor] = WeakKeyDictionary()
    handler = CPUDNNLGEMMHandler(model.first.weight)
    memory[handler] = model.first.weight.data.clone()
    model.first.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return torch.nn.functional.linear(x, memory[handler], bias)

    model.first.cpu_linear = linear


def test_what_a_library_keeps_is_read_by_asking_it(monkeypatch: pytest.MonkeyPatch) -> None:
    one, same, other = Model(), Model(), Model()
    flip(other.first.weight)
    for model in (one, same, other):
        kept(model)
    assert digest(one) == digest(same)
    assert digest(one) != digest(other)
    monkeypatch.setattr(weights_module, "PROBE_SECONDS_MAX", -1.0)
    packed = PackedWeights()
    first, again = (digest_weights({"model": one}, packed) for _ in range(2))
    assert first.unread == again.unread == ("model.first",)
    assert first.digest == again.digest, "this engine's own weights are the same"
    assert first.digest != digest_weights({"model": same}).digest, "no other engine's are"
