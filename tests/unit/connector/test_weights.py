"""Which weights the engine's identity names, and what is refused while nobody knows."""

import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybridkv.connector.messages import LoadPlan, StepPlan
from hybridkv.connector.scheduler.weights import STEPS_MAX, WeightsState, WeightsWatch
from hybridkv.connector.worker.copier_factory import MappedArena
from hybridkv.connector.worker.role import WorkerRole
from hybridkv.connector.worker.worker_settings import WorkerSettings
from hybridkv.core.copies import CopyRun, ObjectSpan
from hybridkv.core.packed import SLOT_BYTES
from hybridkv.vllm.weights import EngineWeights, StepLook, WeightsAnswer
from hybridkv.vllm.weights_digest import digest_weights

pytestmark = pytest.mark.engine

SEED = 20261126


def answers_of(
    question: int, *digests: str, era: int = 0, steps: tuple[int, ...] = ()
) -> dict[int, WeightsAnswer]:
    """What all ranks answer; `steps` ran in this era."""
    looks = tuple(StepLook(step, era) for step in steps)
    return {
        rank: WeightsAnswer(question, era, digest, looks) for rank, digest in enumerate(digests)
    }


def test_after_a_reset_all_ranks_are_heard_before_anything_is_offered() -> None:
    watch = WeightsWatch(("a", "b"))
    assert watch.is_current
    watch.on_reset(True)
    assert not watch.is_current
    assert watch.on_answers(answers_of(0, "a", "b")) is None, "an answer to an older question"
    assert not watch.is_current
    assert watch.on_answers({0: WeightsAnswer(1, 0, "a")}) is None
    assert not watch.is_current, "the other rank has not answered"
    watch.on_answers({1: WeightsAnswer(1, 0, "b")})
    assert watch.is_current, "the same weights, and so the same identity"
    watch.on_reset(True)
    for _ in range(2):
        assert watch.on_answers(answers_of(2, "a", "c", era=1)) == ("a", "c")
        assert not watch.is_current, "the daemon does not know yet"
    watch.is_identified = True
    assert watch.on_answers(answers_of(2, "a", "c", era=1)) is None
    assert watch.is_current
    assert watch.identity_digests == ("a", "c")
    assert watch.eras == (1, 1)


def test_what_could_be_read_later_is_of_the_blocks_that_are_there() -> None:
    """The weights are the same; the engine has another name, and goes on with its blocks."""
    watch = WeightsWatch(("random", "b"))
    watch.on_step_planned(1)
    unread = answers_of(0, "random", "b", steps=(1,))
    unread[0] = unread[0]._replace(unread=2, is_reading=True)
    assert watch.on_answers(unread) is None
    assert watch.is_proven(1)
    assert (watch.unread, watch.has_reading_workers) == (2, True)
    read = WeightsAnswer(0, 0, "a", revision=1)
    assert watch.on_answers({0: read}) == ("a", "b")
    watch.is_identified = True
    assert watch.is_current
    assert watch.block_digests == ("a", "b")
    assert (watch.unread, watch.has_reading_workers) == (0, False)
    watch.on_answers({0: WeightsAnswer(0, 1, "c", revision=2), 1: WeightsAnswer(0, 0, "b")})
    assert watch.is_stale, "a later era is of other weights, however often it was read"


def test_weights_that_change_after_a_reset_was_answered() -> None:
    """A trainer resets first, and updates by its own code; nothing was computed between."""
    watch = WeightsWatch(("a",))
    watch.on_step_planned(1)
    watch.on_answers(answers_of(0, "a", steps=(1,)))
    watch.on_reset(True)
    watch.on_answers(answers_of(1, "a"))
    assert watch.is_current, "nothing has changed yet"
    watch.on_step_planned(2, loads_for=watch.eras, computes=False)
    watch.on_step_planned(3)
    watch.on_answers(answers_of(1, "", era=1, steps=(2,)))
    assert not watch.is_current, "what was looked up is of the old weights"
    assert not watch.is_stale, "and was not loaded"
    watch.on_answers(answers_of(1, "", era=1, steps=(3,)))
    assert not watch.is_proven(3)
    assert watch.on_answers(answers_of(1, "b", era=1)) == ("b",)
    watch.is_identified = True
    assert watch.is_proven(3)


