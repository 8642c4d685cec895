"""MultiConnector on vLLM's scheduler, with children that are late, raise, fail or repeat."""

import random
from collections import Counter
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.chance import examples

pytestmark = pytest.mark.engine

pytest.importorskip("vllm")

from vllm.distributed.kv_transfer.kv_connector.v1 import multi_connector  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole  # noqa: E402
from vllm.v1.outputs import KVConnectorOutput  # noqa: E402

from hybridkv.core.errors import ConfigError  # noqa: E402
from hybridkv.core.speed import PrefillSpeed  # noqa: E402
from hybridkv.multi import scheduler  # noqa: E402
from hybridkv.multi.children import HOOK_SECONDS_MAX, ChildState, child_specs  # noqa: E402
from hybridkv.multi.metrics import (  # noqa: E402
    LOADS_FAILED,
    LOADS_GIVEN_UP,
    REPORTS_ABSORBED,
    SYNC_DECLINED,
    of_child,
)
from hybridkv.multi.ranking import GRACE_SECONDS, WaitTimes  # noqa: E402
from hybridkv.multi.scheduler import MultiScheduler  # noqa: E402
from hybridkv.multi.stats import OWN, OwnStats  # noqa: E402
from hybridkv.multi.worker import MultiWorker  # noqa: E402
from hybridkv.vllm.hook_guard import (  # noqa: E402
    FAULTS_MAX,
    PAUSE_SECONDS,
    QUARANTINED,
    SLOW_HOOKS,
    SLOW_MAX,
    HookGuard,
    fault,
)
from tests.unit.multi.multiengine import (  # noqa: E402
    BLOCK,
    ENGINE_ID,
    HIT,
    MultiEngine,
    child,
    connector,
    hybrid,
    multi_config,
    prompt,
    single,
    upto,
)
from tests.unit.multi.scripted import Plan, Script, ScriptedError  # noqa: E402

MOST = 512


def calls_of(script: Script, hook: str) -> list[tuple[Any, ...]]:
    """The arguments of each call of a child's hook, as the script notes them."""
    return [seen[1:] for seen in script.seen if seen[0] == hook]


