"""What people are shown of a daemon: its values by name, their past, and a snapshot of everything."""

from collections.abc import Iterator
from functools import lru_cache
from heapq import nlargest
from typing import TYPE_CHECKING

from hybridkv.core.buckets import Buckets
from hybridkv.core.geometry import Geometry
from hybridkv.core.series import Sample, Series
from hybridkv.server.sessions import SESSIONS_MAX, Session, model_of
from hybridkv.server.snapshot import (
    DECISIONS_SHOWN_MAX,
    GROUPS_SHOWN_MAX,
    SESSIONS_SHOWN_MAX,
    GroupFacts,
    SessionFacts,
    Snapshot,
    TierFacts,
)
from hybridkv.storage.line import Line

if TYPE_CHECKING:
    from hybridkv.server.daemon import Daemon

SAMPLED = (
    *("lookups", "lookups_hit", "lookups_waited", "lookup_wait_seconds", "tokens_asked", "tokens_hit"),
    *("ceiling_asked_tokens", "ceiling_hit_tokens", "ceiling_tokens"),
    *("bytes_loaded", "bytes_stored", "evicted", "slots_short", "loads_failed", "deadlines_missed"),
    *("bytes_committed", "objects", "sessions", "leases", "lookups_waiting"),
)
"""Values whose past is kept."""
SAMPLED_OF_TIERS = ("bytes", "bytes_read", "bytes_written", "failures", "breaker_open")
HOUR = 10.0, 361
"""Seconds between two samples, and how many are kept."""
DAY = 60.0, 1441


class Showing:
    """Reads a daemon, and changes nothing in it."""

    def __init__(self, daemon: "Daemon") -> None:
        self._daemon = daemon
        self._started_at: float | None = None
        self.waits = Buckets()
        """Seconds that lookups waited for tiers."""
        lines = daemon.lines
        self._columns = (*SAMPLED, *(f"tier_{line.name}_{name}" for line in lines for name in SAMPLED_OF_TIERS))
        self._series = Series(*HOUR), Series(*DAY)

    def tick(self, now: float) -> None:
        """Keep a sample of the values where one is due."""
        if self._started_at is None:
            self._started_at = now
        if now >= self.wakes_at():
            self._sample(now)

    def wakes_at(self) -> float:
        """When the next sample is due."""
        return min(series.due_at for series in self._series)

    def values(self) -> dict[str, float]:
        """Every counter and gauge by name."""
        daemon = self._daemon
        return {
            **{name: float(value) for name, value in daemon.counters.items()},
            "objects": float(daemon.store.objects),
            "bytes_committed": float(daemon.store.committed_bytes),
            "bytes_writing": float(daemon.store.writing_bytes),
            "bytes_held": float(sum(slot.size_bytes for slots in daemon.held.values() for slot in slots)),
            "bytes_reserved": float(daemon.store.extents.limit_bytes),
            "bytes_arena": float(daemon.arena_bytes),
            "bytes_protected": float(daemon.store.protected_bytes),
            "evicted": float(daemon.store.evicted),
            "over_quota": float(daemon.store.over_quota),
            "tenants": float(daemon.store.tenants),
            "duplicates": float(daemon.store.duplicates),
            "sessions": float(len(daemon.sessions)),
            "watching": float(len(daemon.removals)),
            "removals_overflowed": float(daemon.removals.overflows),
            "leases": float(sum(len(session.leases) for session in daemon.sessions)),
            "connections": float(len(daemon.connections)),
            "spans_dropped": float(0 if daemon.spans is None else daemon.spans.dropped),
            "lookups_waited": float(self.waits.cumulative[-1][1]),
            "lookup_wait_seconds": self.waits.total,
            "ceiling_lookups": float(daemon.ceiling.lookups),
            "ceiling_lookups_left_out": float(daemon.ceiling.lookups_left_out),
            "ceiling_asked_tokens": float(daemon.ceiling.asked_tokens),
            "ceiling_hit_tokens": float(daemon.ceiling.hit_tokens),
            "ceiling_tokens": float(daemon.ceiling.ceiling_tokens),
            "ceiling_chunks": float(len(daemon.ceiling)),
            "ceiling_chunks_max": float(daemon.ceiling.remembered_max),
            "ceiling_chunks_forgotten": float(daemon.ceiling.forgotten),
            **dict(self._tier_values()),
        }

    def snapshot(self, now: float) -> Snapshot:
        """What there is to show."""
        daemon = self._daemon
        series_hour, series_day = self._series
        return Snapshot(
            now,
            now if self._started_at is None else self._started_at,
            self.values(),
            tuple(self.waits.cumulative),
            self.waits.total,
            tuple(self._group_facts()),
            tuple(map(_session_facts, daemon.sessions[:SESSIONS_SHOWN_MAX])),
            tuple(map(_tier_facts, daemon.lines)),
            self._columns,
            series_hour.samples,
            series_day.samples,
            tuple(daemon.history.latest(DECISIONS_SHOWN_MAX)),
        )

    def _sample(self, now: float) -> None:
        values = self.values()
        sample = Sample(now, tuple(values.get(name, 0.0) for name in self._columns))
        for series in self._series:
            if series.due_at <= now:
                series.add(sample)

    def _group_facts(self) -> Iterator[GroupFacts]:
        """What takes most first."""
        daemon = self._daemon
        held = [
            (namespace.held_bytes[index], namespace, index)
            for namespace in daemon.namespaces.values()
            if namespace.entries
            for index in range(len(namespace.gids))
        ]
        shown = nlargest(GROUPS_SHOWN_MAX, held, key=lambda one: one[0])
        for size, namespace, index in shown:
            geometry, model = daemon.geometries.get(namespace.identity, (None, ""))
            kind = "" if geometry is None or not namespace.shapes else str(geometry.groups[index].kind)
            objects = namespace.held_objects[index]
            yield GroupFacts(namespace.identity.hex()[:12], model, namespace.gids[index], kind, objects, size)
        if len(held) > len(shown):
            objects = sum(sum(namespace.held_objects) for namespace in daemon.namespaces.values())
            objects -= sum(namespace.held_objects[index] for _, namespace, index in shown)
            size = sum(size for size, *_ in held) - sum(size for size, *_ in shown)
            yield GroupFacts("", "", 0, "", objects, size)

    def _tier_values(self) -> Iterator[tuple[str, float]]:
        daemon = self._daemon
        if daemon.lines:
            yield "lookups_waiting", float(len(daemon.promotion))
            yield "writes_waiting", float(daemon.demotion.waiting)
            for name, count in daemon.promotion.counters.items():
                yield name, float(count)
        for line in daemon.lines:
            for name, value in line.values():
                yield f"tier_{line.name}_{name}", value


def _session_facts(session: Session) -> SessionFacts:
    return SessionFacts(
        session.engine_id,
        model_of(session),
        session.namespace.identity.hex()[:12],
        session.geometry.chunk_tokens,
        groups_of(session.geometry),
        len(session.leases),
        session.writing_bytes,
        session.engine_connection is not None,
        session.since,
    )


def _tier_facts(line: Line) -> TierFacts:
    location, write = line.spec.shown, str(line.spec.write)
    return TierFacts(line.name, location, write, line.is_open, line.is_shut, line.is_hung, dict(line.values()))


@lru_cache(maxsize=SESSIONS_MAX)
def groups_of(geometry: Geometry) -> str:
    """Every group as gid:kind/tokens per block."""
    return " ".join(f"{group.gid}:{group.kind}/{group.tokens_per_block}" for group in geometry.groups)