@pytest.mark.parametrize("written", ["computed", "loaded"])
def test_blocks_of_other_weights_are_cached_by_nobody(written: str) -> None:
    watch = WeightsWatch(("a",))
    watch.on_step_planned(1, loads_for=(0,), computes=written == "computed")
    assert not watch.is_proven(1), "nobody has said which weights it had"
    watch.on_answers(answers_of(0, "a", steps=(1,)))
    assert watch.is_proven(1)
    watch.on_answers(answers_of(0, "", era=1))
    assert not watch.is_current, "they changed, and are being read"
    watch.on_answers(answers_of(0, "a", era=1))
    assert watch.is_current, "to the same"
    assert watch.on_answers(answers_of(0, "b", era=2)) is None
    assert watch.is_stale
    assert watch.on_answers(answers_of(0, "a", era=3)) is None
    assert watch.is_stale, "steps may have run in between"
    watch.on_reset(False)
    watch.on_answers(answers_of(1, "a", era=3))
    assert watch.is_stale, "blocks were in use, so they are still there"
    watch.on_reset(True)
    assert watch.on_answers(answers_of(2, "b", era=4)) == ("b",)


@pytest.mark.parametrize("eras", [(0, 0), (0, 1), (1, 1), (1, 2)])
def test_two_resets_in_a_row_while_requests_run(eras: tuple[int, int]) -> None:
    """What ran between them is the identity's if the workers saw one weight in all these steps."""
    watch = WeightsWatch(("a",))
    watch.on_step_planned(1)
    watch.on_answers(answers_of(0, "a", steps=(1,)))
    watch.on_reset(False)
    watch.on_step_planned(2)
    watch.on_answers(answers_of(1, "", era=eras[0], steps=(2,)))
    watch.on_reset(False)
    watch.on_step_planned(3)
    assert not watch.is_proven(3)
    watch.on_answers(answers_of(2, "", era=eras[1], steps=(3,)))
    assert watch.on_answers(answers_of(2, "a", era=eras[1])) is None
    is_known = eras[0] == eras[1]
    assert (watch.is_current, watch.is_stale) == (is_known, not is_known)
    watch.on_reset(True)
    watch.on_answers(answers_of(3, "a", era=eras[1]))
    assert watch.is_current, "nothing of what was computed in doubt is left"


@pytest.mark.parametrize(
    ("era", "digest", "is_known"), [(0, "a", True), (1, "a", False), (1, "b", False)]
)
def test_steps_around_which_a_rank_did_not_look(era: int, digest: str, is_known: bool) -> None:
    """As after a fault in a worker: the step is of its neighbours' weights, or of nobody's."""
    watch = WeightsWatch(("a", "c"))
    for number in (1, 2, 3):
        watch.on_step_planned(number)
    watch.on_answers(answers_of(0, "a", "c", steps=(1,)))
    assert watch.is_proven(1)
    assert not watch.is_proven(2)
    look = StepLook(2, 0)
    watch.on_answers({0: WeightsAnswer(0, 0, "a"), 1: WeightsAnswer(0, 0, "c", (look,))})
    assert not watch.is_proven(2)
    watch.on_answers(
        {
            0: WeightsAnswer(0, era, digest, (StepLook(3, era),)),
            1: WeightsAnswer(0, 0, "c", (StepLook(3, 0),)),
        }
    )
    assert watch.is_proven(3) == is_known
    assert watch.is_stale != is_known


def test_weights_that_change_in_a_step_are_nobodys() -> None:
    watch = WeightsWatch(("a",))
    watch.on_step_planned(1)
    watch.on_answers(answers_of(0, "a", steps=(1,)))
    watch.on_step_planned(2)
    watch.on_answers({0: WeightsAnswer(0, 1, "", (StepLook(2, 1),))})
    assert not watch.is_stale, "they are perhaps being read"
    watch.on_answers({0: WeightsAnswer(0, 2, "", (StepLook(3, 2),))})
    assert watch.is_stale


def test_a_repeated_report_changes_nothing() -> None:
    watch = WeightsWatch(("a",))
    old = answers_of(0, "", era=1)
    watch.on_answers(old)
    assert watch.on_answers(answers_of(0, "b", era=1, steps=(1,))) == ("b",)
    watch.is_identified = True
    watch.on_answers(old)
    watch.on_answers(answers_of(0, "a", steps=(1,)))
    assert watch.is_current


