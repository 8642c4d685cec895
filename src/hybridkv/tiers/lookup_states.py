"""The life of a lookup that waits for tiers, as one table.

FINDING --planned--> READING --settled--> ANSWERED
   |                    |
   |                    +-- deadline --> ANSWERED
   +-- settled, deadline --> ANSWERED;  either of the two --cancelled--> CANCELLED
"""

from enum import StrEnum


class LookupState(StrEnum):
    """Where a lookup stands."""

    FINDING = "finding"
    """Tiers are asked which objects they have, or will be when they have a thread for it."""
    READING = "reading"
    """Objects are read, or will be when there is a thread and room for them."""
    ANSWERED = "answered"
    CANCELLED = "cancelled"


class LookupEvent(StrEnum):
    """What happens to a lookup."""

    PLANNED = "planned"
    """Every tier has answered, and some objects are worth reading."""
    SETTLED = "settled"
    """Nothing more will come: no object was worth reading, or each one was read or failed."""
    DEADLINE = "deadline"
    """The engine's patience is over."""
    CANCELLED = "cancelled"
    """The engine wants no answer any more, or is gone."""


OVER = frozenset((LookupState.ANSWERED, LookupState.CANCELLED))
"""The states in which a lookup does not wait any more."""

TRANSITIONS: dict[tuple[LookupState, LookupEvent], LookupState] = {
    (LookupState.FINDING, LookupEvent.PLANNED): LookupState.READING,
    (LookupState.FINDING, LookupEvent.SETTLED): LookupState.ANSWERED,
    (LookupState.FINDING, LookupEvent.DEADLINE): LookupState.ANSWERED,
    (LookupState.FINDING, LookupEvent.CANCELLED): LookupState.CANCELLED,
    (LookupState.READING, LookupEvent.SETTLED): LookupState.ANSWERED,
    (LookupState.READING, LookupEvent.DEADLINE): LookupState.ANSWERED,
    (LookupState.READING, LookupEvent.CANCELLED): LookupState.CANCELLED,
}
"""The next state. An event that the table does not name changes nothing."""
