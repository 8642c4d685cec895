"""MultiConnector's worker role: it calls each child's hooks, and reports each transfer once."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial, partialmethod
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiKVConnectorMetadata

from hybridkv.multi import metrics
from hybridkv.multi.children import ChildConnector, ChildConnectors, ChildState
from hybridkv.multi.messages import NOBODY, ChildEvents, ChildMessage, MultiPlan, MultiReport
from hybridkv.multi.stats import MultiKVConnectorStats


@dataclass(slots=True)
class TransferLedger:
    """The announced loads and saves of one worker, each of which it reports once."""

    loads: dict[str, int] = field(default_factory=dict)  # The child that loads a request.
    saves: dict[str, set[int]] = field(default_factory=dict)
    """The children that hold a request's blocks."""
    tainted: set[str] = field(default_factory=set)  # Loads of which a part has failed already.
    ended: KVConnectorTransferResults = field(default_factory=KVConnectorTransferResults)
    """The transfers to report with the next `take_ended`."""
    absorbed: int = 0  # Reports of transfers that were not announced, or had ended.

    def announce(self, loads: Mapping[str, int], saves: Mapping[str, Iterable[int]]) -> None:
        """Add loads and saves, whose ends the engine waits for from now on."""
        self.loads.update(loads)
        for request_id, children in saves.items():
            self.saves.setdefault(request_id, set()).update(children)

    def on_loads_reported(self, child: int, finished: Iterable[str], failed: Iterable[str]) -> None:
        """A child reported the ends of loads. A failed load ends only when it is finished too."""
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

    def on_saves_reported(self, child: int, request_ids: Iterable[str]) -> None:
        """A child reported the ends of saves. A save ends with the report of its last child."""
        for request_id in request_ids:
            if child not in self.saves.get(request_id, ()):
                self.absorbed += 1
                continue
            self.saves[request_id].discard(child)
            if not self.saves[request_id]:
                del self.saves[request_id]
                self.ended.finished_sending.add(request_id)

    def end_children(self, children: Iterable[int]) -> None:
        """End all transfers of these children as if they had reported them, and loads as failed."""
        for child in children:
            loads = [name for name, loader in self.loads.items() if loader == child]
            saves = [name for name, holders in self.saves.items() if child in holders]
            self.on_loads_reported(child, loads, loads)
            self.on_saves_reported(child, saves)

    def is_owed_by(self, child: int) -> bool:
        """Returns True if the child has transfers to report."""
        holds = any(child in holders for holders in self.saves.values())
        return holds or child in self.loads.values()

    def take_ended(self) -> KVConnectorTransferResults:
        """Returns what ended since the last call. Failed loads are among the finished ones too."""
        results, self.ended = self.ended, KVConnectorTransferResults()
        return results