@pytest.fixture
def brief_settling(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that is off has 0.2 s to end its transfers."""
    monkeypatch.setattr(scheduler, "SETTLE_SECONDS", 0.2)


def first_state(engine: MultiEngine) -> ChildState:
    """The state of the first child in the scheduler role."""
    state: ChildState = engine.connector.children.all[0].state
    return state


# The choice


class Choice(NamedTuple):
    """A choice between children: "wait", "load" or "compute", from which child, how much."""

    kind: str
    child: int | None = None
    tokens: int = 0

    @property
    def reply(self) -> tuple[int | None, bool]:
        """What `get_num_new_matched_tokens` returns for it."""
        return (None, False) if self.kind == "wait" else (self.tokens, self.kind == "load")


def scored(
    answers: list[Any], weights: list[float], most: int, *, times: WaitTimes, awaited: list[bool]
) -> Choice:
    """The choice by brute force.

    `awaited`: which children were not late so often that their breakers are open.
    """
    offers = [
        (-tokens * weights[i], i, tokens)
        for i, tokens in enumerate(answers)
        if isinstance(tokens, int) and tokens
    ]
    looking = [i for i, tokens in enumerate(answers) if tokens is None and awaited[i]]
    if not offers:
        is_early = times.asked_seconds < times.patience_seconds
        return Choice("wait" if looking and is_early else "compute")
    score, chosen, tokens = min(offers)
    can_be_beaten = any(most * weights[i] > -score for i in looking)
    if can_be_beaten and times.hit_seconds < GRACE_SECONDS:
        return Choice("wait")
    return Choice("load", chosen, tokens)


def answered(answer: Any, request: Any, local: int) -> Any:
    return answer


ANSWERS = st.one_of(
    st.none(), st.just("raise"), st.integers(0, MOST // BLOCK).map(lambda blocks: blocks * BLOCK)
)
CASES = st.integers(1, 4).flatmap(
    lambda children: st.tuples(
        st.lists(st.sampled_from([0.1, 0.5, 1, 2.5, 2]), min_size=children, max_size=children),
        st.lists(
            st.tuples(
                st.sampled_from([0.0, 0.004, 0.3, 1.2]),
                st.lists(ANSWERS, min_size=children, max_size=children),
                st.booleans(),
            ),
            min_size=1,
            max_size=8,
        ),
    )
)


@settings(max_examples=examples(150))
@example(([1.0, 1.0], [(0.0, [None, None], True)] * 3 + [(0.0, [None, 16], True)]))
@given(CASES)
def test_the_choice_is_that_of_a_brute_force_scorer(
    case: tuple[list[float], list[tuple[float, list[Any], bool]]],
) -> None:
    """Late, undecided, tied and raising children are asked until there is a decision and room.

    Then the request is preempted and asked about once more: the choice begins anew.
    """
    weights, asks = case
    scripts = [Script() for _ in weights]
    entries = [
        child(script, load_weight=weight) for script, weight in zip(scripts, weights, strict=True)
    ]
    config = multi_config(entries, hybrid())
    multi = connector(config, hybrid(), KVConnectorRole.SCHEDULER)
    now = 50.0
    multi.part.clock = lambda: now
    request = SimpleNamespace(
        request_id="r", num_tokens=MOST + BLOCK, num_prompt_tokens=MOST + BLOCK, num_preemptions=0
    )
    multi.on_new_request(request)
    assert all(script.calls["on_new_request"] == 1 for script in scripts)
    first, hit, is_new, awaited = now, None, True, [True] * len(weights)
    for pause, answers, has_blocks in asks:
        now += pause
        if is_new:
            first, hit, is_new = now, None, False
            awaited = [child.breaker.allows(now) for child in multi.children.all]
        for script, answer in zip(scripts, answers, strict=True):
            script.raises = {"get_num_new_matched_tokens"} if answer == "raise" else set()
            script.tokens = partial(answered, answer)
        result = multi.get_num_new_matched_tokens(request, 0)
        clean = [0 if answer == "raise" else answer for answer in answers]
        hit = now if hit is None and any(clean) else hit
        times = WaitTimes(
            patience_seconds=2.0 + 0.1 * (MOST + BLOCK) / 1024,  # What computing is taken to cost.
            asked_seconds=now - first,
            hit_seconds=0.0 if hit is None else now - hit,
        )
        choice = scored(clean, weights, MOST + BLOCK, times=times, awaited=awaited)
        assert result == choice.reply
        if choice.kind == "wait" or not has_blocks:
            continue
        is_new = True
        for script in scripts:
            script.seen.clear()
        multi.update_state_after_alloc(request, SimpleNamespace(blocks=([], [], [])), choice.tokens)
        for index, script in enumerate(scripts):
            expected = choice.tokens if index == choice.child else 0
            assert calls_of(script, "update_state_after_alloc") == [("r", expected)], (
                "losers let go, undecided ones too"
            )
    multi.request_finished_all_groups(request, ([], [], []))
    assert not multi.part.requests


def test_a_late_child_is_waited_for_while_nobody_has_a_hit(rng: random.Random) -> None:
    """The fast one has nothing; a slow one would never load if that were the answer of both."""
    slow = Script(
        tokens=lambda request, local: (
            None if slow.calls["get_num_new_matched_tokens"] < 9 else HIT - local
        )
    )
    fast = Script()
    engine = MultiEngine([child(fast), child(slow)], hybrid())
    engine.serve(prompt(rng))
    assert engine.selection("Scripted-2")["hit_tokens"] == HIT
    assert engine.selection("Scripted")["misses"] == 1
    assert slow.calls["get_num_new_matched_tokens"] == 9, "asked in every step"


def test_a_child_that_never_answers_is_left_alone(
    rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three requests wait for it in vain, up to their patience; then none does, but for a probe."""
    monkeypatch.setattr(PrefillSpeed, "prefill_seconds", lambda *_: 0.1)
    never = Script(tokens=lambda request, local: None)
    engine = MultiEngine([child(never), child(Script())], hybrid())
    steps = []
    for _ in range(6):
        engine.add(prompt(rng))
        before = engine.steps
        engine.run()
        steps.append(engine.steps - before)
    assert min(steps[:3]) > 10
    assert max(steps[3:]) < 10, steps
    assert calls_of(never, "update_state_after_alloc").count(("r1", 0)) == 1, (
        "it was told to let go"
    )


def test_nobody_waits_longer_than_computing_takes(rng: random.Random) -> None:
    """For a child that looks while the other has nothing: at first 2 s, then by measurement."""
    never = Script(tokens=lambda request, local: None)
    engine = MultiEngine([child(never), child(Script())], hybrid())
    waited = []
    for _ in range(2):
        engine.add(prompt(rng))
        before = engine.steps
        engine.run()
        waited.append(engine.steps - before)
    assert waited[0] > 200, "of 10 ms each; how long computing takes is not known"
    assert waited[1] <= 8, "it computes 200 tokens in a step"


def test_weights_and_measured_speed(rng: random.Random) -> None:
    """A child with twice the tokens and a fifth of the speed loses, once its speed is known."""
    fast, slow = Script(tokens=upto(HIT)), Script(tokens=upto(2 * HIT), load_steps=50)
    engine = MultiEngine(
        [child(slow, load_weight="auto"), child(fast, load_weight="auto")], hybrid()
    )
    for _ in range(4):
        engine.serve(prompt(rng, 300))
        fast.tokens = upto(HIT)
        slow.tokens = upto(2 * HIT) if engine.selection("Scripted-2")["hits"] else upto(0)
    assert engine.selection("Scripted-2")["hits"] == 3
    assert engine.selection("Scripted")["hits"] == 1, "asked for its speed, once"


# Failures


@pytest.mark.parametrize("layout", [single, hybrid])
def test_a_failed_load_is_not_offered_again_but_another_childs_hit_is(
    layout: Any, rng: random.Random
) -> None:
    bad, good = Script(tokens=upto(2 * HIT), fails=True), Script(tokens=upto(HIT))
    engine = MultiEngine([child(bad), child(good)], layout(), ranks=2)
    engine.serve(prompt(rng, 300))
    assert [tokens for _, tokens in calls_of(bad, "update_state_after_alloc")] == [2 * HIT, 0, 0]
    assert engine.selection("Scripted-2")["hit_tokens"] == HIT
    assert engine.connector.counters[of_child("", LOADS_FAILED)] == 1


SCHEDULER_HOOKS = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished_all_groups",
    "take_events",
    "has_pending_push_work",
    "get_external_cache_hit_sources",
    "get_loaded_kv_cache_group_ids",
    "get_kv_connector_stats",
    "reset_cache",
    "has_pending_block_frees",
)
WORKER_HOOKS = (
    "bind_connector_metadata",
    "handle_preemptions",
    "start_load_kv",
    "wait_for_layer_load",
    "save_kv_layer",
    "wait_for_save",
    "get_transfer_results",
    "get_block_ids_with_load_errors",
    "build_connector_worker_meta",
)


