"""KV events and messages of MultiConnector's children."""

import random
from collections import Counter
from typing import Any

import pytest

pytestmark = pytest.mark.engine

pytest.importorskip("vllm")

from vllm.distributed.kv_events import KVConnectorKVEvents  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator  # noqa: E402
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput  # noqa: E402

from hybridkv.multi.counters import REPORTS_ABSORBED, CounterKey  # noqa: E402
from hybridkv.multi.messages import ChildEvents, ChildMessage, MultiReport  # noqa: E402
from hybridkv.vllm.hook_guard import event, fault  # noqa: E402
from tests.unit.multi.multiengine import MultiEngine, child, hybrid  # noqa: E402
from tests.unit.multi.scripted import Note, Script, ScriptedError  # noqa: E402


def test_a_child_that_is_switched_off_withdraws_what_it_announced(rng: random.Random) -> None:
    """Once, and it may raise; a child that knows nothing of it is left alone."""
    engine = MultiEngine([child(Script()), child(Script()), child(Script())], hybrid())
    first, second, third = engine.connector.children.all
    asked: list[str] = []

    def withdraw() -> list[Any]:
        asked.append("first")
        return ["gone"]

    def raising() -> list[Any]:
        asked.append("second")
        raise ScriptedError("withdraw")

    first.connector.withdraw = withdraw
    second.connector.withdraw = raising
    assert engine.connector.take_events() == []
    for dead in (first, second, third):
        dead.guard.switch_off_side("the test says so")
    assert engine.connector.take_events() == ["gone"]
    assert engine.connector.take_events() == []
    assert asked == ["first", "second"]
    events = engine.connector.get_kv_connector_stats().to_dict()["__events__"]
    assert events["Scripted-2"]["fault_withdraw"] == 1
    assert "fault_withdraw" not in events["Scripted"]


class UnmergeableNote(Note):
    """A message that nothing can be added to."""

    def __init__(self) -> None:
        super().__init__(1)

    def aggregate(self, note: Any) -> Note:
        raise ScriptedError("aggregate")


class WorkerEvents(KVConnectorKVEvents):
    """One child's KV events of one worker; the hook named `raises` fails."""

    def __init__(self, names: list[str], raises: str = "") -> None:
        self.names, self.raises, self.workers = names, raises, 1

    def _do(self, hook: str) -> None:
        if hook == self.raises:
            raise ScriptedError(hook)

    def add_events(self, events: list[Any]) -> None:
        self._do("add_events")
        self.names += events

    def aggregate(self) -> "WorkerEvents":
        self._do("aggregate")
        return self

    def increment_workers(self, count: int = 1) -> None:
        self._do("increment_workers")
        self.workers += count

    def get_all_events(self) -> list[Any]:
        self._do("get_all_events")
        return self.names

    def get_number_of_workers(self) -> int:
        self._do("get_number_of_workers")
        return self.workers

    def clear_events(self) -> None:
        self._do("clear_events")
        self.names = []


def of_two_ranks(output_of: Any) -> KVConnectorOutput:
    """vLLM adds up the outputs of several ranks where nobody supervises a child's code."""
    outputs = [
        ModelRunnerOutput(req_ids=[], req_id_to_index={}, kv_connector_output=output_of(rank))
        for rank in range(2)
    ]
    return KVOutputAggregator(2).aggregate(outputs, 0).kv_connector_output


@pytest.mark.parametrize("hook", ["", "add_events", "get_all_events", "increment_workers"])
def test_events_that_cannot_be_merged_end_nothing_and_are_counted(hook: str) -> None:
    bad, good = Script(), Script()
    engine = MultiEngine([child(bad, name="bad"), child(good, name="good")], hybrid())
    output = of_two_ranks(
        lambda rank: KVConnectorOutput(
            kv_connector_worker_meta=MultiReport(
                events=[
                    ChildEvents(0, WorkerEvents([f"bad{rank}"], hook)),
                    ChildEvents(1, WorkerEvents([f"good{rank}"])),
                ]
            )
        )
    )
    engine.connector.update_connector_output(output)
    assert [events.names for events in good.events] == [["good0", "good1"]]
    assert [events.workers for events in good.events] == [2]
    assert [events and events.names for events in bad.events] == [
        None if hook else ["bad0", "bad1"]
    ]
    assert engine.connector.counters[CounterKey("bad", fault("kv_events"))] == bool(hook)
    assert CounterKey("good", fault("kv_events")) not in engine.connector.counters
    assert engine.connector.children.all[0].is_alive


def test_messages_that_cannot_be_merged_are_lost_and_counted() -> None:
    """The scheduler hears of the other connector's, and of what both ranks counted."""
    bad, good = Script(), Script()
    engine = MultiEngine([child(bad, name="bad"), child(good, name="good")], hybrid())
    output = of_two_ranks(
        lambda rank: KVConnectorOutput(
            kv_connector_worker_meta=MultiReport(
                [ChildMessage(0, Note(1) if rank else UnmergeableNote()), ChildMessage(1, Note(1))],
                counters=Counter(
                    {CounterKey("", REPORTS_ABSORBED): 2, CounterKey("", event(f"only{rank}")): 1}
                ),
            )
        )
    )
    engine.connector.update_connector_output(output)
    assert [note and note.steps for note in (*bad.notes, *good.notes)] == [None, 2]
    counters = engine.connector.counters
    assert counters[CounterKey("bad", fault("aggregate"))] == 1
    assert counters[CounterKey("", event("only0"))] == counters[CounterKey("", event("only1"))] == 1
    assert counters[CounterKey("", REPORTS_ABSORBED)] == 4
    assert CounterKey("good", fault("aggregate")) not in counters
