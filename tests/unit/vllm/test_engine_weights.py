"""Which weights a worker has, and in which of its steps: whatever writes them, whoever sleeps."""

import ctypes
import mmap
import os
import sys
import time
from collections.abc import Callable, Iterator
from threading import Event
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from hybridkv.vllm import weights_digest
from hybridkv.vllm.weights import EngineWeights, StepLook, WeightsAnswer
from hybridkv.vllm.weights_digest import StoppedError, digest_weights
from hybridkv.vllm.weights_sentinel import WORDS, WeightsSentinel
from tests.unit.vllm import small_models
from tests.unit.vllm.test_weights_digest import Clock
from tests.waiting import DEADLINE_SECONDS, until

pytestmark = pytest.mark.engine


class Model(torch.nn.Module):
    """Two layers, one of them with a buffer, as a seed makes them."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = torch.nn.Linear(24, 16)
        self.second = torch.nn.Linear(16, 16, dtype=torch.bfloat16)
        self.second.register_buffer("scale", torch.rand(3), persistent=False)

    def load_weights(self, weights: Any) -> None:
        """Do nothing; vLLM's models have a method of this name."""


def digest(model: torch.nn.Module) -> str:
    return digest_weights({"model": model}).digest


class Runner:
    """A model runner that registers KV caches, as vLLM's do."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def initialize_kv_cache(self, before_sleep: Any) -> EngineWeights:
        return EngineWeights.of_caller(before_sleep)

    def reload_weights(self) -> None:
        raise OSError("no such checkpoint")


class Extension:
    """A worker extension with a trainer's own update."""

    def push(self) -> str:
        return "pushed"


class Worker(Extension):
    def __init__(self, runner: Runner, extension: str = "") -> None:
        self.model_runner = runner
        parallel = SimpleNamespace(worker_extension_cls=extension)
        self.vllm_config = SimpleNamespace(parallel_config=parallel)
        self.slept: list[str] = []

    def initialize(self, before_sleep: Any = None) -> EngineWeights:
        return self.model_runner.initialize_kv_cache(before_sleep)

    def update_weights(self) -> str:
        return "done"

    def apply_model(self, function: Callable[[Any], Any]) -> Any:
        return function(self.model_runner.model)

    def sleep(self, level: int = 1) -> None:
        self.slept.append(f"sleeps {level}")

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.slept.append(f"wakes {tags}")

    def discard(self, tags: tuple[str, ...]) -> None:
        self.slept.append(f"discards {tags}")


class Engine:
    """A worker's steps, one after another."""

    def __init__(self, worker: Worker, before_sleep: Any = None, **options: Any) -> None:
        self.worker = worker
        if options:
            self.weights = EngineWeights(worker.model_runner, worker, before_sleep, **options)
        else:
            self.weights = worker.initialize(before_sleep)
        self.model: Any = worker.model_runner.model
        self.first = self.weights.read().digest
        self._number = 0

    def step(self, question: int = 0, **options: bool) -> WeightsAnswer:
        """A step that stores nothing, and what its report says."""
        self._number += 1
        self.weights.begin_step(self._number, question, **options)
        return self.weights.take_step_answer()

    def idle(self) -> WeightsAnswer:
        """An idle step, and a wait for the reading that goes on."""
        answer = self.step(is_idle=True)
        self.weights.yield_to_reading()
        return answer

    def read(self, question: int = 0) -> WeightsAnswer:
        """Idle steps until the weights are known."""

        def is_known() -> bool:
            answers.append(self.step(question, is_idle=True))
            self.weights.yield_to_reading()
            return bool(answers[-1].digest)

        answers: list[WeightsAnswer] = []
        until(is_known, "the weights are read")
        return answers[-1]


@pytest.fixture
def engine() -> Iterator[Engine]:
    """An engine that has registered its KV caches and read its weights."""
    started = Engine(Worker(Runner(Model())))
    yield started
    started.weights.close()


