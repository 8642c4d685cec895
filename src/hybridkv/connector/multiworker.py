"""MultiConnector's worker role: each child's hooks, and each load and save reported to the engine once."""

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiKVConnectorMetadata

from hybridkv.connector.children import Child, all_counters
from hybridkv.connector.multimessages import MultiEvents, MultiPlan, MultiReport
from hybridkv.connector.multischeduler import child_stats
from hybridkv.connector.multistats import MultiKVConnectorStats
from hybridkv.core.owed import Ledger

logger = logging.getLogger("vllm.hybridkv")


class MultiWorker:
    """One rank. No method raises, whatever a child does."""

    def __init__(self, children: Sequence[Child], counters: Counter[str], groups: int) -> None:
        self._children = children
        self._counters = counters
        self._groups = groups
        self._ledger = Ledger()
        self._bound: set[int] = set()
        """Children that have their plan of this step."""
        self._sync_blocks: dict[int, tuple[int, ...]] = {}
        self._bad_blocks: set[int] = set()
        self._told_dead: frozenset[int] = frozenset()
        self._told: Counter[str] = Counter()

    def bind(self, metadata: Any) -> None:
        """This step's plan: each child's own, and who owes what from now on."""
        self._bound.clear()
        self._sync_blocks = {}
        if isinstance(metadata, MultiPlan):
            self._ledger.announce(metadata.loads, metadata.saves)
            self._ledger.give_up(metadata.failed)
            for place, name in metadata.let_go:
                self._ledger.let_go(place, [name])
            self._sync_blocks = metadata.sync_blocks
            self._bad_blocks.update(metadata.bad_blocks)
        for child, plan in self._plans(metadata):
            self._bound.add(child.place)
            self._work(child, "bind_connector_metadata", plan, loads=True)

    def unbind(self) -> None:
        """After the step."""
        for child in self._children:
            if child.place in self._bound:
                self._work(child, "clear_connector_metadata")
        self._bound.clear()

    def preempted(self, metadata: Any) -> None:
        """Each child's plan where there is one, else whatever it is to all of them (requirements B23, D14)."""
        if isinstance(metadata, MultiKVConnectorMetadata):
            plans = self._plans(metadata)
        else:
            plans = [(child, metadata) for child in self._children if child.alive]
        for child, plan in plans:
            child.call("handle_preemptions", None, plan, fatal=isinstance(metadata, MultiKVConnectorMetadata))

    def each(self, hook: str, *args: Any, loads: bool = False, **kwargs: Any) -> None:
        """A hook of this step; `loads`: whether a fault in it leaves blocks of this step unloaded."""
        for child in self._children:
            if child.place in self._bound:
                self._work(child, hook, *args, loads=loads, **kwargs)

    def results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Loads and saves that ended, whoever ended them."""
        for child in self._children:
            if not child.alive and (child.mute or not self._owes(child)):
                continue
            try:
                self._collect(child, finished_req_ids)
            except Exception:  # the supervised boundary of a child that may be switched off already
                child.mute = True
                logger.exception("hybridkv: %s cannot say what became of its transfers", child.name)
                child.supervisor.counters["fault_get_transfer_results"] += 1
                if child.alive:
                    child.supervisor.switch_off("a fault in get_transfer_results")
        finished, failed, saved = self._ledger.take()
        if self._ledger.absorbed:
            self._counters["reports_absorbed"] += self._ledger.absorbed
            self._ledger.absorbed = 0
        return KVConnectorTransferResults(finished_sending=saved, finished_recving=finished, failed_recving=failed)

    def bad_blocks(self) -> set[int]:
        """Blocks that were not loaded, of an engine with one group; others hear of failed requests instead."""
        taken, self._bad_blocks = self._bad_blocks, set()
        return taken if self._groups == 1 else set()

    def report(self) -> MultiReport | None:
        """Each child's own message, and which of them were switched off since the last one."""
        metadata = [
            child.call("build_connector_worker_meta", None, fatal=True) if child.alive else None
            for child in self._children
        ]
        dead = frozenset(child.place for child in self._children if not child.alive)
        totals = all_counters(self._counters, self._children)
        counters = totals - self._told
        if not counters and dead == self._told_dead and not any(part is not None for part in metadata):
            return None
        self._told_dead = dead
        self._told = totals
        return MultiReport(tuple(metadata), dead, dict(counters))

    def stats(self) -> MultiKVConnectorStats | None:
        """The children's own."""
        return child_stats(self._children)

    def events(self) -> MultiEvents | None:
        """The children's own."""
        events = {}
        for child in self._children:
            some = child.call("get_kv_connector_kv_cache_events", None) if child.alive else None
            if some is not None:
                events[child.place] = some
        return MultiEvents(events) if events else None

    def _work(self, child: Child, hook: str, *args: Any, loads: bool = False, **kwargs: Any) -> None:
        """A hook with which a plan is carried out: a fault leaves it half done, so the first one is the last."""
        child.call(hook, None, *args, fatal=True, **kwargs)
        if not child.alive:
            self._bound.discard(child.place)
            if loads:
                self._bad_blocks.update(self._sync_blocks.get(child.place, ()))

    def _collect(self, child: Child, finished_req_ids: set[str]) -> None:
        results = child.connector.get_transfer_results(finished_req_ids)
        blocks = child.connector.get_block_ids_with_load_errors()
        if blocks and self._groups > 1:
            # vLLM would end: such ids are not unique there. All that this child loads is taken for failed.
            self._ledger.taint(child.place)
            self._counters["block_errors_of_several_groups"] += 1
        elif blocks:
            self._bad_blocks.update(blocks)
        self._ledger.loaded(child.place, results.finished_recving or (), results.failed_recving or ())
        self._ledger.sent(child.place, results.finished_sending or ())

    def _owes(self, child: Child) -> bool:
        loading = child.place in self._ledger.loads.values()
        return loading or any(child.place in places for places in self._ledger.saves.values())

    def _plans(self, metadata: Any) -> list[tuple[Child, Any]]:
        plans = metadata.metadata if isinstance(metadata, MultiKVConnectorMetadata) else ()
        return [
            (child, plan)
            for child, plan in zip(self._children, plans, strict=False)
            if child.alive and plan is not None
        ]
