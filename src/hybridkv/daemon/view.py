"""The view that people have of a daemon: its values, their past, a snapshot of everything."""

from collections.abc import Iterator
from heapq import nlargest
from typing import NamedTuple

from hybridkv.daemon.state import DaemonState
from hybridkv.observe import status as shown
from hybridkv.observe.catalog import TIER_PREFIX, Values
from hybridkv.observe.history import Sample, Series, Snapshot
from hybridkv.observe.status import StatusReport
from hybridkv.store.index import Namespace
from hybridkv.wire.messages import describe_groups
from hybridkv.wire.status import GroupStatus, SessionStatus, Status, TierRefusal, TierStatus

SAMPLED = (
    "lookups",
    "lookups_hit",
    "lookups_unused",
    "lookups_waited",
    "lookup_wait_seconds",
    "tokens_asked",
    "tokens_hit",
    "ceiling_asked_tokens",
    "ceiling_hit_tokens",
    "ceiling_tokens",
    "bytes_loaded",
    "bytes_stored",
    "evicted",
    "slots_short",
    "loads_failed",
    "tokens_loaded",
    "computing_seconds_spared",
    "loading_seconds",
    "reserves_failed",
    "deadlines_missed",
    "bytes_committed",
    "objects",
    "sessions",
    "leases",
    "lookups_waiting",
)
"""Values whose past is kept."""
SAMPLED_OF_TIERS = ("bytes", "bytes_read", "bytes_written", "failures", "breaker_open")
HOUR_SAMPLES, HOUR_STEP_SECONDS = 361, 10.0
DAY_SAMPLES, DAY_STEP_SECONDS = 1441, 60.0
STATUS_SECONDS = 0.25


class CachedStatus(NamedTuple):
    """A brief status, which is shown again for STATUS_SECONDS."""

    made_at: float
    status: Status


class HeldGroup(NamedTuple):
    """The bytes that one group of a namespace takes."""

    held_bytes: int
    namespace: Namespace
    group_index: int


class DaemonView:
    """Reads the state of a daemon, and changes nothing in it."""

    def __init__(self, state: DaemonState) -> None:
        self._state = state
        self._started_at: float | None = None
        self._columns = (
            *((name, "") for name in SAMPLED),
            *((TIER_PREFIX + name, tier.name) for tier in state.tiers for name in SAMPLED_OF_TIERS),
        )
        self._hour = Series(HOUR_STEP_SECONDS, HOUR_SAMPLES)
        self._day = Series(DAY_STEP_SECONDS, DAY_SAMPLES)
        self._report = StatusReport(is_brief=True)
        self._status: CachedStatus | None = None

    def tick(self, now: float) -> None:
        """Keep a sample of the values where one is due."""
        if self._started_at is None:
            self._started_at = now
        due = [series for series in (self._hour, self._day) if series.due_at <= now]
        if due:
            values = self.metric_values()
            sample = Sample(now, tuple(values.of(name, label) for name, label in self._columns))
            for series in due:
                series.append(sample)

    def wakes_at(self) -> float:
        """Return when the next sample is due."""
        return min(self._hour.due_at, self._day.due_at)

    def metric_values(self) -> Values:
        """Return every counter and gauge of the daemon and its tiers."""
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
            "below_untold": state.subscriptions.unreported,
            "leases": sum(len(session.leases) for session in sessions.all),
            "connections": len(sessions.connections),
            "workers_unmapped": sum(
                connection.is_unmapped for connection in sessions.connections.values()
            ),
            "engines_stale": sum(
                connection.is_stale for connection in sessions.connections.values()
            ),
            "engines_unread": sum(
                connection.unread_modules > 0 for connection in sessions.connections.values()
            ),
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
        """Return everything that is shown at `now`."""
        state = self._state
        return Snapshot(
            now=now,
            started_at=now if self._started_at is None else self._started_at,
            setup=state.setup,
            values=self.metric_values(),
            waits=tuple(state.waits.cumulative),
            groups=tuple(self._groups()),
            sessions=tuple(self._sessions(now)),
            tiers=tuple(self.tiers()),
            columns=self._columns,
            hour=tuple(self._hour.samples),
            day=tuple(self._day.samples),
            decisions=tuple(state.history.latest(shown.DECISIONS_SHOWN_MAX)),
        )

    def status(self, now: float) -> Status:
        """Return the brief status, which may be STATUS_SECONDS old."""
        if self._status is None or not 0.0 <= now - self._status.made_at < STATUS_SECONDS:
            self._status = CachedStatus(now, self._report.make(self.snapshot(now)))
        return self._status.status

    def tiers(self) -> list[TierStatus]:
        """Return the status of each tier below RAM, the fastest first."""
        return [
            TierStatus(
                name=tier.name,
                location=tier.spec.shown,
                write=str(tier.spec.write),
                max_bytes=tier.spec.max_bytes,
                is_open=tier.is_open,
                is_shut=tier.is_shut,
                is_hung=tier.is_hung,
                values=dict(tier.values()),
                refusals=[TierRefusal(*refusal) for refusal in tier.refusals.items()],
            )
            for tier in self._state.tiers
        ]

    def _sessions(self, now: float) -> Iterator[SessionStatus]:
        for session in self._state.sessions.all[: shown.SESSIONS_SHOWN_MAX]:
            yield SessionStatus(
                engine_id=session.engine_id,
                model=session.model.name if session.model is not None else "",
                identity=session.namespace.identity.hex()[:12],
                chunk_tokens=session.geometry.chunk_tokens,
                groups=describe_groups(session.geometry.groups),
                leases=len(session.leases),
                writing_bytes=session.writing_bytes,
                is_connected=session.engine_connection is not None,
                since=round(now - session.since, 3),
            )

    def _groups(self) -> Iterator[GroupStatus]:
        """Yield the groups that take most, the largest first, and then the sum of the others."""
        sessions = self._state.sessions
        held = [
            HeldGroup(namespace.held_bytes[index], namespace, index)
            for namespace in sessions.namespaces.values()
            if namespace.entries
            for index in range(len(namespace.gids))
        ]
        largest = nlargest(shown.GROUPS_SHOWN_MAX, held, key=lambda group: group.held_bytes)
        for size, namespace, index in largest:
            model = sessions.models.get(namespace.identity)
            yield GroupStatus(
                identity=namespace.identity.hex()[:12],
                model=model.name if model is not None else "",
                gid=namespace.gids[index],
                kind=str(model.geometry.groups[index].kind) if model and namespace.shapes else "",
                objects=namespace.held_objects[index],
                held_bytes=size,
            )
        if len(held) > len(largest):
            objects = sum(sum(namespace.held_objects) for namespace in sessions.namespaces.values())
            objects -= sum(group.namespace.held_objects[group.group_index] for group in largest)
            size = sum(group.held_bytes for group in held)
            size -= sum(group.held_bytes for group in largest)
            yield GroupStatus(
                identity="", model="", gid=0, kind="", objects=objects, held_bytes=size
            )