def test_the_callers_model_is_found_and_its_drafter_counts(engine: Engine) -> None:
    assert engine.first == digest(engine.model)
    engine.worker.model_runner.drafter = SimpleNamespace(model=Model(3))  # type: ignore[attr-defined]
    assert engine.weights.read().digest != engine.first


def test_a_model_inside_the_wrappers_of_cuda_graphs_is_found() -> None:
    """Row 6: with a V1 runner and CUDA graphs the runner's model is no module."""

    class Wrapper:
        def __init__(self, runnable: Any) -> None:
            self.runnable = runnable

        def __getattr__(self, name: str) -> Any:
            return getattr(self.runnable, name)

        def unwrap(self) -> Any:
            return self.runnable.unwrap() if isinstance(self.runnable, Wrapper) else self.runnable

    model = Model()
    found = Engine(Worker(Runner(Wrapper(Wrapper(model)))))
    assert found.first == digest(model)
    assert found.step() == WeightsAnswer(0, 0, found.first, (StepLook(1, 0),))


def test_weights_that_nobody_found_are_like_no_others() -> None:
    class Nobody:
        def register(self) -> EngineWeights:
            return EngineWeights.of_caller()

    found = [Nobody().register().read() for _ in range(2)]
    assert found[0].unread
    assert found[0].digest != found[1].digest


def negate(model: Model) -> None:
    model.first.weight.data.neg_()


def exchange_bytes(model: Model) -> None:
    model.first.weight.data = -model.first.weight.data


def exchange_parameter(model: Model) -> None:
    model.first.weight = torch.nn.Parameter(-model.first.weight.data)


def exchange_module(model: Model) -> None:
    model.second = torch.nn.Linear(16, 16, dtype=torch.bfloat16)


def fill_buffer(model: Model) -> None:
    model.second.scale.fill_(7.0)


def negate_transposed(model: Model) -> None:
    model.first.weight.data.t().neg_()


@pytest.mark.parametrize(
    "change",
    [
        *(negate, exchange_bytes, exchange_parameter, exchange_module, fill_buffer),
        negate_transposed,
    ],
)
def test_any_code_that_writes_is_seen_in_the_next_step(
    change: Callable[[Model], None], engine: Engine
) -> None:
    assert engine.step() == WeightsAnswer(0, 0, engine.first, (StepLook(1, 0),))
    change(engine.model)
    assert engine.step() == WeightsAnswer(0, 1, "", (StepLook(2, 1),))
    assert engine.read()[:3] == (0, 1, digest(engine.model))
    assert engine.weights.digest != engine.first


def test_the_sentinel_watches_words_of_every_tensor() -> None:
    """Whatever its type, its size and its strides; each at many places."""
    model = torch.nn.Module()
    tensors = {
        "whole": torch.rand(64, 48),
        "half": torch.rand(5, dtype=torch.bfloat16),
        "byte": torch.randint(0, 255, (1000,), dtype=torch.uint8),
        "float8": torch.rand(64).to(torch.float8_e4m3fn),
        "complex": torch.rand(9, dtype=torch.complex64),
        "turned": torch.rand(32, 16).t(),
        "gaps": torch.rand(32, 64)[:, ::2],
        "scalar": torch.tensor(3.0),
        "empty": torch.empty(0),
    }
    for name, tensor in tensors.items():
        model.register_buffer(f"its_{name}", tensor)
    sentinel = WeightsSentinel()
    before = sentinel.look({"model": model}).words_digest()
    assert sentinel.look({"model": model}).words_digest() == before
    for name, tensor in tensors.items():
        seen = 0
        for at in range(tensor.numel()):
            index = torch.unravel_index(torch.tensor(at), tensor.shape)
            kept = tensor[index].clone()
            tensor[index] = 1.0 if kept.item() != 1.0 else 2.0
            seen += sentinel.look({"model": model}).words_digest() != before
            tensor[index] = kept
        watched = min(WORDS, tensor.numel())
        assert watched * 0.8 <= seen <= watched, name
    assert sentinel.look({"model": model}).words_digest() == before


