"""Nothing raises into the engine, and a side that is switched off still tells of it."""

from collections.abc import Callable

from hybridkv.vllm.hook_guard import (
    FAULTS_MAX,
    FAULTS_SECONDS,
    PAUSE_SECONDS,
    PAUSE_SECONDS_MAX,
    QUARANTINED,
    RESUMED,
    SLOW_HOOKS,
    SWITCHED_OFF,
    HookGuard,
    fault,
)


def raise_error() -> int:
    raise ValueError("a fault")


def test_a_side_that_is_switched_off_tells_people_until_that_fails_too() -> None:
    guard = HookGuard("scheduler")
    for _ in range(FAULTS_MAX):
        assert guard.is_on
        assert guard.run_hook("arrive", raise_error, lambda: 7) == 7
    assert not guard.is_on
    assert guard.run_hook("arrive", lambda: 1, lambda: 7) == 7
    assert guard.counters[SWITCHED_OFF] == 1
    assert guard.run_hook("tell", lambda: 1, lambda: 7, shows_counters=True) == 1
    assert guard.run_hook("tell", raise_error, lambda: 7, shows_counters=True) == 7
    assert guard.run_hook("tell", lambda: 1, lambda: 7, shows_counters=True) == 7, "once is enough"
    assert guard.counters == {
        fault("arrive"): FAULTS_MAX,
        fault("tell"): 1,
        SWITCHED_OFF: 2,
        QUARANTINED: 1,
    }


def test_faults_count_per_time_and_not_per_life() -> None:
    now = 0.0
    guard = HookGuard("scheduler", lambda: now)
    for _ in range(3 * FAULTS_MAX):
        now += FAULTS_SECONDS / (FAULTS_MAX - 2)
        guard.run_hook("arrive", raise_error, lambda: 7)
    assert guard.is_on
    for _ in range(FAULTS_MAX - 1):
        guard.run_hook("arrive", raise_error, lambda: 7)
    assert not guard.is_on


def test_pauses_double_until_the_side_was_on_for_long() -> None:
    now = 1e6
    guard = HookGuard("scheduler", lambda: now)
    renewed: list[None] = []

    def pause() -> float:
        """Pause the guard until it is on again; returns the length of the pause."""
        nonlocal now
        guard.pause("the test says so")
        guard.pause("it is off already")
        since = now
        while not guard.is_on:
            now += PAUSE_SECONDS
            guard.resume(lambda: renewed.append(None))
        return now - since

    lengths = [pause() for _ in range(8)]
    assert lengths == [*(60 * 2**number for number in range(6)), 3600, 3600]
    now += PAUSE_SECONDS_MAX
    assert pause() == 60
    assert len(renewed) == 9
    assert guard.counters == {QUARANTINED: 9, RESUMED: 9}


def test_a_side_that_cannot_begin_anew_pauses_longer() -> None:
    now = 0.0
    guard = HookGuard("scheduler", lambda: now)
    guard.pause("the test says so")
    now += PAUSE_SECONDS
    guard.resume(raise_error)
    assert not guard.is_on
    assert guard.pause_seconds == 2 * PAUSE_SECONDS
    assert guard.counters[fault("resume")] == 1


def test_a_fatal_fault_is_the_last_and_its_hook_goes_on_in_a_pause() -> None:
    """What a plan's hook misses in a pause would be half done afterwards."""
    now = 0.0
    guard = HookGuard("a child", lambda: now)
    guard.pause("the test says so")
    assert guard.run_hook("asked", lambda: 1, lambda: 7) == 7
    assert guard.run_hook("told", lambda: 1, lambda: 7, pauses=False) == 1
    assert guard.run_hook("plan", lambda: 1, lambda: 7, fatal=True) == 1
    assert guard.run_hook("plan", raise_error, lambda: 7, fatal=True) == 7
    assert guard.is_over
    now += PAUSE_SECONDS
    guard.resume(lambda: None)
    assert not guard.is_on
    assert guard.run_hook("plan", lambda: 1, lambda: 7, fatal=True) == 7


def test_the_second_slow_hook_ends_the_engines_wait() -> None:
    """Its answers count all the same; slow ones that are far apart are only counted."""
    now = 0.0
    guard = HookGuard("Other (scheduler)", lambda: now, slow_seconds=1.0)

    def hook(seconds: float, work: Callable[[], int] = lambda: 1) -> int:
        def slow() -> int:
            nonlocal now
            now += seconds
            return work()

        return guard.run_hook("arrive", slow, lambda: 7)

    assert hook(5.0) == 1
    now += FAULTS_SECONDS
    assert [hook(0.9) for _ in range(9)] == [1] * 9
    assert guard.is_on
    assert hook(1.0) == 1
    assert guard.is_on, "the first one is long ago"
    assert hook(1.0, raise_error) == 7
    assert not guard.is_on
    assert hook(9.0) == 7
    assert guard.counters == {SLOW_HOOKS: 3, fault("arrive"): 1, QUARANTINED: 1, SWITCHED_OFF: 1}
    assert now < FAULTS_SECONDS + 20, "a side that pauses is not asked"
