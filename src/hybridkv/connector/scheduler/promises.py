"""Promises: what this engine computes now, so that other engines of the node wait for it.

The daemon's answer to a lookup says whether others may wait (`Found.promised`). Then this engine
says when it begins to compute the prompt, and when all that it stores of it is committed.
"""

from dataclasses import dataclass

from hybridkv.connector.scheduler.listeners import EngineIdentity, Listener, Step
from hybridkv.connector.scheduler.requests import RequestRegistry, RequestState, TrackedRequest
from hybridkv.connector.scheduler.stores import StorePlanner
from hybridkv.wire.messages import Computed, Computing

SETTLE_STEPS = 4
"""Steps after the last one of a prompt in which what had no slot before may still be stored."""


@dataclass(slots=True)
class OpenPromise:
    """A promise of which the daemon has not heard the end."""

    tracked: TrackedRequest
    preemptions: int  # The engine's count when it was made.
    is_begun: bool = False
    settle_steps: int = SETTLE_STEPS


class OwnPromises(Listener):
    """The promises of one engine, by the lease of the lookup after which each was made."""

    def __init__(self, requests: RequestRegistry, stores: StorePlanner) -> None:
        self._requests = requests
        self._stores = stores
        self.open: dict[int, OpenPromise] = {}

    def on_promised(self, tracked: TrackedRequest | None, lease: int, now: float) -> None:
        """Keep the promise of an answer, or end it where no request waits for that any more."""
        if tracked is None:
            self._requests.daemon.queue_message(Computed(lease), now)
        else:
            self.open[lease] = OpenPromise(tracked, tracked.request.num_preemptions)

    def on_step_planned(self, step: Step, now: float) -> None:
        for lease, promise in self.open.items():
            request_id = promise.tracked.request.request_id
            if not promise.is_begun and request_id in step.output.num_scheduled_tokens:
                promise.is_begun = True
                self._requests.daemon.queue_message(Computing(lease), now)

    def on_reset(self, is_empty: bool, now: float) -> None:
        """End all, because nothing is committed of what is being written now."""
        self._end(list(self.open), now)

    def on_new_identity(self, identity: EngineIdentity, now: float) -> None:
        self._end(list(self.open), now)

    def on_connection_lost(self, now: float) -> None:
        self.open.clear()

    def end_kept_promises(self, now: float) -> bool:
        """Tell the daemon of promises that are kept or given up, after the step's commits.

        Returns True if there were some.
        """
        over = [lease for lease, each in self.open.items() if self._is_over(each)]
        self._end(over, now)
        return bool(over)

    def _end(self, leases: list[int], now: float) -> None:
        for lease in leases:
            del self.open[lease]
            self._requests.daemon.queue_message(Computed(lease), now)

    def _is_over(self, promise: OpenPromise) -> bool:
        tracked, request = promise.tracked, promise.tracked.request
        if request.num_preemptions != promise.preemptions or not self._stores.may_commit:
            return True
        is_gone = tracked.state in (RequestState.DONE, RequestState.DRAINING)
        if self._stores.is_storing(tracked):
            return False
        if is_gone:
            return True
        if request.num_computed_tokens < request.num_prompt_tokens:
            return False
        promise.settle_steps -= 1
        return self._stores.has_settled(tracked) or promise.settle_steps < 0