def test_words_of_a_matrix_lie_in_several_columns() -> None:
    """Or an update of some columns alone would not be seen."""
    model = torch.nn.Linear(64, 4096, bias=False)
    sentinel, columns = WeightsSentinel(), 0
    before = sentinel.look({"model": model}).words_digest()
    for column in range(64):
        model.weight.data[:, column] += 1
        columns += sentinel.look({"model": model}).words_digest() != before
        model.weight.data[:, column] -= 1
        before = sentinel.look({"model": model}).words_digest()
    assert columns > WORDS // 2


@pytest.mark.parametrize("way", ["update_weights", "apply_model", "load_weights"])
def test_after_methods_that_may_change_weights_all_bytes_are_read(way: str, engine: Engine) -> None:
    """Also where no word that is watched changes."""
    assert engine.step().digest == engine.first
    calls: dict[str, Callable[[], object]] = {
        "update_weights": engine.worker.update_weights,
        "apply_model": lambda: engine.worker.apply_model(lambda model: None),
        "load_weights": lambda: engine.model.load_weights([]),
    }
    calls[way]()
    assert engine.weights.take_step_answer() == WeightsAnswer(0, 0, ""), "unknown at once"
    assert engine.step()[1:4] == (1, "", (StepLook(2, 1),)), "an era begins"
    assert engine.read()[:3] == (0, 1, engine.first)


def test_methods_of_a_trainers_extension_are_followed() -> None:
    name = f"{Extension.__module__}.{Extension.__qualname__}"
    engine = Engine(Worker(Runner(Model()), name))
    assert engine.worker.push() == "pushed"
    assert engine.step()[1:3] == (1, "")
    engine.weights.close()


def test_a_method_that_fails_may_have_changed_a_part(engine: Engine) -> None:
    with pytest.raises(OSError, match="no such checkpoint"):
        engine.worker.model_runner.reload_weights()
    assert engine.step()[1:3] == (1, "")


def test_each_question_is_answered_by_a_new_reading() -> None:
    """Of a change that no watched word shows, as of one element of thousands."""
    model: Any = Model()
    model.large = torch.nn.Linear(300, 300)
    engine = Engine(Worker(Runner(model)))
    elements = model.large.weight.data.view(-1)
    for at in range(len(elements)):
        elements[at] += 1
        if engine.step().era == 0:
            break
        elements[at] -= 1
        engine = Engine(Worker(Runner(model)))
    assert engine.step().digest == engine.first, "nobody has asked"
    assert engine.step(1)[:3] == (1, 0, "")
    answer = engine.read(1)
    assert answer[:2] == (1, 0), "what was watched is the same"
    assert answer.digest == digest(model) != engine.first