def test_every_hook_of_a_role_is_written_in_the_connector() -> None:
    """And nothing else of a role is: vLLM would call its own MultiConnector's, or a helper."""
    from hybridkv.connector import MultiConnector

    written = {name for name in vars(MultiConnector) if not name.startswith("_")}
    for role in (MultiScheduler, MultiWorker):
        public = {name for name in vars(role) if not name.startswith("_")}
        hooks = {name for name in public if hasattr(multi_connector.MultiConnector, name)}
        assert hooks
        assert hooks <= written
        assert not (public - hooks) & written


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize("hook", [*SCHEDULER_HOOKS, *WORKER_HOOKS])
@pytest.mark.usefixtures("brief_settling")
def test_a_raising_child_ends_nothing(hook: str, is_async: bool, rng: random.Random) -> None:
    """In the middle of its loads, in either role, on both ranks: every request gets its answer."""
    bad, good = (
        Script(tokens=upto(2 * HIT), load_steps=3, holds=True),
        Script(tokens=upto(HIT), load_steps=1),
    )
    bad.is_async = is_async
    layout = hybrid() if is_async else single()
    engine = MultiEngine([child(bad), child(good)], layout, ranks=2, blocks=120)
    for _ in range(4):
        engine.add(prompt(rng, 300))
    engine.step()
    bad.raises = {hook}
    engine.step()
    for _ in range(4):
        engine.add(prompt(rng, 300))
    engine.scheduler.reset_connector_cache()
    for _ in range(30):
        engine.step()
    engine.run()
    counters = engine.connector.counters
    supervised = hook.replace("get_block_ids_with_load_errors", "get_transfer_results")
    assert of_child("Scripted", fault(supervised)) in counters or not bad.calls[hook], counters
    bad.raises = set()
    last = engine.add(prompt(rng, 300))
    engine.run()
    assert last.num_output_tokens == 3
    assert (
        sum(engine.selection(name)["hit_tokens"] for name in ("Scripted", "Scripted-2"))
        == engine.totals["hits"]
    )
    asks = Counter(name for (name,) in calls_of(bad, "get_num_new_matched_tokens"))
    off = not engine.connector.children.all[0].guard.is_on
    assert ("r9" not in asks) == off, "who is switched off is not asked"
    assert engine.selection("Scripted-2")["hit_tokens"] >= HIT * off
    quarantined = of_child("Scripted", QUARANTINED)
    told = any(quarantined in OwnStats(payload.get(OWN)).counters for payload in engine.payloads)
    assert told == off, "/metrics tells who is switched off"


