"""The moments of an engine to which weights, adapters, stores, lookups and others listen.

`SchedulerRole.listeners` has them in the order in which they hear of each moment.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hybridkv.connector.messages import StepPlan, StepReport
from hybridkv.core.keys import fingerprint

Tables = Callable[[str], Sequence[Sequence[int]]]
"""Returns a request's present block tables, one for each of the engine's groups."""


class EngineIdentity(NamedTuple):
    """The identity of an engine's bytes: they may be reused where all of this agrees."""

    namespace: bytes
    facts: Mapping[str, object]
    """What the namespace is the fingerprint of, for people."""

    @classmethod
    def of_facts(cls, facts: Mapping[str, object]) -> "EngineIdentity":
        """Return the identity that is made of these facts."""
        return cls(fingerprint(facts), facts)


@dataclass(slots=True)
class Step:
    """A step that the engine has scheduled, and its plan, to which listeners add."""

    plan: StepPlan
    output: Any  # vLLM's SchedulerOutput.
    tables: Tables
    can_store: bool  # True if there is a connection, and the workers map the daemon's arena.


class Listener:
    """A part of the scheduler role that hears of moments. What it does not override does nothing.

    `now` is monotonic seconds.
    """

    def on_step_planned(self, step: Step, now: float) -> None:
        """The engine has scheduled a step. What the workers are to do goes into its plan."""

    def on_report(self, report: StepReport, now: float) -> None:
        """The workers have reported a step."""

    def on_reset(self, is_empty: bool, now: float) -> None:
        """The engine reset its prefix cache, and `is_empty` if no block is left.

        Its weights may have changed.
        """

    def on_new_identity(self, identity: EngineIdentity, now: float) -> None:
        """The weights have changed, and no block of the old ones is left in the engine."""

    def on_connection_lost(self, now: float) -> None:
        """The connection is lost, and with it all leases and slots that the daemon lent."""
