"""What the daemon's loop hands to those who show it: finished values, nothing that changes later."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from hybridkv.core.series import Sample
from hybridkv.server.history import Decision

GROUPS_SHOWN_MAX = 64
"""Of all identities; those that take least are summed up."""
SESSIONS_SHOWN_MAX = 256
DECISIONS_SHOWN_MAX = 50


class GroupFacts(NamedTuple):
    """What the objects of one group of one identity take in RAM."""

    identity: str
    """The first digits; "" = all that are not shown by themselves."""
    model: str
    gid: int
    kind: str
    """Empty where no engine has told since the daemon began."""
    objects: int
    held_bytes: int


class SessionFacts(NamedTuple):
    """One greeting of an engine."""

    engine_id: str
    model: str
    identity: str
    chunk_tokens: int
    groups: str
    leases: int
    writing_bytes: int
    is_connected: bool
    """False: its processes may still copy."""
    since: float


class TierFacts(NamedTuple):
    """One tier below RAM."""

    name: str
    location: str
    """Without a password."""
    write: str
    is_open: bool
    is_shut: bool
    """Whether its breaker is open."""
    is_hung: bool
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The daemon at one moment. Times are seconds of its clock."""

    now: float
    started_at: float
    values: Mapping[str, float]
    waits: tuple[tuple[float, int], ...]
    """Lookups that waited for tiers, by bound in seconds: core.buckets."""
    wait_seconds: float
    groups: tuple[GroupFacts, ...]
    sessions: tuple[SessionFacts, ...]
    tiers: tuple[TierFacts, ...]
    columns: tuple[str, ...]
    """What the samples' values are."""
    hour: tuple[Sample, ...]
    day: tuple[Sample, ...]
    decisions: tuple[Decision, ...]
    """The latest first."""