def test_a_child_that_faults_too_often_is_asked_again_after_a_pause(rng: random.Random) -> None:
    """Meanwhile it hears of every request and every step, so that it misses nothing."""
    bad = Script(tokens=upto(HIT), raises={"get_num_new_matched_tokens"})
    engine = MultiEngine([child(bad)], hybrid())
    first = engine.connector.children.all[0]
    first.guard = HookGuard("first", clock=lambda: engine.now)
    while first.guard.is_on:
        engine.serve(prompt(rng))
    bad.raises = set()
    calls_before = {hook: bad.calls[hook] for hook in ("on_new_request", "build_connector_meta")}
    assert first.is_alive
    assert first_state(engine) is ChildState.PAUSED
    for hits in (0, 1):
        engine.serve(prompt(rng))
        assert engine.selection("Scripted")["hits"] == hits
        assert all(bad.calls[hook] > count for hook, count in calls_before.items())
        engine.now += PAUSE_SECONDS
        engine.step()
    assert first_state(engine) is ChildState.SERVING
    faults = of_child("Scripted", fault("get_num_new_matched_tokens"))
    assert not engine.connector.counters[faults] % FAULTS_MAX


def test_a_child_whose_lookups_keep_the_engine_is_asked_twice(rng: random.Random) -> None:
    """As LMCache's are after the end of its server; the other child serves on."""

    def wait(request: Any, local: int) -> int:
        engine.now += 2.0
        return 0

    slow, quick = Script(tokens=wait), Script(tokens=upto(HIT))
    engine = MultiEngine([child(slow, name="Slow"), child(quick)], hybrid())
    for each in engine.connector.children.all:
        each.guard = HookGuard(each.name, clock=lambda: engine.now, slow_seconds=HOOK_SECONDS_MAX)
    for _ in range(5):
        engine.serve(prompt(rng))
    assert slow.calls["get_num_new_matched_tokens"] == SLOW_MAX
    assert engine.selection("Scripted")["hits"] == 5
    assert engine.connector.counters[of_child("Slow", SLOW_HOOKS)] == SLOW_MAX


@pytest.mark.usefixtures("brief_settling")
def test_a_worker_that_lost_its_child_makes_it_known(rng: random.Random) -> None:
    """On one of two ranks: it loads nothing more, and its load does not wait for ever."""
    bad = Script(tokens=upto(HIT), load_steps=10_000)
    engine = MultiEngine([child(bad)], hybrid(), ranks=2)
    engine.add(prompt(rng))
    engine.step()
    engine.workers[1].children.all[0].guard.switch_off_side("the test says so")
    engine.step()
    assert not engine.connector.children.all[0].is_alive
    assert engine.scheduler.requests["r1"].num_computed_tokens, (
        "its blocks are not the engine's yet"
    )
    before = engine.now
    engine.run()
    assert engine.now - before >= 0.2
    assert engine.connector.counters[of_child("", LOADS_GIVEN_UP)] == 1


