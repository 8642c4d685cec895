"""The view that people have of a daemon: its values, their past, a snapshot of everything."""

import math
from collections import deque
from collections.abc import Iterator
from heapq import nlargest
from typing import NamedTuple

from hybridkv.core.metrics import Metric, Values
from hybridkv.daemon.metrics import DAEMON
from hybridkv.daemon.state import DaemonState
from hybridkv.observe import status as shown
from hybridkv.observe.ceiling import CEILING
from hybridkv.observe.history import Sample, Snapshot
from hybridkv.observe.status import StatusReport
from hybridkv.store.index import Namespace
from hybridkv.store.metrics import STORE
from hybridkv.tiers.health import TierState
from hybridkv.tiers.metrics import DEMOTION, PROMOTION, TIER, TIER_PREFIX
from hybridkv.wire.messages import describe_groups
from hybridkv.wire.status import GroupStatus, SessionStatus, Status, TierRefusal, TierStatus

SAMPLES_MAX, STEP_SECONDS = 361, 10.0  # An hour.


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
        tiers = [(tier.name,) for tier in state.tiers]
        self._columns = tuple(
            Metric(name, labels)
            for name, family in self.metric_values().families.items()
            if family.is_sampled
            for labels in (tiers if family.labels else [()])
        )
        self._hour: deque[Sample] = deque(maxlen=SAMPLES_MAX)  # The oldest first.
        self._report = StatusReport(shown.BRIEF_SAMPLES, shown.BRIEF_DECISIONS)

    def tick(self, now: float) -> None:
        """Keep a sample of the values where one is due."""
        if self._started_at is None:
            self._started_at = now
        if now >= self.wakes_at():
            values = self.metric_values()
            numbers = tuple(values.get(metric, 0.0) for metric in self._columns)
            self._hour.append(Sample(now, numbers))

    def wakes_at(self) -> float:
        """Return when the next sample is due."""
        return self._hour[-1].at + STEP_SECONDS if self._hour else -math.inf

    def metric_values(self) -> Values:
        """Return every counter and gauge of the daemon and its tiers."""
        state, values = self._state, Values()
        values.add_numbers(DAEMON, state, state.counters)
        values.add_numbers(STORE, state.store, {})
        values.add_numbers(PROMOTION, state.promotion, {})
        values.add_numbers(DEMOTION, state.demotion, {})
        values.add_numbers(CEILING, state.ceiling, {})
        for tier in state.tiers:
            values.add_numbers(TIER, tier, tier.counted(), TIER_PREFIX, (tier.name,))
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
            hour=tuple(self._hour),
            decisions=tuple(state.history.latest(shown.DECISIONS_SHOWN_MAX)),
        )

    def status(self, now: float) -> Status:
        """Return the status in brief, for a terminal."""
        return self._report.make(self.snapshot(now))

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
                values=_values_of(tier),
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


def _values_of(tier: TierState) -> dict[str, float]:
    """Return the numbers of one tier by the names of their families, without TIER_PREFIX."""
    values = Values()
    values.add_numbers(TIER, tier, tier.counted())
    return {metric.family: number for metric, number in values.items()}
