"""The live audit: when the engine computes a stored chunk, and whether the bytes agreed.

Of a few hits the engine computes the last chunk although it is stored. The workers compare the
computed numbers with the stored ones. An audit costs the tokens of one chunk, or nothing where the
chunk is computed anyway.
"""

from dataclasses import dataclass, field
from enum import StrEnum

AUDIT_SHARE = 0.001
"""Tokens computed for audits, as a share of the prompt tokens that are computed anyway."""
FIRST_AUDITS_MAX = 8
"""An identity is audited at once until an audit compared something. After so many audits that
compared nothing, its next audit waits for the budget."""


class AuditOutcome(StrEnum):
    """The result of a live audit, or of one of its objects."""

    PASSED = "passed"  # The engine computed what is stored, within the rounding of its data type.
    DIFFERED = "differed"  # The engine computed other numbers than those stored.
    INCONCLUSIVE = "unmade"  # Nothing could be compared.


@dataclass(frozen=True, slots=True)
class AuditVerdict:
    """One rank's result for one object.

    `layer` is the layer that is farthest off, empty where no numbers were compared. `error` and
    `error_max` are relative to its stored numbers.
    """

    outcome: AuditOutcome
    layer: str = ""
    error: float = 0.0
    error_max: float = 0.0

    @property
    def sentence(self) -> str:
        """The layer and its error for people. Empty where no numbers were compared."""
        if not self.layer:
            return ""
        return f"layer {self.layer} differs by {self.error:.2g}, {self.error_max:.2g} is allowed"


def worst(verdicts: "list[AuditVerdict]") -> AuditVerdict:
    """Returns a verdict that differs, else the one farthest off that passed.

    >>> worst([]).outcome
    <AuditOutcome.INCONCLUSIVE: 'unmade'>
    """
    order = (AuditOutcome.INCONCLUSIVE, AuditOutcome.PASSED, AuditOutcome.DIFFERED)

    def rank(verdict: AuditVerdict) -> tuple[int, float]:
        allowed = verdict.error_max or 1.0
        return order.index(verdict.outcome), verdict.error / allowed

    return max(verdicts, key=rank, default=AuditVerdict(AuditOutcome.INCONCLUSIVE))


@dataclass(eq=False, slots=True)
class AuditBudget:
    """The tokens that one engine may spend on audits. It outlives the scheduler role."""

    share: float  # As `Settings.audit`. 0.0 = never.
    prefilled_tokens: int = 0  # Prompt tokens that requests computed.
    spent_tokens: int = 0
    """Tokens of the chunks that were audited. A chunk that is computed anyway counts too, because
    comparing it has a cost."""
    judged: set[bytes] = field(default_factory=set)
    """Identities of which an audit compared something, since the engine has them."""
    cut_off: set[bytes] = field(default_factory=set)
    """Identities of which an audit differed: this engine uses them no more."""
    unmade: int = 0  # Audits of the present identity in which nothing could be compared.

    def is_due(self, identity: bytes) -> bool:
        """Returns whether the next hit of this identity is audited."""
        if not self.share or identity in self.cut_off:
            return False
        if identity not in self.judged and self.unmade < FIRST_AUDITS_MAX:
            return True
        return self.spent_tokens <= self.share * self.prefilled_tokens

    def forget_audited(self) -> None:
        """Forget which identities were audited, because the engine has read its weights anew."""
        self.judged.clear()
        self.unmade = 0

    def on_outcome(self, identity: bytes, outcome: AuditOutcome) -> None:
        """Count the result of an audit."""
        if outcome is AuditOutcome.INCONCLUSIVE:
            self.unmade += 1
            return
        self.judged.add(identity)
        if outcome is AuditOutcome.DIFFERED:
            self.cut_off.add(identity)