def test_a_load_that_no_worker_was_told_of_fails_at_once(rng: random.Random) -> None:
    """Nobody writes into its blocks, so there is nothing to wait for."""
    bad = Script(tokens=upto(HIT), raises={"build_connector_meta"})
    engine = MultiEngine([child(bad)], hybrid(), ranks=2)
    engine.add(prompt(rng))
    engine.run(10)
    assert engine.connector.counters[of_child("", LOADS_GIVEN_UP)] == 1


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.usefixtures("brief_settling")
def test_blocks_that_a_dead_child_holds_come_back(rank: int, rng: random.Random) -> None:
    """Not before its copies had time to end."""
    holder = Script(holds=True, hold_steps=10_000)
    engine = MultiEngine([child(holder), child(Script(holds=True))], hybrid(), ranks=2)
    engine.add(prompt(rng))
    while engine.scheduler.get_num_unfinished_requests():
        engine.step()
    engine.step()
    engine.workers[rank].children.all[0].guard.switch_off_side("the test says so")
    engine.step()
    before = engine.now
    assert engine.scheduler.requests
    assert first_state(engine) is ChildState.OFF
    engine.run()
    assert engine.now - before >= 0.15
    assert first_state(engine) is ChildState.SILENT


@pytest.mark.parametrize("layout", [single, hybrid])
def test_reports_of_blocks_fail_the_request_and_end_nothing(
    layout: Any, rng: random.Random
) -> None:
    """With several groups vLLM would end; with one, it computes from the first bad block on."""
    bad = Script(tokens=upto(HIT), load_steps=1)
    engine = MultiEngine([child(bad)], layout())
    engine.add(prompt(rng))
    engine.step()
    bad.bad_blocks = {engine.scheduler.kv_cache_manager.get_block_ids("r1")[-1][0]}
    engine.run()
    assert ("r1", HIT) in calls_of(bad, "update_state_after_alloc")
    assert engine.selection("Scripted")["hits"] == 1, "not offered again"
    assert engine.connector.counters[of_child("", LOADS_FAILED)] == (layout is hybrid)


LOADING = (
    "update_state_after_alloc",
    "build_connector_meta",
    "bind_connector_metadata",
    "start_load_kv",
)


@pytest.mark.parametrize("hook", [*LOADING, "wait_for_layer_load"])
def test_what_was_not_loaded_within_the_step_is_computed(hook: str, rng: random.Random) -> None:
    """The engine takes the blocks for loaded; vLLM hears that they are not, and of no others."""
    engine = MultiEngine([child(Script(tokens=upto(HIT), is_async=False, raises={hook}))], single())
    engine.add(prompt(rng))
    engine.step()
    ((table,), loaded) = engine.scheduler.kv_cache_manager.get_block_ids("r1"), HIT // BLOCK
    assert engine.invalid == set(table[:loaded])
    engine.run()
    assert len(engine.invalid) == loaded


def test_a_synchronous_hit_is_declined_where_it_could_not_fail(rng: random.Random) -> None:
    sync = Script(tokens=upto(HIT), is_async=False)
    engine = MultiEngine([child(sync)], hybrid())
    engine.serve(prompt(rng))
    assert engine.connector.counters[of_child("Scripted", SYNC_DECLINED)] == 1
    engine = MultiEngine([child(sync)], single())
    engine.serve(prompt(rng))
    assert engine.selection("Scripted")["hit_tokens"] == HIT


@pytest.mark.parametrize("tokens", [-16, 201, 10_000])
def test_an_impossible_answer_is_a_miss(tokens: int, rng: random.Random) -> None:
    """vLLM would end in an assertion, or count tokens below 0 (requirements B30)."""
    engine = MultiEngine([child(Script(tokens=lambda request, local: tokens))], hybrid())
    engine.serve(prompt(rng))
    assert engine.totals["hits"] == 0


# Completions


