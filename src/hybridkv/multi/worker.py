"""MultiConnector's worker role: each child's hooks, and each load and save reported once."""

from dataclasses import dataclass, field
from functools import partialmethod
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiKVConnectorMetadata

from hybridkv.multi.children import ChildConnector, ChildConnectors
from hybridkv.multi.messages import MultiPlan, MultiReport
from hybridkv.multi.stats import MultiKVConnectorStats
from hybridkv.multi.transfers import NOBODY, TransferLedger


@dataclass(eq=False)
class MultiWorker:
    """One rank; its public methods are vLLM's hooks. None raises, whatever a child does."""

    _children: ChildConnectors
    _groups: int  # How many KV cache groups the engine has.
    _ledger: TransferLedger = field(default_factory=TransferLedger)
    _bound: set[int] = field(default_factory=set)  # Children that have their plan of this step.
    _sync_blocks: dict[int, tuple[int, ...]] = field(default_factory=dict)
    _bad_blocks: set[int] = field(default_factory=set)

    def bind_connector_metadata(self, metadata: Any) -> None:
        """Take this step's plan: each child's own, and which child owes what from now on."""
        self._bound.clear()
        self._sync_blocks = {}
        if isinstance(metadata, MultiPlan):
            self._ledger.announce(metadata.loads, metadata.saves)
            self._ledger.give_up({NOBODY, *metadata.settled})
            self._sync_blocks = metadata.sync_blocks
            self._bad_blocks.update(metadata.bad_blocks)
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
            child.call("handle_preemptions", None, plan, fatal=is_plan)

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
        self._children.call("reset_capture_state", None)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Every load and save that ended, once, whichever children report it."""
        fault, says = "fault_get_transfer_results", "%s cannot say what became of its transfers"
        for child in self._children.all:
            if child.alive or (self._ledger.is_owed_by(child.index) and not child.mute):
                told = child.attempt(fault, says, False, self._collect, child, finished_req_ids)
                child.mute = not told
                if child.mute and child.alive:
                    child.supervisor.switch_off("a fault in get_transfer_results")
        finished, failed, saved = self._ledger.take()
        if self._ledger.absorbed:
            self._children.counters["reports_absorbed"] += self._ledger.absorbed
            self._ledger.absorbed = 0
        return KVConnectorTransferResults(
            finished_sending=saved, finished_recving=finished, failed_recving=failed
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that were not loaded, of an engine with one group; others fail the requests."""
        taken, self._bad_blocks = self._bad_blocks, set()
        return taken if self._groups == 1 else set()

    def build_connector_worker_meta(self) -> MultiReport | None:
        """What each child says, what was counted, and which children are switched off."""
        events = self._said("get_kv_connector_kv_cache_events")
        messages = self._said("build_connector_worker_meta", fatal=True)
        dead = frozenset(child.index for child in self._children.all if not child.alive)
        counters = self._children.take_counts()
        if not (messages or events or dead or counters):
            return None
        return MultiReport(messages, events, dead, counters)

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
