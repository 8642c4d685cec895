"""Nothing raises into the engine, and a side that is switched off still tells of it."""

from hybridkv.vllm.supervise import FAULTS_MAX, Supervisor


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
