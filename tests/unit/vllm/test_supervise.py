"""Nothing raises into the engine, and a side that is switched off still tells of it."""

from hybridkv.vllm.supervise import FAULTS_MAX, FAULTS_SECONDS, Supervisor


def fault() -> int:
    raise ValueError("a fault")


def test_a_side_that_is_switched_off_tells_people_until_that_fails_too() -> None:
    supervisor = Supervisor("scheduler")
    for _ in range(FAULTS_MAX):
        assert supervisor.healthy
        assert supervisor.run("arrive", fault, lambda: 7) == 7
    assert not supervisor.healthy
    assert supervisor.run("arrive", lambda: 1, lambda: 7) == 7
    assert supervisor.counters["switched_off"] == 1
    assert supervisor.run("tell", lambda: 1, lambda: 7, tells=True) == 1
    assert supervisor.run("tell", fault, lambda: 7, tells=True) == 7
    assert supervisor.run("tell", lambda: 1, lambda: 7, tells=True) == 7, "once is enough"
    assert supervisor.counters == {
        "fault_arrive": FAULTS_MAX,
        "fault_tell": 1,
        "switched_off": 2,
        "quarantined": 1,
    }


def test_faults_count_per_time_and_not_per_life() -> None:
    now = 0.0
    supervisor = Supervisor("scheduler", lambda: now)
    for _ in range(3 * FAULTS_MAX):
        now += FAULTS_SECONDS / (FAULTS_MAX - 2)
        supervisor.run("arrive", fault, lambda: 7)
    assert supervisor.healthy
    for _ in range(FAULTS_MAX - 1):
        supervisor.run("arrive", fault, lambda: 7)
    assert not supervisor.healthy