def test_steps_that_no_worker_speaks_of_are_forgotten_as_unknown() -> None:
    watch = WeightsWatch(("a",))
    for number in range(1, STEPS_MAX + 1):
        watch.on_step_planned(number)
    assert not watch.is_stale
    watch.on_step_planned(STEPS_MAX + 1)
    assert watch.is_stale


class Model(torch.nn.Module):
    """A model with one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4), requires_grad=False)


class Runner:
    """What vLLM's model runner is to the worker role."""

    def __init__(self, role: Any) -> None:
        self.model, self.role = Model(), role

    def register(self) -> str:
        """As vLLM registers KV caches; returns the digest."""
        self.role.weights = EngineWeights.of_caller()
        digest: str = self.role.weights.read().digest
        return digest

    def update_weights(self, value: float = 0.0) -> None:
        """As vLLM's method, which is followed."""
        if value:
            self.model.weight.data.fill_(value)


class LateSentinel:
    """Its looks arrive when `arrive` is called, as a device's do later than a step begins."""

    def __init__(self, sentinel: Any) -> None:
        self._sentinel, self._late = sentinel, list[LateLook]()
        self.matrices = sentinel.matrices

    def look(self, models: Any) -> "LateLook":
        """Late, of what is seen now."""
        self._late.append(LateLook(self._sentinel.look(models).words_digest()))
        return self._late[-1]

    def arrive(self) -> None:
        """Let all looks arrive that were taken."""
        for look in self._late:
            look.has_arrived = True


@dataclass
class LateLook:
    """A look, as WeightsLook, that says nothing before it has arrived."""

    seen: bytes
    has_arrived: bool = False

    def words_digest(self) -> bytes | None:
        return self.seen if self.has_arrived else None


class SlowWeights(EngineWeights):
    """Weights whose reading takes until `end_reading` is called."""

    def _start_reading(self, reading: Any, previous: Any) -> None:
        """Nothing runs beside the steps."""

    def end_reading(self, unread: str = "") -> None:
        """It has read what is there by now; `unread` stands for it where the time was short."""
        if self.reading is not None and self.reading.found is None:
            found = self._digest(lambda: False)
            if unread and not self.reading.revision:
                found = found._replace(digest=unread, is_late=True)
            self.reading.found = found


@dataclass
class SimulatedObject:
    """What is stored: the weights of the blocks that it is of, and the step that completed it."""

    content: set[str]
    step: int


@dataclass
class SimulatedReport:
    """Of one step, before the scheduler role has it."""

    answer: WeightsAnswer
    written: SimulatedObject | None


