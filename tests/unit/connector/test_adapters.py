"""The scheduler role and LoRA adapters, hook by hook: nothing is offered for other weights."""

from collections.abc import Iterator
from typing import Any

import pytest
from vllm.lora.request import LoRARequest

from hybridkv.connector.metrics import (
    LOADS_DONE,
    LOOKUPS_MISSED,
    OBJECTS_STORED,
    Shed,
    declined,
    stores_shed,
)
from hybridkv.core.keys import HASH_BYTES, adapter_hashes
from hybridkv.lab.daemon_process import DaemonProcess
from hybridkv.vllm.adapters import AdapterRefusal
from hybridkv.wire.messages import Decline
from tests.unit.connector import requests
from tests.unit.connector.test_scheduler import CHUNK, Rig, tables
from tests.unit.daemon.tierclient import Client, hashes
from tests.waiting import until

pytestmark = pytest.mark.engine

OLD, NEW = b"o" * HASH_BYTES, b"n" * HASH_BYTES
STORED = 4
"""Chunks of the prompt that the daemon has, computed by the old weights."""
CHUNKS = 6
TOKENS = CHUNKS * CHUNK + 1


class LoraRig(Rig):
    """A role whose worker has adapters."""

    loaded: dict[int, bytes]
    """The worker's adapters, by number."""

    def ask(self, name: str = "r", *, in_place: bool = False) -> Any:
        """A request of the prompt with the adapter."""
        names = adapter_hashes(b"".join(hashes(1, CHUNKS)), OLD)
        asking = requests.request(name, TOKENS, names)
        asking.lora_request = LoRARequest("a", 1, "/a", load_inplace=in_place)
        self.side.on_new_request(asking)
        return asking

    def run(self, scheduled: dict[str, int], finished: tuple[str, ...] = ()) -> Any:
        """A step with its report; the plan."""
        plan = self.planned(scheduled, tables(TOKENS))
        self.tell(plan, finished)
        return plan

    def tell(self, plan: Any, finished: tuple[str, ...] = ()) -> None:
        """The worker's report of a step: all is stored, and these loads ended well."""
        boots = {self.side.session.boot: 1}
        done = {number: {0} for number in plan.stores}
        report = self.report(plan.number, boots, done, adapters={0: dict(self.loaded)})
        self.side.on_report({*finished}, set(), report)
        assert not self.side.on_step_end()

    def why(self, name: str = "r") -> tuple[Decline | None, str]:
        """Return the reason of the request's last decline, and its detail."""
        tracked = self.side.requests.by_id[name]
        return tracked.declined, tracked.decline_detail

    def load(self) -> Any:
        """The plan of the step with the load of a request."""
        asking = self.ask()
        offer = self.offered(asking)
        assert offer == STORED * CHUNK
        self.side.on_allocated(asking, lambda: tables(TOKENS), offer)
        return self.planned({})


@pytest.fixture
def rig(daemon: DaemonProcess) -> Iterator[LoraRig]:
    """The daemon has the prompt's first chunks, and the worker has no adapter yet."""
    with Client(daemon.socket_path) as client:
        client.store(1, STORED)
        asked = LoraRig(daemon)
        asked.loaded = {}
        yield asked
        asked.side.close()


def test_a_request_that_loads_its_adapter_anew_is_not_looked_up(rig: LoraRig) -> None:
    """The engine reads the files in each of its steps, the first of which comes after a load."""
    rig.loaded = {1: OLD}
    rig.run({})
    asking = rig.ask(in_place=True)
    assert rig.side.offer_hit(asking, 0) == 0
    assert rig.why() == (Decline.ADAPTER, AdapterRefusal.RELOADED)
    assert rig.offered(rig.ask("later")) == STORED * CHUNK
    rig.loaded = {}
    rig.run({})
    assert rig.side.offer_hit(rig.ask("unknown", in_place=True), 0) == 0, "it is waited for"


@pytest.mark.parametrize("loaded", [NEW, b""], ids=["replaced", "evicted"])
def test_a_hit_of_weights_that_are_replaced_is_not_offered(rig: LoraRig, loaded: bytes) -> None:
    rig.loaded = {1: OLD}
    rig.run({})
    asking = rig.ask()
    assert rig.offered(asking) == STORED * CHUNK
    rig.loaded = {1: loaded} if loaded else {}
    rig.run({})
    assert rig.offered(asking) == 0
    assert rig.counters[declined(Decline.ADAPTER)] == (not loaded)
    assert rig.counters[LOOKUPS_MISSED] == bool(loaded), "the new weights are looked up"
    rig.run({})
    until(lambda: not rig.value("leases"), "what was found is let go of")


def test_what_was_loaded_is_of_the_adapters_old_weights(rig: LoraRig) -> None:
    """The engine keeps the blocks in its own prefix cache, whatever is loaded later."""
    rig.loaded = {1: OLD}
    rig.run({})
    rig.tell(rig.load(), finished=("r",))
    assert rig.counters[LOADS_DONE] == 1
    rig.loaded = {1: NEW}
    rig.run({"r": 1})
    assert rig.side.offer_hit(rig.ask("s"), 0) == 0
    assert rig.why("s") == (Decline.ADAPTER, AdapterRefusal.MIXED)
    rig.side.on_reset(is_empty=False)
    assert rig.side.offer_hit(rig.ask("t"), 0) == 0
    rig.side.on_reset(is_empty=True)
    rig.run({})
    assert rig.offered(rig.ask("u")) == 0
    assert rig.counters[LOOKUPS_MISSED] == 1, "the new weights are looked up"


def test_other_weights_of_the_adapter_find_nothing(rig: LoraRig) -> None:
    rig.loaded = {1: NEW}
    rig.run({})
    assert rig.offered(rig.ask()) == 0
    assert rig.counters[LOOKUPS_MISSED] == 1


@pytest.mark.parametrize("then", [OLD, NEW], ids=["the same", "others"])
def test_what_is_computed_before_an_adapter_is_known_is_stored_afterwards(
    rig: LoraRig, then: bytes
) -> None:
    """The first step with an adapter loads it, and its report says which weights it has."""
    rig.run({})
    rig.await_slots()
    asking = rig.ask()
    rig.run({})
    assert rig.side.offer_hit(asking, 0) == 0
    rig.side.on_allocated(asking, lambda: tables(TOKENS), 0)
    rig.loaded = {1: OLD}
    assert not rig.run({"r": 2 * CHUNK}).stores
    asking.num_computed_tokens = 2 * CHUNK
    rig.loaded = {1: then}
    plan = rig.run({"r": CHUNK})
    spans = [run.span for run in plan.stores.values()]
    assert {(span.first_chunk, span.objects) for span in spans if not span.group_index} == {(0, 3)}
    objects = sum(span.objects for span in spans)
    assert rig.counters[OBJECTS_STORED] == (objects if then == OLD else 0)
    assert rig.counters[stores_shed(Shed.FAILED)] == (0 if then == OLD else objects)
