"""MultiConnector's worker role: each child's hooks, and each load and save reported once."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partialmethod
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiKVConnectorMetadata

from hybridkv.multi.children import ChildConnector, ChildConnectors
from hybridkv.multi.messages import NOBODY, MultiPlan, MultiReport
from hybridkv.multi.stats import MultiKVConnectorStats


@dataclass(slots=True)
class TransferLedger:
    """A worker's: loads and saves that were announced, each of which is reported once."""

    loads: dict[str, int] = field(default_factory=dict)  # The connector that loads a request.
    saves: dict[str, set[int]] = field(default_factory=dict)
    """The connectors that hold a request's blocks."""
    tainted: set[str] = field(default_factory=set)  # Loads of which some part has failed already.
    ended: KVConnectorTransferResults = field(default_factory=KVConnectorTransferResults)
    absorbed: int = 0  # Reports that nobody waited for.

    def announce(self, loads: Mapping[str, int], saves: Mapping[str, Iterable[int]]) -> None:
        """The engine waits for these from now on."""
        self.loads.update(loads)
        for request_id, children in saves.items():
            self.saves.setdefault(request_id, set()).update(children)

    def loaded(self, child: int, finished: Iterable[str], failed: Iterable[str]) -> None:
        """A connector reported these; a failed load ends only when it is finished too."""
        self.tainted.update(name for name in failed if self.loads.get(name) == child)
        for request_id in finished:
            if self.loads.get(request_id) != child:
                self.absorbed += 1
                continue
            del self.loads[request_id]
            self.ended.finished_recving.add(request_id)
            if request_id in self.tainted:
                self.tainted.discard(request_id)
                self.ended.failed_recving.add(request_id)

    def sent(self, child: int, request_ids: Iterable[str]) -> None:
        """A connector reported these saves as done."""
        for request_id in request_ids:
            if child not in self.saves.get(request_id, ()):
                self.absorbed += 1
                continue
            self.saves[request_id].discard(child)
            if not self.saves[request_id]:
                del self.saves[request_id]
                self.ended.finished_sending.add(request_id)

    def give_up(self, children: Iterable[int]) -> None:
        """What these connectors owe ends now, whatever they will say, and their loads failed."""
        for child in children:
            loads = [name for name, loading in self.loads.items() if loading == child]
            self.loaded(child, loads, loads)
            self.sent(child, [name for name, some in self.saves.items() if child in some])

    def is_owed_by(self, child: int) -> bool:
        """Whether a connector has transfers to report."""
        return child in self.loads.values() or any(child in some for some in self.saves.values())

    def take(self) -> KVConnectorTransferResults:
        """What ended since the last call; failed loads are among the finished ones too."""
        taken, self.ended = self.ended, KVConnectorTransferResults()
        return taken


