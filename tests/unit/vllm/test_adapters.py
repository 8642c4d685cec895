"""What a LoRA adapter computed is named by its weights, and by nothing that may be others."""

import logging
import random
from collections import defaultdict
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from vllm.lora.request import LoRARequest

from hybridkv.core.keys import HASH_BYTES
from hybridkv.vllm import adapters as module
from hybridkv.vllm.adapters import Adapter, AdapterRefusal, Adapters, AdapterWeights

OLD, NEW = b"o" * HASH_BYTES, b"n" * HASH_BYTES


def request_of(request_id: str, name: str = "a", number: int = 1, path: str = "/a") -> Any:
    """As much of vLLM's request as its hashes of adapters look at."""
    return SimpleNamespace(
        request_id=request_id,
        lora_request=LoRARequest(name, number, path),
        mm_features=[],
        cache_salt="salt",
        prompt_embeds=None,
    )


class Engine:
    """An engine of one worker, or of several, in which one step follows the other."""

    def __init__(self, ranks: int = 1) -> None:
        self.adapters = Adapters(ranks)
        self.number = 0

    def arrive(
        self, request_id: str, name: str = "a", number: int = 1, path: str = "/a"
    ) -> Adapter:
        adapter = self.adapters.on_new_request(request_of(request_id, name, number, path))
        assert adapter is not None
        return adapter

    def plan(self, *scheduled: str) -> int:
        self.number += 1
        self.adapters.on_step_planned(self.number, scheduled)
        return self.number

    def step(self, *scheduled: str, loaded: dict[int, bytes]) -> int:
        """A step of these requests, in which the worker had these adapters."""
        number = self.plan(*scheduled)
        self.adapters.on_report(number, {0: loaded})
        return number


def test_an_adapter_is_known_once_all_workers_have_it() -> None:
    engine = Engine(ranks=2)
    adapter = engine.arrive("r")
    for loaded in ({}, {0: {1: OLD}}, {0: {2: OLD}, 1: {1: OLD}}):
        engine.adapters.on_report(engine.plan(), loaded)
        assert adapter.weights is None
        assert adapter.refusal == AdapterRefusal.NOT_LOADED
    engine.adapters.on_report(engine.plan(), {0: {1: OLD}, 1: {1: OLD}})
    assert adapter.weights == AdapterWeights(1, (OLD, OLD))
    engine.adapters.on_report(engine.plan(), {0: {}, 1: {1: OLD}})
    assert adapter.weights is None, "the engine has let go of it"
    engine.adapters.on_report(engine.plan(), {0: {1: OLD}, 1: {1: OLD}})
    assert adapter.weights == AdapterWeights(1, (OLD, OLD)), "the same files, loaded again"


def test_an_identity_is_that_of_all_ranks_whatever_the_number_is() -> None:
    assert (
        AdapterWeights(1, (OLD, OLD)).content_hash == AdapterWeights(7, (OLD,)).content_hash == OLD
    )
    apart = {AdapterWeights(1, digests).content_hash for digests in ((OLD, NEW), (NEW, OLD))}
    assert len(apart | {OLD, NEW}) == 4
    assert {*map(len, apart)} == {HASH_BYTES}


def test_requests_without_an_adapter_have_none() -> None:
    engine = Engine()
    plain = SimpleNamespace(request_id="r", lora_request=None)
    assert engine.adapters.on_new_request(plain) is None
    assert engine.adapters.on_new_request(SimpleNamespace(request_id="r")) is None
    engine.step("r", loaded={})


