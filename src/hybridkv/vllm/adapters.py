"""LoRA adapters: which weights computed the engine's blocks of a request's prefix.

The engine's hashes name an adapter by its name and path, which do not say which weights were
loaded. So the hashes of an adapter's chunks also cover the digests of its tensors. Workers name in
the report of each step the adapters that they had loaded (`loaded_adapters`)::

    no report has it       the adapter's requests are computed; nothing is looked up or stored
    all ranks have it      the digests of all ranks name what the adapter computes
    a step computed with   the engine's own blocks of that name are mixed: nothing is looked up or
      other weights than     stored until the engine's prefix cache is empty
      the engine's blocks

An adapter that vLLM evicts and loads again from the same files has the same digests.
"""

import hashlib
import logging
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from hybridkv.core.keys import HASH_BYTES
from hybridkv.vllm.hashing import AdapterKey, adapter_key

logger = logging.getLogger("vllm.hybridkv")

ADAPTERS_MAX = 16384
"""Names of adapters whose blocks are followed. Requests of further adapters are only computed."""
STEPS_MAX = 4096
"""Planned steps that no worker has reported yet. Older ones count as computed by any weights."""
LoadedDigests = Mapping[int, Mapping[int, bytes]]
"""The digests of the adapters that workers have loaded: by rank, then by lora_int_id."""


class AdapterRefusal(StrEnum):
    """Why nothing is looked up for the requests of an adapter, as `hybridkv explain` prints it."""

    NOT_LOADED = "the engine has not loaded it yet"
    RELOADED = "the engine loads it anew for each step of the request (load_inplace)"
    MIXED = "other weights were loaded under its name; reset_prefix_cache ends that"


class AdapterWeights(NamedTuple):
    """The weights of one adapter as all workers have them."""

    number: int  # The lora_int_id of vLLM.
    digests: tuple[bytes, ...]  # HASH_BYTES of each rank, in the order of the ranks.

    @property
    def content_hash(self) -> bytes:
        """HASH_BYTES that name these weights, whatever the adapter's number is."""
        if len({*self.digests}) == 1:
            return self.digests[0]
        return hashlib.blake2b(b"".join(self.digests), digest_size=HASH_BYTES).digest()


@dataclass(eq=False, slots=True)
class AdapterBlocks:
    """The blocks in the engine's own prefix cache of the adapters with one name."""

    key: AdapterKey
    name: str  # For the log.
    computed_by: bytes = b""  # The identity of the weights that computed them; empty = no blocks.
    is_mixed: bool = False  # True if different weights computed them, or may have.

    def note_blocks(self, weights: AdapterWeights | None) -> None:
        """Note blocks that `weights` computed. None = it is not known which weights did."""
        if weights is not None and self.computed_by in (b"", weights.content_hash):
            self.computed_by = weights.content_hash
        elif not self.is_mixed:
            self.is_mixed = True
            logger.warning(
                "hybridkv: the LoRA adapter %s has other weights than those that computed what the "
                "engine's own prefix cache has of it, or may have; nothing of it is loaded or "
                "stored until that is reset (reset_prefix_cache) while no request runs",
                self.name,
            )


@dataclass(eq=False, slots=True)
class Adapter:
    """The adapter of one request, and whether chunks can be named after its weights."""

    number: int  # The lora_int_id of vLLM.
    blocks: AdapterBlocks
    reports: "AdapterReports"
    is_reloaded: bool = False
    """True if the engine loads it in each step of the request. Then nobody knows beforehand which
    weights will compute with what is loaded from outside."""
    awaited: int = 0
    """The plan whose report says whether it is loaded. 0 = the last report says it."""

    @property
    def loaded(self) -> AdapterWeights | None:
        """The weights that all ranks had in the last reported step. None = some rank had none."""
        ranks = range(self.reports.ranks)
        digests = [self.reports.loaded.get(rank, {}).get(self.number, b"") for rank in ranks]
        return AdapterWeights(self.number, tuple(digests)) if all(digests) else None

    @property
    def weights(self) -> AdapterWeights | None:
        """The weights that name its chunks now. None = its requests are computed and not stored."""
        loaded, blocks = self.loaded, self.blocks
        if loaded is None or blocks.is_mixed:
            return None
        return loaded if blocks.computed_by in (b"", loaded.content_hash) else None

    @property
    def is_awaited(self) -> bool:
        """True while the report is on its way that says whether the adapter is loaded."""
        return self.reports.heard < self.awaited and not self.blocks.is_mixed

    @property
    def refusal(self) -> AdapterRefusal:
        """The reason why nothing is looked up for its requests, where `weights` is None."""
        if self.is_reloaded:
            return AdapterRefusal.RELOADED
        if self.loaded is None and not self.blocks.is_mixed:
            return AdapterRefusal.NOT_LOADED
        return AdapterRefusal.MIXED

    def has_computed(self, identity: bytes, step: int) -> bool:
        """Return True if weights of this identity computed all of its blocks up to this step."""
        blocks = self.blocks
        is_heard = self.reports.heard >= step
        return is_heard and not blocks.is_mixed and blocks.computed_by == identity


