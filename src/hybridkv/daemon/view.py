"""What people are shown of a daemon: its values, their past, and a snapshot of everything."""

from collections.abc import Iterator
from heapq import nlargest

from hybridkv.daemon.state import DaemonState
from hybridkv.observe import status as shown
from hybridkv.observe.catalog import TIER_PREFIX, Values
from hybridkv.observe.history import Sample, Series, Snapshot
from hybridkv.observe.status import StatusReport
from hybridkv.wire.messages import describe_groups
from hybridkv.wire.status import GroupStatus, SessionStatus, Status, TierStatus

SAMPLED = (
    *("lookups", "lookups_hit", "lookups_waited", "lookup_wait_seconds"),
    *("tokens_asked", "tokens_hit", "ceiling_asked_tokens", "ceiling_hit_tokens"),
    *("ceiling_tokens", "bytes_loaded", "bytes_stored", "evicted", "slots_short", "loads_failed"),
    *("tokens_loaded", "computing_seconds_spared", "loading_seconds", "reserves_failed"),
    *("deadlines_missed", "bytes_committed", "objects", "sessions", "leases", "lookups_waiting"),
)
"""Values whose past is kept."""
SAMPLED_OF_TIERS = ("bytes", "bytes_read", "bytes_written", "failures", "breaker_open")
HOUR = 10.0, 361  # Seconds between two samples, and how many are kept.
DAY = 60.0, 1441
STATUS_SECONDS = 0.25


