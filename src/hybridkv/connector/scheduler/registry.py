"""The requests that the scheduler role tracks, and what their states ask for."""

from collections import Counter

from hybridkv.connector.scheduler.explain import explain_request
from hybridkv.connector.scheduler.request_states import RequestAction, RequestEvent, advance
from hybridkv.connector.scheduler.session import DaemonSession
from hybridkv.connector.scheduler.tracked import TrackedRequest
from hybridkv.connector.stats import StatsCollector
from hybridkv.core.geometry import Geometry
from hybridkv.vllm.block_room import BlockRoom
from hybridkv.wire.messages import TEXT_MAX, Release, ReportRequest


class RequestRegistry:
    """Every request from its arrival to its end, by its id and by its lease."""

    def __init__(
        self,
        geometry: Geometry,
        session: DaemonSession,
        room: BlockRoom,
        meter: StatsCollector,
        counters: Counter[str],
    ) -> None:
        self.geometry = geometry
        self.session = session
        self.room = room
        self.meter = meter
        self.counters = counters
        self.by_id: dict[str, TrackedRequest] = {}
        self.by_lease: dict[int, TrackedRequest] = {}
        self._leases = 0

    def advance(self, tracked: TrackedRequest, event: RequestEvent, now: float) -> None:
        """Take the request to its next state and do what the transition asks for."""
        tracked.state, actions = advance(tracked.state, event)
        for action in actions:
            if action is RequestAction.RELEASE_LEASE:
                self.release(tracked, now)
            else:
                self.report(tracked, now)
                self.by_id.pop(tracked.request.request_id, None)
                self.room.ran((tracked.request.request_id,))

    def decline(self, tracked: TrackedRequest, reason: str, detail: str = "") -> None:
        """Count why a request is not served, and keep the reason and what is known besides."""
        self.counters[reason] += 1
        tracked.why = reason, detail

    def settle(self, tracked: TrackedRequest, reason: str, now: float, detail: str = "") -> None:
        """Decline a request that waits for its lookup: it is computed."""
        self.decline(tracked, reason, detail)
        self.advance(tracked, RequestEvent.SETTLED, now)

    def settle_all(self, reason: str, now: float) -> None:
        """Settle every request that waits for its lookup."""
        for tracked in list(self.by_id.values()):
            if tracked.is_prefetching:
                self.settle(tracked, reason, now)

    def open_lease(self, tracked: TrackedRequest) -> int:
        """The number of a new lease, under which the request is found."""
        self._leases += 1
        self.by_lease[self._leases] = tracked
        tracked.lookup.lease = self._leases
        return self._leases

    def release(
        self,
        tracked: TrackedRequest,
        now: float,
        tokens: int = 0,
        loaded_bytes: int = 0,
        failed: bool = False,
    ) -> None:
        """End the request's lease, if it has one; `tokens` and `loaded_bytes` were loaded."""
        lease = tracked.lookup.lease
        if lease:
            self.by_lease.pop(lease, None)
            self.session.send(Release(lease, tokens, loaded_bytes, failed), now)
            tracked.lookup.lease = 0

    def forget_leases(self) -> None:
        """The daemon has ended every lease, as it does when the connection is lost."""
        self.by_lease.clear()
        for tracked in self.by_id.values():
            tracked.lookup.lease = 0

    def report(self, tracked: TrackedRequest, now: float) -> None:
        """Send the daemon what became of a request that ended, for `hybridkv explain`."""
        if not self.session.is_connected:
            return
        explanation = explain_request(
            self.geometry,
            tracked.request.num_prompt_tokens,
            tracked.lookup.hashes,
            tracked.lookup.answer,
            tracked.local_seen,
            tracked.load.total,
            tracked.stored,
            tracked.why,
        )
        request_id = str(tracked.request.request_id)[:TEXT_MAX]
        self.session.send(ReportRequest(request_id, explanation), now)