@dataclass(eq=False)
class MultiWorker:
    """The worker role of one rank. Its public methods are vLLM's hooks of the same name.

    No hook raises, whatever a child does.
    """

    children: ChildConnectors
    groups: int  # The number of the engine's KV cache groups.
    _ledger: TransferLedger = field(default_factory=TransferLedger)
    _bound: set[int] = field(default_factory=set)  # Children that have their plan of this step.
    _sync_blocks: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Blocks that a child loads within this step."""
    _bad_blocks: set[int] = field(default_factory=set)  # Blocks to report as not loaded.
    _plan_number: int = 0  # Of the last plan.

    def bind_connector_metadata(self, metadata: Any) -> None:
        """Take this step's plan, note which transfers it announces, and bind each child's own."""
        self.children.step_begins()
        self._bound.clear()
        self._sync_blocks = {}
        if isinstance(metadata, MultiPlan):
            self._ledger.announce(metadata.loads, metadata.saves)
            self._ledger.end_children({NOBODY, *metadata.settled})
            self._sync_blocks = metadata.sync_blocks
            self._bad_blocks.update(metadata.bad_blocks)
            self._plan_number = metadata.number
        for child, plan in self._plans(metadata):
            self._bound.add(child.index)
            self._carry_out(child, "bind_connector_metadata", plan, loads=True)

    def clear_connector_metadata(self) -> None:
        """End the step: let each child that has a plan forget it."""
        self._step("clear_connector_metadata")
        self._bound.clear()

    def handle_preemptions(self, metadata: Any) -> None:
        """Give each child its own plan, or all children what older engines pass (B23, D14)."""
        is_plan = isinstance(metadata, MultiKVConnectorMetadata)
        undivided = [(child, metadata) for child in self.children.alive]
        for child, plan in self._plans(metadata) if is_plan else undivided:
            child.call_hook("handle_preemptions", None, plan, fatal=is_plan, pauses=False)

    def _step(self, hook: str, *args: Any, loads: bool = False, **kwargs: Any) -> None:
        """Call a hook of all children that have a plan of this step, as `_carry_out` does."""
        for child in self.children.all:
            if child.index in self._bound:
                self._carry_out(child, hook, *args, loads=loads, **kwargs)

    start_load_kv = partialmethod(_step, "start_load_kv", loads=True)
    wait_for_layer_load = partialmethod(_step, "wait_for_layer_load", loads=True)
    save_kv_layer = partialmethod(_step, "save_kv_layer")
    wait_for_save = partialmethod(_step, "wait_for_save")
    finish_forward = partialmethod(_step, "finish_forward")

    def reset_capture_state(self) -> None:
        """Call the hook of all children, because none has a plan while graphs are captured."""
        self.children.call_hooks("reset_capture_state", None, pauses=False)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Returns every load and save that ended, once, whichever children report it."""
        hook, message = "get_transfer_results", "%s cannot say what became of its transfers"
        for child in self.children.all:
            owes = child.state is ChildState.OFF and self._ledger.is_owed_by(child.index)
            if not (child.is_alive or owes):
                continue
            collect = partial(self._collect, child, finished_req_ids)
            child.is_silent = not child.attempt(hook, message, False, collect)
            if child.is_silent and child.is_alive:
                child.guard.switch_off_side("a fault in get_transfer_results")
        if self._ledger.absorbed:
            self.children.count(metrics.REPORTS_ABSORBED, self._ledger.absorbed)
            self._ledger.absorbed = 0
        return self._ledger.take_ended()

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Returns blocks that were not loaded, since the last call.

        They are empty in an engine with several groups, where such loads are reported as failed.
        """
        bad_blocks, self._bad_blocks = self._bad_blocks, set()
        return bad_blocks if self.groups == 1 else set()

    def build_connector_worker_meta(self) -> MultiReport:
        """Returns each child's events and message, the counts, and which children are off."""
        events = self.children.call_hooks("get_kv_connector_kv_cache_events", None)
        messages = self.children.call_hooks("build_connector_worker_meta", None, fatal=True)
        return MultiReport(
            messages=[
                ChildMessage(child.index, message)
                for child, message in messages
                if message is not None
            ],
            events=[
                ChildEvents(child.index, kv_events)
                for child, kv_events in events
                if kv_events is not None
            ],
            dead=frozenset(child.index for child in self.children.all if not child.is_alive),
            counters=self.children.take_counts(),
            number=self._plan_number,
        )

    def get_kv_connector_stats(self) -> MultiKVConnectorStats | None:
        """Returns the children's own statistics since the last call."""
        stats = MultiKVConnectorStats.from_children(self.children)
        return stats if stats.data else None

    def _carry_out(
        self, child: ChildConnector, hook: str, *args: Any, loads: bool = False, **kwargs: Any
    ) -> None:
        """Call a hook of a plan. The first fault switches the child off: the plan is half done.

        With `loads` the blocks that the child loads within this step are then bad blocks.
        """
        child.call_hook(hook, None, *args, fatal=True, **kwargs)
        if not child.is_alive:
            self._bound.discard(child.index)
            if loads:
                self._bad_blocks.update(self._sync_blocks.get(child.index, ()))

    def _collect(self, child: ChildConnector, finished_req_ids: set[str]) -> bool:
        """Note in the ledger what a child reports of its transfers. Returns True."""
        results = child.connector.get_transfer_results(finished_req_ids)
        blocks = child.connector.get_block_ids_with_load_errors()
        finished, failed = results.finished_recving or (), results.failed_recving or ()
        if blocks and self.groups > 1:
            # vLLM would end, since block ids are not unique there. All loads of this child fail.
            failed = self._ledger.loads
            self.children.count(metrics.BLOCK_ERRORS)
        elif blocks:
            self._bad_blocks.update(blocks)
        self._ledger.on_loads_reported(child.index, finished, failed)
        self._ledger.on_saves_reported(child.index, results.finished_sending or ())
        return True

    def _plans(self, metadata: Any) -> list[tuple[ChildConnector, Any]]:
        """Each living child and its own part of a step's plan.

        There is none in metadata of another connector.
        """
        plans = metadata.metadata if isinstance(metadata, MultiKVConnectorMetadata) else ()
        pairs = zip(self.children.all, plans, strict=False)
        return [(child, plan) for child, plan in pairs if child.is_alive and plan is not None]