def test_everything_is_reported_once(rng: random.Random) -> None:
    """Two children hold the blocks and repeat all reports; one reports what it did not load."""
    loader = Script(tokens=upto(HIT), repeats=2, holds=True, load_steps=1)
    holder = Script(repeats=3, holds=True)
    engine = MultiEngine([child(loader), child(holder)], hybrid(), ranks=2)
    for worker in engine.workers:
        worker.children.all[1].connector.loading["r1"] = 0
    for _ in range(3):
        engine.add(prompt(rng))
    engine.run()
    for _ in range(3):
        engine.step()
    assert engine.connector.counters[of_child("", REPORTS_ABSORBED)] > 8
    assert engine.selection("Scripted")["hits"] == 3


@pytest.mark.parametrize(("load_steps", "hold_steps"), [(5, 0), (1, 5), (3, 2), (2, 3), (3, 3)])
def test_aborted_while_loading(load_steps: int, hold_steps: int, rng: random.Random) -> None:
    """Another child holds the blocks: vLLM frees them at the first report and ends at a second."""
    from vllm.v1.request import RequestStatus

    loads, holds = (
        Script(tokens=upto(HIT), load_steps=load_steps),
        Script(holds=True, hold_steps=hold_steps),
    )
    engine = MultiEngine([child(loads), child(holds)], hybrid())
    engine.add(prompt(rng))
    engine.step()
    engine.scheduler.finish_requests("r1", RequestStatus.FINISHED_ABORTED)
    engine.run()
    for _ in range(10):
        engine.step()
    part = engine.connector.part
    assert not any([part.loads, part.saves, part.requests, len(part.room)])


def test_reports_of_what_nobody_waits_for_do_not_reach_the_engine() -> None:
    """Which would end: it looks the request up."""
    engine = MultiEngine([child(Script())], hybrid())
    output = KVConnectorOutput(
        finished_recving={"ghost"}, failed_recving=set(), finished_sending={"ghost"}
    )
    engine.scheduler._update_from_kv_xfer_finished(output)
    assert engine.connector.counters[of_child("", REPORTS_ABSORBED)] == 2


def test_preempted_requests_choose_again(rng: random.Random) -> None:
    """The pool is too small; like vLLM's, the totals leave out requests that come back."""
    steady, erratic = Script(tokens=upto(HIT)), Script()
    erratic.tokens = lambda request, local: rng.choice([None, 0, max(0, HIT + BLOCK - local)])
    engine = MultiEngine([child(steady), child(erratic)], single(), blocks=26)
    requests = [engine.add(prompt(rng, 150), max_tokens=60) for _ in range(6)]
    engine.run(3000)
    assert sum(request.num_preemptions for request in requests)
    hits = sum(engine.selection(name)["hit_tokens"] for name in ("Scripted", "Scripted-2"))
    assert hits == engine.totals["hits"] > 0


def test_both_signatures_of_handle_preemptions(rng: random.Random) -> None:
    scripts = [Script(), Script()]
    config = multi_config([child(script) for script in scripts], hybrid())
    worker = connector(config, hybrid(), KVConnectorRole.WORKER)
    scheduler = connector(config, hybrid(), KVConnectorRole.SCHEDULER)
    worker.handle_preemptions({"a", "b"})
    assert [calls_of(script, "handle_preemptions") for script in scripts] == [[(set,)]] * 2
    idle = SimpleNamespace(num_scheduled_tokens={}, total_num_scheduled_tokens=0)
    worker.handle_preemptions(scheduler.build_connector_meta(idle))
    assert [calls_of(script, "handle_preemptions")[-1] for script in scripts] == [(Plan,)] * 2
    scripts[0].raises = {"handle_preemptions"}
    worker.handle_preemptions(object())
    worker.handle_preemptions(None)
    assert worker.children.all[0].is_alive, "what it could not read was not its own"
    assert scripts[1].calls["handle_preemptions"] == 4


# Start-up