@dataclass(eq=False, slots=True)
class AdapterReports:
    """The last report of the workers' adapters, and the last plan."""

    ranks: int
    loaded: LoadedDigests = field(default_factory=dict)  # As in the last report.
    planned: int = 0  # The number of the last plan.
    heard: int = 0  # The number of the last plan whose step all workers have reported.


@dataclass(frozen=True, slots=True)
class _PlannedStep:
    """A step with adapters that was not reported yet."""

    number: int  # The number of the step's plan.
    adapters: list[Adapter]


class Adapters:
    """The adapters of all requests of one engine, from their arrival to their end."""

    def __init__(self, ranks: int) -> None:
        self.reports = AdapterReports(ranks)
        self._blocks: dict[AdapterKey, AdapterBlocks] = {}
        self._by_request: dict[str, Adapter] = {}
        self.unreported_steps: deque[_PlannedStep] = deque()

    def on_new_request(self, request: Any) -> Adapter | None:
        """Return the adapter of a new request. None = the request has none."""
        lora = getattr(request, "lora_request", None)
        if lora is None:
            return None
        key = adapter_key(request)
        blocks = self._blocks.get(key)
        if blocks is None:
            blocks = AdapterBlocks(key, lora.lora_name, is_mixed=len(self._blocks) >= ADAPTERS_MAX)
            if not blocks.is_mixed:
                self._blocks[key] = blocks
        is_reloaded = bool(getattr(lora, "load_inplace", False))
        adapter = Adapter(lora.lora_int_id, blocks, self.reports, is_reloaded)
        is_idle = self.reports.heard == self.reports.planned
        if is_idle and adapter.loaded is None and not is_reloaded:
            # The engine may have loaded it since its last step; the next report says so.
            adapter.awaited = self.reports.planned + 1
        self._by_request[request.request_id] = adapter
        return adapter

    def on_request_ended(self, request_id: str) -> None:
        """Forget a request that ended or was aborted."""
        self._by_request.pop(request_id, None)

    def on_step_planned(self, number: int, scheduled: Iterable[str]) -> None:
        """Note that workers get the plan of this number, in whose step these requests compute."""
        self.reports.planned = number
        if self._by_request:
            known = [self._by_request.get(request_id) for request_id in scheduled]
            adapters = [adapter for adapter in known if adapter is not None]
            if adapters:
                self.unreported_steps.append(_PlannedStep(number, adapters))
        if len(self.unreported_steps) > STEPS_MAX:
            self._settle(self.unreported_steps.popleft(), is_reported=False)

    def on_report(self, number: int, loaded: LoadedDigests) -> None:
        """Take the report of the step with this number. 0 = some rank did not begin it."""
        reports = self.reports
        reports.loaded, reports.heard = loaded, max(reports.heard, number)
        while self.unreported_steps and self.unreported_steps[0].number <= reports.heard:
            step = self.unreported_steps.popleft()
            self._settle(step, is_reported=step.number == number)

    def on_cache_emptied(self) -> None:
        """Forget all blocks: the engine's prefix cache is empty, and no running request has any."""
        # The steps that are still to be reported computed blocks that are gone.
        self.unreported_steps.clear()
        self._blocks = {}
        for adapter in self._by_request.values():
            fresh = AdapterBlocks(adapter.blocks.key, adapter.blocks.name)
            adapter.blocks = self._blocks.setdefault(fresh.key, fresh)

    def _settle(self, step: _PlannedStep, *, is_reported: bool) -> None:
        """Note which weights computed a step's blocks, as the last report says if it is its own."""
        for adapter in step.adapters:
            adapter.blocks.note_blocks(adapter.loaded if is_reported else None)