def test_weights_that_change_while_they_are_read_are_read_again(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, updates = digest_weights, iter([engine.model.first.weight])

    def changing(*arguments: Any, **options: Any) -> Any:
        found = whole(*arguments, **options)
        for tensor in updates:
            tensor.data.neg_()
        return found

    monkeypatch.setattr("hybridkv.vllm.weights.digest_weights", changing)
    engine.step(1)
    assert engine.weights.reading is not None
    assert engine.weights.reading.thread is not None
    engine.weights.reading.thread.join(DEADLINE_SECONDS)
    assert engine.step(1)[1:3] == (1, ""), "it is a digest of neither"
    assert engine.read(1).digest == digest(engine.model) != engine.first


def test_a_step_in_which_the_weights_change_has_an_era_of_its_own(engine: Engine) -> None:
    engine.weights.begin_step(1, 0)
    negate(engine.model)
    engine.weights.computed()
    assert engine.weights.take_step_answer() == WeightsAnswer(0, 1, "", (StepLook(1, 1),))
    engine.weights.begin_step(2, 0)
    assert engine.weights.take_step_answer() == WeightsAnswer(0, 2, "", (StepLook(2, 2),))


def test_what_a_start_had_no_time_for_is_read_in_idle_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Issue 50: of packed weights under load. The doubt ends, and the era goes on."""
    monkeypatch.setattr(weights_digest, "PROBE_ROWS", 1)
    clock = Clock(100.0, 100.0, 100.0)
    engine = Engine(Worker(Runner(clock.kept(small_models.Model()))), now=clock)
    try:
        products = clock.products
        first = engine.step()
        assert first == (0, 0, engine.first, (StepLook(1, 0),), 0, 1, True)
        assert clock.products == products, "no step with tokens is delayed"
        engine.step(1)
        reading = engine.weights.reading
        assert reading is not None
        assert reading.thread is not None
        reading.thread.join(DEADLINE_SECONDS)
        assert reading.found is not None
        assert reading.found.is_late, "beside the steps nothing is multiplied"
        until(lambda: engine.idle().revision > 0, "the weights are read")
        answer = engine.step()
        assert answer[:3] == (1, 0, digest(Clock().kept(small_models.Model())))
        assert answer[4:] == (1, 0, False)
        products = clock.products
        assert not engine.idle().is_reading
        assert clock.products == products
    finally:
        engine.weights.close()


def test_idle_steps_do_not_read_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_digest, "PROBE_ROWS", 1)
    clock = Clock(*[100.0] * 100)
    engine = Engine(Worker(Runner(clock.kept(small_models.Model()))), now=clock)
    try:
        steps = 0
        while engine.idle().is_reading:
            steps += 1
            assert steps < 10
        products = clock.products
        assert engine.idle()[2:] == (engine.first, (), 0, 1, False)
        assert clock.products == products
    finally:
        engine.weights.close()


def endless(begun: Event, ended: Event) -> Callable[..., Any]:
    def read(*arguments: Any, **_: Any) -> Any:
        begun.set()
        while not arguments[2]():
            pass
        ended.set()
        raise StoppedError

    return read


def test_a_reading_ends_before_the_weights_change(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, ended = Event(), Event()
    monkeypatch.setattr("hybridkv.vllm.weights.digest_weights", endless(begun, ended))
    engine.step(1)
    assert begun.wait(DEADLINE_SECONDS)
    engine.worker.update_weights()
    assert ended.is_set(), "memory that is read may be gone after the change"


def test_an_engine_that_never_yields_gives_way_to_a_reading(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    interval, asked = sys.getswitchinterval(), Event()
    whole = digest_weights

    def late(*arguments: Any, **options: Any) -> Any:
        assert asked.wait(DEADLINE_SECONDS)
        return whole(*arguments, **options)

    monkeypatch.setattr("hybridkv.vllm.weights.digest_weights", late)
    sys.setswitchinterval(1000 * DEADLINE_SECONDS)
    try:
        engine.step(1)
        asked.set()
        deadline, reading = time.monotonic() + DEADLINE_SECONDS, engine.weights.reading
        assert reading is not None
        while reading.found is None and time.monotonic() < deadline:
            engine.weights.yield_to_reading()
        assert reading.found is not None
        assert reading.found.digest == engine.first
    finally:
        sys.setswitchinterval(interval)


def test_a_step_that_cannot_be_looked_at_is_like_no_other(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(models: Any) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(engine.weights.sentinel, "look", fails)
    answers = [engine.step(), engine.step()]
    assert [answer[1:3] for answer in answers] == [(1, ""), (2, "")]
    assert engine.weights.reading is None or engine.weights.reading.thread is None
    assert caplog.text.count("cannot be looked at") == 1
    monkeypatch.undo()
    assert engine.read()[1:3] == (3, engine.first)


def test_a_device_that_fails_under_a_look_fails_no_report(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails() -> None:
        raise RuntimeError("an illegal access of a kernel before this one")

    lost = SimpleNamespace(words_digest=fails)
    monkeypatch.setattr(engine.weights.sentinel, "look", lambda models: lost)
    answers = [engine.step(), engine.step()]
    assert [answer[1:3] for answer in answers] == [(1, ""), (2, "")]
    assert caplog.text.count("cannot be looked at") == 1


def test_only_steps_that_write_blocks_are_looked_at(engine: Engine) -> None:
    assert engine.step(is_idle=True).steps == ()
    assert engine.step().steps == (StepLook(2, 0),)
    engine.weights.begin_step(2, 0)
    assert engine.weights.take_step_answer().steps == (), "each step once"


def wake_one_by_one(worker: Worker) -> None:
    for tag in ("weights", "kv_cache"):
        worker.wake_up([tag])


class Sleep(NamedTuple):
    """How a worker's memory goes away, and comes back."""

    begin: Callable[[Worker], None]
    end: Callable[[Worker], None]


SLEEPS = {
    "level 1": Sleep(lambda worker: worker.sleep(1), lambda worker: worker.wake_up()),
    "level 2": Sleep(lambda worker: worker.sleep(level=2), lambda worker: worker.wake_up(None)),
    "one after another": Sleep(lambda worker: worker.sleep(), wake_one_by_one),
    "the cache alone": Sleep(
        lambda worker: worker.discard(("kv_cache",)), lambda worker: worker.wake_up(["kv_cache"])
    ),
    "the whole, by name": Sleep(
        lambda worker: worker.discard(tags=()), lambda worker: worker.wake_up(tags=None)
    ),
}


@pytest.mark.parametrize("sleep", SLEEPS.values(), ids=SLEEPS)
def test_nothing_is_read_while_the_engine_sleeps(sleep: Sleep) -> None:
    """Row 2: the memory is gone meanwhile. A reader of it ends this process."""
    worker, ended = Worker(Runner(Model())), list[list[str]]()
    memory = mmap.mmap(-1, mmap.PAGESIZE)
    mapped = torch.frombuffer(memory, dtype=torch.float32, count=24 * 16).view(16, 24)
    model = worker.model_runner.model
    mapped.copy_(model.first.weight.data)
    model.first.weight.data = mapped
    engine = Engine(worker, lambda: ended.append([*worker.slept]))
    libc, address = ctypes.CDLL(None, use_errno=True), ctypes.c_void_p(mapped.data_ptr())

    def protect(flags: int) -> None:
        assert libc.mprotect(address, ctypes.c_size_t(mmap.PAGESIZE), flags) == 0, os.strerror(
            ctypes.get_errno()
        )

    sleep.begin(worker)
    assert ended == [[]], "copies end before the memory is gone"
    protect(0)
    try:
        for question in range(3):
            assert engine.step(question)[1:4] == (0, "", ())
            engine.weights.computed()
            engine.weights.yield_to_reading()
        assert engine.weights.is_asleep
    finally:
        protect(mmap.PROT_READ | mmap.PROT_WRITE)
    sleep.end(worker)
    assert not engine.weights.is_asleep
    assert engine.step(2)[:3] == (2, 1, ""), "they may be others"
    assert engine.read(2).digest == engine.first
    engine.weights.close()


def test_half_awake_is_asleep(engine: Engine) -> None:
    engine.worker.sleep()
    engine.worker.wake_up(["weights"])
    assert engine.weights.is_asleep
    engine.worker.wake_up(["kv_cache"])
    assert not engine.weights.is_asleep


def test_copies_that_cannot_be_ended_keep_no_engine_awake() -> None:
    def fails() -> None:
        raise RuntimeError("a lane hangs")

    engine = Engine(Worker(Runner(Model())), fails)
    engine.worker.sleep()
    assert engine.worker.slept == ["sleeps 1"]