def test_other_weights_over_blocks_of_the_old_ones_are_refused_until_the_cache_is_empty(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = Engine()
    adapter = engine.arrive("r")
    old = engine.step("r", loaded={1: OLD})
    assert adapter.has_computed(OLD, old)
    engine.step(loaded={1: NEW})
    assert adapter.weights is None, "the engine may hit blocks of the old weights"
    assert adapter.refusal == AdapterRefusal.MIXED
    engine.step(loaded={1: OLD})
    assert adapter.weights is not None, "nothing was computed meanwhile"
    with caplog.at_level(logging.WARNING, "vllm.hybridkv"):
        new = engine.step("r", loaded={1: NEW})
        back = engine.step("r", loaded={1: OLD})
        engine.step("r", loaded={1: NEW})
    assert len(caplog.records) == 1
    assert "adapter a has" in caplog.text
    assert adapter.weights is None
    for identity, step in ((OLD, old), (NEW, new), (OLD, back)):
        assert not adapter.has_computed(identity, step)
    later = engine.arrive("s")
    assert later.weights is None, "another request hits the same blocks"
    assert not later.is_awaited
    assert engine.arrive("b", name="b", number=1).weights is not None, "it has blocks of its own"
    engine.adapters.on_cache_emptied()
    assert adapter.weights == later.weights == AdapterWeights(1, (NEW,))
    assert adapter.has_computed(NEW, engine.step("s", loaded={1: NEW}))


@pytest.mark.parametrize("is_first", [False, True])
def test_in_either_order_of_reset_and_load_the_new_weights_are_served(is_first: bool) -> None:
    engine = Engine()
    adapter = engine.arrive("r")
    engine.step("r", loaded={1: OLD})
    if is_first:
        engine.adapters.on_cache_emptied()
    engine.step(loaded={1: OLD if is_first else NEW})
    if not is_first:
        engine.adapters.on_cache_emptied()
    number = engine.step("r", loaded={1: NEW})
    assert adapter.weights == AdapterWeights(1, (NEW,))
    assert adapter.has_computed(NEW, number)
    assert not adapter.has_computed(OLD, number), "planned when the old ones were loaded"


def test_a_step_from_before_the_reset_tells_nothing_of_what_is_computed_after_it() -> None:
    """With asynchronous scheduling its report comes later."""
    engine = Engine()
    adapter = engine.arrive("r")
    engine.step("r", loaded={1: OLD})
    before = engine.plan("r")
    engine.adapters.on_cache_emptied()
    after = engine.plan("r")
    engine.adapters.on_report(before, {0: {1: OLD}})
    engine.adapters.on_report(after, {0: {1: NEW}})
    assert adapter.has_computed(NEW, after)


def test_what_was_loaded_counts_as_computed() -> None:
    engine = Engine()
    adapter = engine.arrive("r")
    engine.step(loaded={1: OLD})
    adapter.blocks.note_blocks(adapter.weights)
    engine.step("r", loaded={1: NEW})
    assert adapter.weights is None
    assert adapter.refusal == AdapterRefusal.MIXED


@pytest.mark.parametrize("lost", ["no report", "no worker began it", "some worker has none"])
def test_a_step_whose_adapter_nobody_knows_computed_with_any(lost: str) -> None:
    engine = Engine()
    adapter = engine.arrive("r")
    first = engine.step("r", loaded={1: OLD})
    number = engine.plan("r")
    if lost == "no worker began it":
        engine.adapters.on_report(0, {})
    elif lost == "some worker has none":
        engine.adapters.on_report(number, {0: {}})
    engine.step(loaded={1: OLD})
    assert adapter.weights is None
    assert not adapter.has_computed(OLD, first)
    assert not adapter.has_computed(OLD, number)


def test_a_step_is_not_proven_before_its_report() -> None:
    engine = Engine()
    adapter = engine.arrive("r")
    first, second = engine.plan("r"), engine.plan("r")
    engine.adapters.on_report(first, {0: {1: OLD}})
    assert adapter.has_computed(OLD, first)
    assert not adapter.has_computed(OLD, second)
    engine.adapters.on_report(second, {0: {1: OLD}})
    assert adapter.has_computed(OLD, second)


def test_a_request_waits_for_one_report_of_an_engine_that_is_idle() -> None:
    """`add_lora` loads between two steps, and only a step says what is loaded."""
    engine = Engine()
    adapter = engine.arrive("r")
    assert adapter.is_awaited
    number = engine.plan()
    busy = engine.arrive("s", name="b", number=2)
    assert not busy.is_awaited, "steps go on, so the last report is fresh"
    assert adapter.is_awaited
    engine.adapters.on_report(number, {0: {}})
    assert not adapter.is_awaited
    engine.step(loaded={1: OLD})
    assert not engine.arrive("t").is_awaited, "it is known"


def test_an_adapter_of_an_engine_with_too_many_is_refused_until_the_cache_is_empty(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What one of them computed is forgotten by nobody, so that no other is taken for it."""
    monkeypatch.setattr(module, "ADAPTERS_MAX", 2)
    engine = Engine()
    loaded = dict.fromkeys(range(1, 5), OLD)
    adapters = [engine.arrive(str(number), str(number), number) for number in range(1, 5)]
    engine.step(*"1234", loaded=loaded)
    assert [adapter.weights is not None for adapter in adapters] == [True, True, False, False]
    assert engine.arrive("again", "4", 4).weights is None
    for request_id in "12":
        engine.adapters.on_request_ended(request_id)
    engine.adapters.on_cache_emptied()
    assert [adapter.weights is not None for adapter in adapters[2:]] == [True, True]
    assert adapters[3].blocks is engine.arrive("once more", "4", 4).blocks


def test_steps_that_nobody_reports_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STEPS_MAX", 8)
    engine = Engine()
    adapter = engine.arrive("r")
    for _ in range(20):
        engine.plan("r")
    assert len(engine.adapters.unreported_steps) == 8
    engine.adapters.on_report(engine.number, {0: {1: OLD}})
    assert adapter.weights is None


class Request(NamedTuple):
    """A request that runs with an adapter."""

    name: str
    number: int
    """The adapter's lora_int_id."""


class FlyingStep(NamedTuple):
    """A step that was not reported yet, and the adapters that the worker had in it."""

    number: int
    loaded: dict[int, bytes]


class Run(NamedTuple):
    """What a request computed in a step, by its plan; it is stored once that is proven."""

    request_id: str
    identity: bytes
    step: int


class Truth:
    """A worker whose adapters come and go, and what is computed by which weights."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.engine = Engine()
        self.file = {1: OLD, 2: OLD}
        self.loaded: dict[int, bytes] = {}
        self.computed_by: dict[str, dict[int, set[bytes]]] = defaultdict(lambda: defaultdict(set))
        """The weights that computed the engine's blocks, by name and step."""
        self.requests: dict[str, Request] = {}
        self.adapters: dict[str, Adapter] = {}
        self.flying: list[FlyingStep] = []
        self.runs: list[Run] = []
        self.commits = 0

    def arrive(self) -> None:
        request_id = str(len(self.adapters))
        number = self.draw.choice((1, 1, 2))
        name = self.draw.choice("ab") if number == 2 else "a"
        self.requests[request_id] = Request(name, number)
        self.adapters[request_id] = self.engine.arrive(request_id, name, number, "/p")

    def finish(self) -> None:
        if self.requests:
            request_id = self.draw.choice([*self.requests])
            del self.requests[request_id]
            self.engine.adapters.on_request_ended(request_id)

    def change(self) -> None:
        number, weights = self.draw.choice((1, 2)), self.draw.choice((OLD, NEW))
        self.file[number] = weights
        if self.draw.random() < 0.5:
            self.loaded[number] = weights  # As by load_inplace, or by remove and add.

    def evict(self) -> None:
        self.loaded.pop(self.draw.choice((1, 2)), None)

    def step(self) -> None:
        chosen = [name for name in self.requests if self.draw.random() < 0.6]
        number = self.engine.plan(*chosen)
        for request_id in chosen:
            weights = self.adapters[request_id].weights
            if weights is not None:
                self.runs.append(Run(request_id, weights.content_hash, number))
        for request_id in chosen:
            name, adapter = self.requests[request_id]
            self.loaded.setdefault(adapter, self.file[adapter])
            self.computed_by[name][number].add(self.loaded[adapter])
        self.flying.append(FlyingStep(number, dict(self.loaded)))

    def report(self) -> None:
        if not self.flying:
            return
        number, loaded = self.flying.pop(0)
        is_lost = self.draw.random() < 0.03
        self.engine.adapters.on_report(0 if is_lost else number, {} if is_lost else {0: loaded})
        over = [run for run in self.runs if self.draw.random() < 0.7]
        self.runs = [run for run in self.runs if run not in over]
        for request_id, identity, step in over:
            adapter = self.adapters[request_id]
            if adapter.has_computed(identity, step):
                self.commits += 1
                steps = self.computed_by[adapter.blocks.name]
                assert set().union(*(steps[at] for at in steps if at <= step)) == {identity}

    def reset(self) -> None:
        self.engine.adapters.on_cache_emptied()
        self.computed_by.clear()
        self.runs.clear()  # StorePlanner.withdraw_stores


def test_no_order_of_events_names_blocks_after_other_weights() -> None:
    commits = 0
    for seed in range(400):
        truth = Truth(seed)
        events = [truth.step] * 6 + [truth.report] * 7 + [truth.arrive] * 2
        events += [truth.finish, truth.evict, truth.change, truth.reset]
        if seed % 2:
            events += [truth.step, truth.report] * 8  # Changes are rarer.
        for _ in range(120):
            truth.draw.choice(events)()
        commits += truth.commits
    assert commits > 1000