@dataclass(eq=False)
class MultiWorker:
    """One rank; its public methods are vLLM's hooks. None raises, whatever a child does."""

    _children: ChildConnectors
    _groups: int  # How many KV cache groups the engine has.
    _ledger: TransferLedger = field(default_factory=TransferLedger)
    _bound: set[int] = field(default_factory=set)  # Children that have their plan of this step.
    _sync_blocks: dict[int, tuple[int, ...]] = field(default_factory=dict)
    _bad_blocks: set[int] = field(default_factory=set)
    _number: int = 0  # Of the last plan.

    def bind_connector_metadata(self, metadata: Any) -> None:
        """Take this step's plan: each child's own, and which child owes what from now on."""
        self._children.step_begins()
        self._bound.clear()
        self._sync_blocks = {}
        if isinstance(metadata, MultiPlan):
            self._ledger.announce(metadata.loads, metadata.saves)
            self._ledger.give_up({NOBODY, *metadata.settled})
            self._sync_blocks = metadata.sync_blocks
            self._bad_blocks.update(metadata.bad_blocks)
            self._number = metadata.number
        for child, plan in self._plans(metadata):
            self._bound.add(child.index)
            self._carry_out(child, "bind_connector_metadata", plan, loads=True)

    def clear_connector_metadata(self) -> None:
        """End the step."""
        self._step("clear_connector_metadata")
        self._bound.clear()

    def handle_preemptions(self, metadata: Any) -> None:
        """Give each child its own plan, or all whatever else older engines pass (B23, D14)."""
        is_plan = isinstance(metadata, MultiKVConnectorMetadata)
        others = [(child, metadata) for child in self._children.alive]
        for child, plan in self._plans(metadata) if is_plan else others:
            child.call("handle_preemptions", None, plan, fatal=is_plan, pauses=False)

    def _step(self, hook: str, *args: Any, loads: bool = False, **kwargs: Any) -> None:
        """Call a hook of all children that have a plan of this step."""
        for child in self._children.all:
            if child.index in self._bound:
                self._carry_out(child, hook, *args, loads=loads, **kwargs)

    start_load_kv = partialmethod(_step, "start_load_kv", loads=True)
    wait_for_layer_load = partialmethod(_step, "wait_for_layer_load", loads=True)
    save_kv_layer = partialmethod(_step, "save_kv_layer")
    wait_for_save = partialmethod(_step, "wait_for_save")
    finish_forward = partialmethod(_step, "finish_forward")

    def reset_capture_state(self) -> None:
        """All children; none has a plan while graphs are captured."""
        self._children.call("reset_capture_state", None, pauses=False)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Every load and save that ended, once, whichever children report it."""
        fault, says = "fault_get_transfer_results", "%s cannot say what became of its transfers"
        for child in self._children.all:
            if child.alive or (self._ledger.is_owed_by(child.index) and not child.mute):
                told = child.attempt(fault, says, False, self._collect, child, finished_req_ids)
                child.mute = not told
                if child.mute and child.alive:
                    child.guard.end("a fault in get_transfer_results")
        if self._ledger.absorbed:
            self._children.counters["reports_absorbed"] += self._ledger.absorbed
            self._ledger.absorbed = 0
        return self._ledger.take()

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that were not loaded, of an engine with one group; others fail the requests."""
        taken, self._bad_blocks = self._bad_blocks, set()
        return taken if self._groups == 1 else set()

    def build_connector_worker_meta(self) -> MultiReport:
        """What each child says, what was counted, and which children are switched off."""
        events = self._said("get_kv_connector_kv_cache_events")
        messages = self._said("build_connector_worker_meta", fatal=True)
        dead = frozenset(child.index for child in self._children.all if not child.alive)
        counters = self._children.take_counts()
        return MultiReport(messages, events, dead, counters, self._number)

    def get_kv_connector_stats(self) -> MultiKVConnectorStats | None:
        """The children's own statistics since the last call."""
        stats = MultiKVConnectorStats.taken_from(self._children)
        return stats if stats.data else None

    def _said(self, hook: str, fatal: bool = False) -> list[tuple[int, Any]]:
        """(child, its answer) of the living children that have one."""
        answers = self._children.call(hook, None, fatal=fatal)
        return [(child.index, answer) for child, answer in answers if answer is not None]

    def _carry_out(
        self, child: ChildConnector, hook: str, *args: Any, loads: bool = False, **kwargs: Any
    ) -> None:
        """Call a hook of a plan. A fault leaves the plan half done, so the first is the last.

        With `loads` it also leaves the blocks of this step unloaded.
        """
        child.call(hook, None, *args, fatal=True, **kwargs)
        if not child.alive:
            self._bound.discard(child.index)
            if loads:
                self._bad_blocks.update(self._sync_blocks.get(child.index, ()))

    def _collect(self, child: ChildConnector, finished_req_ids: set[str]) -> bool:
        results = child.connector.get_transfer_results(finished_req_ids)
        blocks = child.connector.get_block_ids_with_load_errors()
        finished, failed = results.finished_recving or (), results.failed_recving or ()
        if blocks and self._groups > 1:
            # vLLM would end, since block ids are not unique there. All loads of this child fail.
            failed = self._ledger.loads
            self._children.counters["block_errors_of_several_groups"] += 1
        elif blocks:
            self._bad_blocks.update(blocks)
        self._ledger.loaded(child.index, finished, failed)
        self._ledger.sent(child.index, results.finished_sending or ())
        return True

    def _plans(self, metadata: Any) -> list[tuple[ChildConnector, Any]]:
        plans = metadata.metadata if isinstance(metadata, MultiKVConnectorMetadata) else ()
        both = zip(self._children.all, plans, strict=False)
        return [(child, plan) for child, plan in both if child.alive and plan is not None]