def test_children_see_their_own_configuration(rng: random.Random) -> None:
    scripts = [Script(), Script(), Script()]
    entries = [
        child(scripts[0], load_weight=2, mine=1),
        child(scripts[1], name="fast", load_weight="auto", mine=2),
        {**child(scripts[2], mine=3), "engine_id": "another", "kv_port": 99},
    ]
    keys = [entry["kv_connector_extra_config"]["script"] for entry in entries]
    engine = MultiEngine(entries, hybrid(), ranks=2)
    assert [script.extra for script in scripts] == [
        {"script": key, "mine": n + 1} for n, key in enumerate(keys)
    ]
    assert [script.engine_ids for script in scripts] == [
        {ENGINE_ID},
        {f"{ENGINE_ID}-2"},
        {"another"},
    ]
    specs = child_specs(engine.scheduler.vllm_config)
    assert [(spec.name, spec.weight) for spec in specs] == [
        ("Scripted", 2.0),
        ("fast", 0.0),
        ("Scripted-2", 1.0),
    ]
    assert specs[2].config.kv_transfer_config.kv_port == 99
    assert {spec.config.kv_transfer_config.kv_load_failure_policy for spec in specs} == {
        "recompute"
    }
    for key, script in zip(keys, scripts, strict=True):
        ((handshakes,),) = calls_of(script, "set_xfer_handshake_metadata")
        assert [(rank, shake.script) for rank, shake in handshakes] == [(0, key), (1, key)]


def test_engine_ids_differ_between_engines_and_children() -> None:
    """vLLM names data-parallel engines so; a daemon takes workers of one id for one engine's."""
    own = {**child(Script()), "engine_id": "mine"}
    config = multi_config([own, child(Script()), child(Script())], hybrid())
    config.kv_transfer_config.engine_id = "e_dp3"
    ids = [spec.config.kv_transfer_config.engine_id for spec in child_specs(config)]
    assert ids == ["mine_dp3", "e_dp3", "e_dp3-2"]
    config = multi_config([own, own], hybrid())
    with pytest.raises(ConfigError, match="engine_id='mine' is that of another child"):
        child_specs(config)


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"load_weight": 0}, "load_weight=0 must be a number above 0"),
        ({"load_weight": True}, "load_weight=True must be a number"),
        ({"load_weight": "much"}, 'or "auto"; 1.0 works'),
        ({"name": "__own__"}, "name='__own__'"),
        ({"sub_block_hits": True}, "sub_block_hits is not proven with several connectors"),
        ({"sub_block_hits": "auto"}, "sub_block_hits is not proven with several connectors"),
    ],
)
def test_what_a_child_cannot_have(extra: dict[str, Any], says: str) -> None:
    config = multi_config([child(Script(), **extra)], hybrid())
    with pytest.raises(ConfigError, match=says):
        connector(config, hybrid(), KVConnectorRole.SCHEDULER)


def test_a_key_of_multiconnector_that_it_does_not_know() -> None:
    config = multi_config([child(Script())], hybrid(), grace_ms=3)
    with pytest.raises(ConfigError, match="unknown key 'grace_ms' of MultiConnector"):
        connector(config, hybrid(), KVConnectorRole.SCHEDULER)


def test_children_without_hma_are_named() -> None:
    """vLLM's factory names nobody, but asks for the layout before it makes a connector."""
    from hybridkv.connector import MultiConnector

    config = multi_config(
        [child(Script()), child(Script(), "Plain"), child(Script(), "Plain", name="old")], hybrid()
    )
    says = (
        r"^MultiConnector has HMA enabled but these child connectors do not support it: "
        r"Plain, old\. Either use --disable-hybrid-kv-cache-manager or replace the "
        r"non-HMA connectors\.$"
    )
    with pytest.raises(TypeError, match=says):
        MultiConnector.get_required_kvcache_layout(config)
    with pytest.raises(TypeError, match=says):
        MultiConnector(
            config, KVConnectorRole.SCHEDULER, hybrid().config(config, 100, worker=False)
        )
    config.scheduler_config.disable_hybrid_kv_cache_manager = True
    assert MultiConnector.get_required_kvcache_layout(config) is None
    assert connector(config, single(), KVConnectorRole.SCHEDULER).sub_connectors[1].script


def test_shutdown_reaches_all(rng: random.Random) -> None:
    scripts = [Script(raises={"shutdown"}), Script()]
    engine = MultiEngine([child(script) for script in scripts], hybrid())
    engine.connector.shutdown()
    assert [script.calls["shutdown"] for script in scripts] == [1, 1]
    with pytest.raises(ScriptedError):
        engine.connector.sub_connectors[0].shutdown()