class SimulatedEngine:
    """An engine of one rank that knows of each of its blocks which weights computed it."""

    def __init__(self, rng: random.Random, counts: Counter[str]) -> None:
        self._rng, self._counts = rng, counts
        self._runner = Runner(None)
        self._weights = SlowWeights(self._runner)
        self._digests = {self._weights.read().digest}
        self._sentinel = LateSentinel(self._weights.sentinel)
        self._weights.sentinel = self._sentinel  # type: ignore[assignment]
        self._is_late = rng.random() < 0.3
        self._lag = rng.choice((0, 0, 1, 3))
        self._watch = WeightsWatch((self._present(),))
        self._number = 0
        self._blocks = set[str]()
        self._reports = deque[SimulatedReport]()
        self._held: list[SimulatedObject] = []
        self._has_changed = False
        self._read_late: dict[str, str] = {}
        """The weights by the random digest that stood for them."""

    def _present(self) -> str:
        """The digest of the weights that are there now."""
        return digest_weights({"model": self._runner.model}).digest

    def change(self, *, is_followed: bool) -> None:
        """Between two looks the weights change once, by vLLM's own method or by other code."""
        if self._has_changed or self._rng.random() < 0.5:
            return
        self._has_changed, value = True, self._rng.choice((1.0, 2.0))
        if is_followed:
            self._runner.update_weights(value)
        else:
            self._runner.model.weight.data.fill_(value)

    def reset(self, *, is_empty: bool) -> None:
        """Do what SchedulerRole.on_reset does."""
        if is_empty:
            self._blocks.clear()
        self._watch.on_reset(is_empty)
        self._abort()

    def end_reading(self) -> None:
        """Of the weights, beside the steps. The time may be short, and then idle steps go on."""
        unread = self._rng.choice(("", self._rng.randbytes(4).hex()))
        self._read_late[unread] = self._present()
        self._weights.end_reading(unread)

    def step_idle(self) -> None:
        """Report a step that writes nothing."""
        self._number += 1
        self._has_changed = False
        self._weights.begin_step(self._number, self._watch.question, is_idle=True)
        self._arrive()
        self._reports.append(SimulatedReport(self._weights.take_step_answer(), None))
        if len(self._reports) > self._lag:
            self._report(self._reports.popleft())

    def step(self) -> None:
        """Plan, compute and report one step."""
        watch, weights, rng = self._watch, self._weights, self._rng
        self._number += 1
        question, eras = watch.question, watch.eras
        loads, stores = bool(eras) and rng.random() < 0.5, not watch.is_stale
        watch.on_step_planned(self._number, loads_for=eras if loads else ())
        if rng.random() < 0.95:
            self._has_changed = False
            weights.begin_step(self._number, question)
        else:
            self._counts["unseen"] += 1
        if not self._is_late:
            self._arrive()
        is_known = bool(weights.digest) and weights.question == question
        agrees = is_known and eras == (weights.era,)
        begun = weights.era
        content = {self._present()}
        if rng.random() < 0.05:
            self.change(is_followed=False)
            content.add(self._present())
        is_stored = stores and (agrees or (weights.question == question and not eras))
        if is_stored:
            self._has_changed = False
            weights.computed()
        self._arrive()
        weights.compare()
        if loads and agrees and weights.era == begun:
            self._counts["loaded"] += 1
            assert self._blocks <= self._identified(), "a block that is loaded here would be a lie"
        self._blocks |= content
        written = SimulatedObject(set(self._blocks), self._number) if is_stored else None
        self._reports.append(SimulatedReport(weights.take_step_answer(), written))
        if len(self._reports) > self._lag:
            self._report(self._reports.popleft())

    def _arrive(self) -> None:
        self._sentinel.arrive()
        self._weights.compare()

    def _report(self, report: SimulatedReport) -> None:
        """Do what SchedulerRole.on_report does with the weights."""
        watch, was_stale = self._watch, self._watch.is_stale
        is_other = watch.on_answers({0: report.answer}) is not None
        # The hook that tells the daemon of it may fail.
        watch.is_identified = watch.is_identified or self._rng.random() < 0.8
        self._held += [report.written] if report.written else []
        self._counts["revised"] += is_other and report.answer.revision > 0
        if is_other or (watch.is_stale and not was_stale):
            self._counts["renamed" if is_other else "stale"] += 1
            self._abort()
        proven = [stored for stored in self._held if watch.is_proven(stored.step)]
        self._held = [stored for stored in self._held if not watch.is_proven(stored.step)]
        self._counts["held"] += len(self._held)
        self._counts["committed"] += len(proven)
        assert watch.is_identified or not proven
        self._counts[f"state_{watch.state.name}"] += 1
        assert all(stored.content == self._identified() for stored in proven), "a lie"

    def _identified(self) -> set[str]:
        """The weights that the identity names."""
        (digest,) = self._watch.identity_digests
        return {self._read_late.get(digest, digest)}

    def _abort(self) -> None:
        """Nothing that is being written, or was, is committed."""
        written = [report for report in self._reports if report.written is not None]
        self._counts["aborted"] += len(self._held) + len(written)
        self._held = []
        for report in written:
            report.written = None


def test_no_order_of_events_names_blocks_after_other_weights() -> None:
    print(f"seed {SEED}")
    rng, counts = random.Random(SEED), Counter[str]()
    for _ in range(400):
        engine = SimulatedEngine(rng, counts)
        events: list[Callable[[], None]] = [
            *[engine.step] * 6,
            *[engine.end_reading] * 4,
            *[engine.step_idle] * 6,
            partial(engine.change, is_followed=True),
            partial(engine.change, is_followed=False),
            *[partial(engine.reset, is_empty=True)] * 2,
            partial(engine.reset, is_empty=False),
        ]
        for _ in range(rng.randrange(2, 60)):
            rng.choice(events)()
    print(dict(counts))
    assert all(counts.pop(f"state_{state.name}") > 10 for state in WeightsState)
    assert min(counts.values()) > 50


