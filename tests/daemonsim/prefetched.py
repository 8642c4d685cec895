"""The rules that prefetches must keep, seen from outside."""

from typing import Any

from hybridkv.tiers.jobs import LIMITS, JobKind
from hybridkv.tiers.promotion import Wait
from hybridkv.tiers.shared_reads import EXPECTED_SHARE, SPARE_READS
from tests.daemonsim.oracle import Witness
from tests.daemonsim.system import untraced


class Prefetched(Witness):
    """Prefetches: they go after lookups, have their share of RAM, and evict nothing protected."""

    _is_prefetch = False  # Whether a prefetch begins a job at this moment.

    def attend(self, server: Any) -> None:
        """Watch a new life of the daemon."""
        daemon = server.daemon
        store, promotion = daemon.store, daemon.promotion
        grant, commit, begin_job = store.grant, store.commit, promotion.reads.begin_job

        def protected() -> set[Any]:
            with untraced():
                return {slot for slot in store.queue.items if store.queue.is_protected(slot)}

        def on_grant(*arguments: Any, **named: Any) -> Any:
            before = protected() if self._is_prefetch else set()
            granted = grant(*arguments, **named)
            is_spared = not before or before <= protected()
            self._expect(is_spared, "a protected object is evicted for a prefetch")
            return granted

        def on_commit(*arguments: Any, is_expected: bool = False) -> Any:
            before = protected() if is_expected else set()
            is_stored = commit(*arguments, is_expected=is_expected)
            if is_expected:
                self._expect(before == protected(), "what nobody asked for is protected")
            return is_stored

        def on_job(needs: Any, now: float, is_prefetch: bool = False) -> int:
            lookups = promotion.lookups.values()
            waits = {lookup.story[-1] for lookup in lookups if lookup.story}
            wanted = waits & {Wait.ANSWERS, Wait.TIER, Wait.SLOT, Wait.OBJECTS}
            self._expect(not (is_prefetch and wanted), "a prefetch reads before a lookup", wanted)
            running = sum(job.kind is JobKind.READ for job in needs[0].tier.running)
            is_left = not is_prefetch or running < LIMITS[JobKind.READ] - SPARE_READS
            self._expect(is_left, "a prefetch takes the last threads of a tier")
            self._is_prefetch = is_prefetch
            begun: int = begin_job(needs, now, is_prefetch)
            self._is_prefetch = False
            taken = sum(
                r.slot.size_bytes for r in promotion.reads.running.values() if r.is_prefetch
            )
            share = len(store) // EXPECTED_SHARE
            is_within = taken + store.expected_bytes <= share
            self._expect(is_within, "prefetches take more than their share")
            return begun

        store.grant, store.commit, promotion.reads.begin_job = on_grant, on_commit, on_job
