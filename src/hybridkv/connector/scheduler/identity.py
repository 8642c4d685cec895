"""The weights that the engine computes with, and the identity that the daemon knows it by."""

import logging
from collections.abc import Callable

from hybridkv.connector import metrics
from hybridkv.connector.messages import StepReport
from hybridkv.connector.scheduler.listeners import EngineIdentity, Listener, Step
from hybridkv.connector.scheduler.requests import RequestRegistry
from hybridkv.connector.scheduler.weights import WeightsWatch
from hybridkv.wire.messages import ReportStale

logger = logging.getLogger("vllm.hybridkv")


class IdentityWatch(Listener):
    """Takes the workers' answers about their weights, and says what follows from them."""

    def __init__(
        self,
        requests: RequestRegistry,
        weights: WeightsWatch,
        take_identity: Callable[[EngineIdentity], None],
    ) -> None:
        """`take_identity` is called with the identity of weights that have changed."""
        self._requests = requests
        self._weights = weights
        self._take_identity = take_identity
        self._reported = ReportStale(False)  # What the daemon was last told.

    def on_step_planned(self, step: Step, now: float) -> None:
        step.plan.question, step.plan.eras = self._weights.question, self._weights.eras
        self._report_staleness(now)

    def on_report(self, report: StepReport, now: float) -> None:
        was_stale = self._weights.is_stale
        digests = self._weights.on_answers(report.weights)
        if self._weights.is_stale and not was_stale:
            self._requests.counters[metrics.WEIGHTS_STALE] += 1
            logger.warning(
                "hybridkv: the weights changed, and the engine's own prefix cache has blocks of "
                "the old ones, or may have; nothing is loaded or stored until it is reset "
                "(reset_prefix_cache) while no request runs"
            )
        self._report_staleness(now)
        if digests is not None:
            self._take_identity(EngineIdentity.of_facts(self._weights.facts_of(digests)))
            self._weights.is_identified = True

    def on_reset(self, is_empty: bool, now: float) -> None:
        """Ask the workers for their weights.

        Until all of them have answered, nothing is offered and no stored object is committed.
        """
        self._weights.on_reset(is_empty)

    def on_connection_lost(self, now: float) -> None:
        self._reported = ReportStale(False)

    def _report_staleness(self, now: float) -> None:
        """Report to the daemon what is not served or shared, once a connection, and its end."""
        report = ReportStale(self._weights.is_stale, self._weights.unread)
        if self._requests.daemon.is_connected and report != self._reported:
            self._reported = report
            self._requests.daemon.queue_message(report, now)