class Copier:
    """A copier that copies nothing and succeeds at once."""

    def store(self, ops: Any, done: Any) -> None:
        for op in ops:
            done(op, True)

    def load(self, ops: Any, done: Any) -> None:
        done(None)

    def close(self) -> None:
        """Free nothing: there is nothing to free."""


def worker_role() -> Any:
    """A worker that has mapped the arena of the daemon's life "b"."""
    config: Any = SimpleNamespace(kv_cache_groups=[], prefix_cacheable_group_ids=[])
    settings = WorkerSettings("/nowhere/daemon.sock", "e", rank=0, ranks=1, checksum="on")
    role: Any = WorkerRole(config, settings)
    arena: Any = None
    role.mapped["b"], role.boot = MappedArena(arena, Copier()), "b"
    return role


def test_a_worker_does_nothing_for_other_weights() -> None:
    """A plan that was made before a change is carried out after it: its loads and stores fail."""
    role = worker_role()
    runner = Runner(role)
    digest = runner.register()
    weights = runner.model.weight.data

    def step(number: int, question: int, *eras: int, update: bool = False) -> tuple[bool, bool]:
        """Whether a load and a store went well; `update`: the step's end finds other weights."""
        run = CopyRun(ObjectSpan(0, 0, 1, (1,)), bytes(SLOT_BYTES))
        plan = StepPlan(boot="b", session=1, loads={"r": LoadPlan("b", ())}, stores={number: run})
        plan.number, plan.question, plan.eras = number, question, eras
        role.start_loads(plan)
        if update:
            weights.neg_()
        role.start_stores(plan)
        finished, failed = role.take_finished()
        report = role.take_step_report()
        answers.append(report.weights[0])
        assert finished == {"r"}
        assert report.done == {number: {0}}
        return not failed, not report.unstored

    def idle(number: int, question: int) -> None:
        """Steps until the weights are read."""
        for at in (number, number + 1):
            role.start_loads(StepPlan(number=at, question=question, is_idle=True))
            if role.weights.reading.thread is not None:
                role.weights.reading.thread.join()
            answers.append(role.take_step_report().weights[0])

    answers: list[WeightsAnswer] = []
    assert step(1, 0, 0) == (True, True)
    assert answers[-1] == WeightsAnswer(0, 0, digest, (StepLook(1, 0),))
    assert step(2, 0, 7) == (False, False), "a plan for other weights"
    assert step(3, 0) == (False, True), "the scheduler role commits once it knows them"
    weights.neg_()
    assert step(4, 0, 0) == (False, False), "nobody but the sentinel has seen the update"
    assert answers[-1].steps == (StepLook(4, 1),)
    weights.neg_()
    runner.update_weights()
    assert role.take_step_report().weights == {0: WeightsAnswer(0, 1, "")}
    idle(5, 0)
    assert answers[-1][:3] == (0, 2, digest), "they are the old ones again"
    assert step(7, 0, 2) == (True, True)
    assert step(8, 0, 0) == (False, False), "a plan from before the change"
    idle(9, 1)
    assert step(11, 0, 2) == (False, False), "an older question"
    assert step(12, 1, 2, update=True) == (False, True)
    assert answers[-1] == WeightsAnswer(1, 3, "", (StepLook(12, 3),)), "in an era of its own"
    role.start_loads(StepPlan(number=13, question=1))
    assert role.take_step_report().weights[0][1:4] == (4, "", (StepLook(13, 4),))
    role.close()


def test_a_load_that_began_before_the_weights_changed_fails() -> None:
    """On a device what a look saw arrives later than the step begins."""
    role = worker_role()
    runner = Runner(role)
    runner.register()
    sentinel = LateSentinel(role.weights.sentinel)
    role.weights.sentinel = sentinel
    for number, update in ((1, False), (2, True)):
        if update:
            runner.model.weight.data.neg_()
        plan = StepPlan(boot="b", session=1, loads={"r": LoadPlan("b", ())})
        plan.number, plan.eras = number, (0,)
        role.start_loads(plan)
        assert role.take_finished() == (set(), set()), "nobody knows yet which weights it was for"
        assert role.take_step_report().weights[0].steps == ()
        sentinel.arrive()
        assert role.take_step_report().weights[0].steps == (StepLook(number, number - 1),)
        assert role.take_finished() == ({"r"}, {"r"} if update else set())
    role.close()
