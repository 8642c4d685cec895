"""The live audit: when one is due, and what came of one.

Of some hits the engine computes the last chunk although it is stored, and the workers compare both.
An audit costs the tokens of one chunk, or nothing where the chunk is computed anyway.
"""

from dataclasses import dataclass, field
from enum import StrEnum

AUDIT_SHARE = 0.001
"""The tokens that are computed for audits, as a share of those that are computed anyway."""
FIRST_AUDITS_MAX = 8
"""Audits in which nothing could be compared, after which an identity's first one waits for the
budget like all others."""


class AuditOutcome(StrEnum):
    """What came of a live audit, or of one of its objects."""

    PASSED = "passed"  # The engine computed what is stored, within the rounding of its data type.
    DIFFERED = "differed"  # It computed something else.
    UNMADE = "unmade"  # Nothing could be compared.


@dataclass(frozen=True, slots=True)
class AuditVerdict:
    """What one rank says of one object.

    `error` and `error_max` are relative to the stored numbers of `layer`, which is the layer that
    is farthest off; empty where no numbers were compared.
    """

    outcome: AuditOutcome
    layer: str = ""
    error: float = 0.0
    error_max: float = 0.0

    @property
    def sentence(self) -> str:
        """The layer and its error, for people; empty where there are none."""
        if not self.layer:
            return ""
        return f"layer {self.layer} differs by {self.error:.2g}, {self.error_max:.2g} is allowed"


def worst(verdicts: "list[AuditVerdict]") -> AuditVerdict:
    """The verdict that stands for all: one that differs, else the farthest off that passed.

    >>> worst([]).outcome
    <AuditOutcome.UNMADE: 'unmade'>
    """
    order = (AuditOutcome.UNMADE, AuditOutcome.PASSED, AuditOutcome.DIFFERED)

    def rank(verdict: AuditVerdict) -> tuple[int, float]:
        allowed = verdict.error_max or 1.0
        return order.index(verdict.outcome), verdict.error / allowed

    return max(verdicts, key=rank, default=AuditVerdict(AuditOutcome.UNMADE))


@dataclass(eq=False, slots=True)
class AuditBudget:
    """When an engine audits a hit. A successor of the scheduler role goes on with it."""

    share: float  # As `Settings.audit`; 0.0 = never.
    prefilled_tokens: int = 0  # Prompt tokens that requests computed.
    spent_tokens: int = 0
    """Tokens of the chunks that were audited. One that is computed anyway counts too, because
    comparing has its cost as well."""
    judged: set[bytes] = field(default_factory=set)
    """The identities of which an audit has compared something since the engine has them."""
    cut_off: set[bytes] = field(default_factory=set)
    """The identities of which an audit has differed: this engine uses them no more."""
    unmade: int = 0  # Audits of the present identity in which nothing could be compared.

    def is_due(self, identity: bytes) -> bool:
        """Whether the next hit of this identity is to be audited."""
        if not self.share or identity in self.cut_off:
            return False
        if identity not in self.judged and self.unmade < FIRST_AUDITS_MAX:
            return True
        return self.spent_tokens <= self.share * self.prefilled_tokens

    def identify(self) -> None:
        """The weights were read anew: the next hit is a first one again."""
        self.judged.clear()
        self.unmade = 0

    def ended(self, identity: bytes, outcome: AuditOutcome) -> None:
        """Count what came of an audit."""
        if outcome is AuditOutcome.UNMADE:
            self.unmade += 1
            return
        self.judged.add(identity)
        if outcome is AuditOutcome.DIFFERED:
            self.cut_off.add(identity)