class DaemonView:
    """Reads the state of a daemon, and changes nothing in it."""

    def __init__(self, state: DaemonState) -> None:
        self._state = state
        self._started_at: float | None = None
        self._columns = (
            *((name, "") for name in SAMPLED),
            *((TIER_PREFIX + name, tier.name) for tier in state.tiers for name in SAMPLED_OF_TIERS),
        )
        self._hour, self._day = Series(*HOUR), Series(*DAY)
        self._report = StatusReport(is_brief=True)
        self._status: tuple[float, Status] | None = None
        """The brief status that was made last, and when."""

    def tick(self, now: float) -> None:
        """Keep a sample of the values where one is due."""
        if self._started_at is None:
            self._started_at = now
        due = [series for series in (self._hour, self._day) if series.due_at <= now]
        if due:
            values = self.values()
            sample = Sample(now, tuple(values.of(*column) for column in self._columns))
            for series in due:
                series.add(sample)

    def wakes_at(self) -> float:
        """When the next sample is due."""
        return min(self._hour.due_at, self._day.due_at)

    def values(self) -> Values:
        """Every counter and gauge."""
        state = self._state
        store, sessions, ceiling = state.store, state.sessions, state.ceiling
        held = (slot.size_bytes for slots in sessions.held.values() for slot in slots)
        plain = {
            **state.counters,
            "objects": store.objects,
            "bytes_committed": store.committed_bytes,
            "bytes_writing": store.writing_bytes,
            "bytes_held": sum(held),
            "bytes_reserved": store.extents.limit_bytes,
            "bytes_arena": state.welcome.slots_bytes,
            "bytes_protected": store.queue.protected_bytes,
            "evicted": store.evicted,
            "over_quota": store.over_quota,
            "tenants": len(store.tenants),
            "duplicates": store.duplicates,
            "sessions": len(sessions.all),
            "watching": len(state.subscriptions),
            "removals_overflowed": state.subscriptions.overflows,
            "below_untold": state.subscriptions.untold,
            "leases": sum(len(session.leases) for session in sessions.all),
            "connections": len(sessions.connections),
            "workers_unmapped": sum(one.is_unmapped for one in sessions.connections.values()),
            "engines_stale": sum(one.is_stale for one in sessions.connections.values()),
            "spans_dropped": 0 if state.spans is None else state.spans.dropped,
            "lookups_waited": state.waits.cumulative[-1][1],
            "lookup_wait_seconds": state.waits.total,
            "computing_seconds_spared": state.saved.computing_seconds,
            "loading_seconds": state.saved.loading_seconds,
            "ceiling_lookups": ceiling.lookups,
            "ceiling_lookups_left_out": ceiling.lookups_left_out,
            "ceiling_asked_tokens": ceiling.asked_tokens,
            "ceiling_hit_tokens": ceiling.hit_tokens,
            "ceiling_tokens": ceiling.ceiling_tokens,
            "ceiling_chunks": len(ceiling),
            "ceiling_chunks_max": ceiling.remembered_max,
            "ceiling_chunks_forgotten": ceiling.forgotten,
        }
        if state.tiers:
            plain["lookups_waiting"] = len(state.promotion)
            plain["writes_waiting"] = state.demotion.waiting
        values = Values({(name, ""): float(value) for name, value in plain.items()})
        for counts in (state.labelled, state.promotion.counters):
            values.update((key, float(count)) for key, count in counts.items())
        for tier in state.tiers:
            values.update(((TIER_PREFIX + name, tier.name), value) for name, value in tier.values())
        return values

    def snapshot(self, now: float) -> Snapshot:
        """Everything that is shown at `now`."""
        state = self._state
        return Snapshot(
            now,
            now if self._started_at is None else self._started_at,
            state.setup,
            self.values(),
            tuple(state.waits.cumulative),
            tuple(self._groups()),
            tuple(self._sessions(now)),
            tuple(self.tiers()),
            self._columns,
            tuple(self._hour.samples),
            tuple(self._day.samples),
            tuple(state.history.latest(shown.DECISIONS_SHOWN_MAX)),
        )

    def status(self, now: float) -> Status:
        """The brief status; it may be STATUS_SECONDS old."""
        if self._status is None or not 0.0 <= now - self._status[0] < STATUS_SECONDS:
            self._status = now, self._report.make(self.snapshot(now))
        return self._status[1]

    def tiers(self) -> list[TierStatus]:
        """Every tier below RAM."""
        return [
            TierStatus(
                *(tier.name, tier.spec.shown, str(tier.spec.write), tier.spec.max_bytes),
                *(tier.is_open, tier.is_shut, tier.is_hung),
                values=dict(tier.values()),
            )
            for tier in self._state.tiers
        ]

    def _sessions(self, now: float) -> Iterator[SessionStatus]:
        for session in self._state.sessions.all[: shown.SESSIONS_SHOWN_MAX]:
            yield SessionStatus(
                session.engine_id,
                session.model.name if session.model is not None else "",
                session.namespace.identity.hex()[:12],
                session.geometry.chunk_tokens,
                describe_groups(session.geometry.groups),
                len(session.leases),
                session.writing_bytes,
                session.engine_connection is not None,
                round(now - session.since, 3),
            )

    def _groups(self) -> Iterator[GroupStatus]:
        """The groups that take most first, and the sum of the others."""
        sessions = self._state.sessions
        held = [
            (namespace.held_bytes[index], namespace, index)
            for namespace in sessions.namespaces.values()
            if namespace.entries
            for index in range(len(namespace.gids))
        ]
        largest = nlargest(shown.GROUPS_SHOWN_MAX, held, key=lambda one: one[0])
        for size, namespace, index in largest:
            geometry, model = sessions.geometries.get(namespace.identity, (None, ""))
            kind = str(geometry.groups[index].kind) if geometry and namespace.shapes else ""
            identity, objects = namespace.identity.hex()[:12], namespace.held_objects[index]
            yield GroupStatus(identity, model, namespace.gids[index], kind, objects, size)
        if len(held) > len(largest):
            objects = sum(sum(one.held_objects) for one in sessions.namespaces.values())
            objects -= sum(namespace.held_objects[index] for _, namespace, index in largest)
            size = sum(size for size, *_ in held) - sum(size for size, *_ in largest)
            yield GroupStatus("", "", 0, "", objects, size)
