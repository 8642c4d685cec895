"""LoRA adapters: which weights computed what the engine has of a request's prefix.

The engine's hashes name an adapter by its name and path, which do not say which weights were
loaded. So the hashes of an adapter's chunks also cover the digests of its tensors, and workers say
in the report of each step which adapters they had in it (`loaded_adapters`)::

    no report has it       its requests are computed; nothing is looked up or stored
    all ranks have it      the digests of all ranks name what it computes
    a step computed with   the engine's own blocks of that name are mixed: as above, until the
      other weights than     engine's prefix cache is empty
      the engine's blocks

An adapter that vLLM evicts and loads again from the same files has the same digests.
"""

import hashlib
import logging
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hybridkv.core.keys import HASH_BYTES
from hybridkv.vllm.hashing import AdapterKey, adapter_key

logger = logging.getLogger("vllm.hybridkv")

ADAPTERS_MAX = 16384
"""Adapters of which it is kept what they computed; further ones are computed and not stored."""
STEPS_MAX = 4096
"""Planned steps that no worker has reported yet; of older ones nobody knows the adapters."""
NOT_LOADED = "the engine has not loaded it yet"
RELOADED = "the engine loads it anew for each step of the request (load_inplace)"
MIXED = "other weights were loaded under its name; reset_prefix_cache ends that"

LoadedDigests = Mapping[int, Mapping[int, bytes]]
"""The digests of what workers have loaded: by rank, then by lora_int_id."""


class AdapterWeights(NamedTuple):
    """The weights of one adapter as all workers have them."""

    number: int  # vLLM's lora_int_id.
    digests: tuple[bytes, ...]  # HASH_BYTES of each rank, in the order of the ranks.

    @property
    def identity(self) -> bytes:
        """HASH_BYTES that name these weights, whatever their number is."""
        if len({*self.digests}) == 1:
            return self.digests[0]
        return hashlib.blake2b(b"".join(self.digests), digest_size=HASH_BYTES).digest()


@dataclass(eq=False, slots=True)
class AdapterBlocks:
    """What the engine's own prefix cache has of the adapters with one name."""

    key: AdapterKey
    name: str  # For the log.
    computed_by: bytes = b""  # The identity of their weights; empty = it has no block.
    is_mixed: bool = False  # Whether other weights computed some of them, or may have.

    def add(self, weights: AdapterWeights | None) -> None:
        """Note blocks that `weights` computed; None = nobody knows which."""
        if weights is not None and self.computed_by in (b"", weights.identity):
            self.computed_by = weights.identity
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
    """The adapter of one request."""

    number: int  # vLLM's lora_int_id.
    blocks: AdapterBlocks
    reports: "AdapterReports"
    is_reloaded: bool = False
    """Whether the engine loads it in each step of the request, so that nobody knows beforehand
    which weights will compute with what is loaded from outside."""
    awaited: int = 0
    """The plan whose report says whether it is loaded; 0 = the last report is fresh enough."""

    @property
    def loaded(self) -> AdapterWeights | None:
        """What all workers had in the step of the last report; None = some had not loaded it."""
        ranks = range(self.reports.ranks)
        digests = [self.reports.loaded.get(rank, {}).get(self.number, b"") for rank in ranks]
        return AdapterWeights(self.number, tuple(digests)) if all(digests) else None

    @property
    def weights(self) -> AdapterWeights | None:
        """What its chunks are named after now; None = its requests are computed, and not stored."""
        loaded, blocks = self.loaded, self.blocks
        if loaded is None or blocks.is_mixed:
            return None
        return loaded if blocks.computed_by in (b"", loaded.identity) else None

    @property
    def is_awaited(self) -> bool:
        """Whether a report that says more is on its way."""
        return self.reports.heard < self.awaited and not self.blocks.is_mixed

    @property
    def refusal(self) -> str:
        """Why nothing is looked up for its requests."""
        if self.is_reloaded:
            return RELOADED
        return NOT_LOADED if self.loaded is None and not self.blocks.is_mixed else MIXED

    def has_computed(self, identity: bytes, step: int) -> bool:
        """Whether weights of this identity computed all of its blocks up to this step's."""
        blocks = self.blocks
        is_heard = self.reports.heard >= step
        return is_heard and not blocks.is_mixed and blocks.computed_by == identity


@dataclass(eq=False, slots=True)
class AdapterReports:
    """What workers say of their adapters."""

    ranks: int
    loaded: LoadedDigests = field(default_factory=dict)  # As in the last report.
    planned: int = 0  # The number of the last plan.
    heard: int = 0  # The last plan whose step was reported by all workers.


@dataclass(frozen=True, slots=True)
class _PlannedStep:
    """A step with adapters that was not reported yet."""

    number: int  # That of its plan.
    adapters: list[Adapter]


class Adapters:
    """The adapters of all requests of one engine, from their arrival to their end."""

    def __init__(self, ranks: int) -> None:
        self.reports = AdapterReports(ranks)
        self._blocks: dict[AdapterKey, AdapterBlocks] = {}
        self._by_request: dict[str, Adapter] = {}
        self._steps: deque[_PlannedStep] = deque()

    def arrived(self, request: Any) -> Adapter | None:
        """The adapter of a new request; None = it has none."""
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
            # The engine may have loaded it since its last step, and says so after the next one.
            adapter.awaited = self.reports.planned + 1
        self._by_request[request.request_id] = adapter
        return adapter

    def ended(self, request_id: str) -> None:
        """The request ended or was aborted."""
        self._by_request.pop(request_id, None)

    def planned(self, number: int, scheduled: Iterable[str]) -> None:
        """The workers get the plan of this number; these requests compute in its step."""
        self.reports.planned = number
        if self._by_request:
            known = [self._by_request.get(request_id) for request_id in scheduled]
            adapters = [adapter for adapter in known if adapter is not None]
            if adapters:
                self._steps.append(_PlannedStep(number, adapters))
        if len(self._steps) > STEPS_MAX:
            self._settle(self._steps.popleft(), is_reported=False)

    def reported(self, number: int, loaded: LoadedDigests) -> None:
        """The report of the step with this number; 0 = some rank did not begin it."""
        reports = self.reports
        reports.loaded, reports.heard = loaded, max(reports.heard, number)
        while self._steps and self._steps[0].number <= reports.heard:
            step = self._steps.popleft()
            self._settle(step, is_reported=step.number == number)

    def emptied(self) -> None:
        """The engine's prefix cache is empty, and no request that runs has blocks."""
        # What is still to be reported computed for blocks that are gone.
        self._steps.clear()
        self._blocks = {}
        for adapter in self._by_request.values():
            fresh = AdapterBlocks(adapter.blocks.key, adapter.blocks.name)
            adapter.blocks = self._blocks.setdefault(fresh.key, fresh)

    def _settle(self, step: _PlannedStep, *, is_reported: bool) -> None:
        for adapter in step.adapters:
            adapter.blocks.add(adapter.loaded if is_reported else None)
