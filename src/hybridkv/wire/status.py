"""The status of a daemon, for the status page, its JSON and `hybridkv top`.

Times are in seconds, past times are seconds before now, and rates are per second. An identity is
shown by its first digits. Texts are for people.
"""

from enum import StrEnum

from msgspec import Struct

from hybridkv.core.refusals import Refusal


class TierRefusal(Struct, frozen=True):
    """A reason for which a tier refuses objects, for longer than a minute."""

    reason: Refusal
    seconds: float


class TierStatus(Struct, frozen=True):
    """The state of one tier below RAM."""

    name: str
    location: str
    """The tier's URL without a password."""
    write: str
    max_bytes: int | None
    is_open: bool
    is_shut: bool
    """True while the tier's breaker is open."""
    is_hung: bool
    values: dict[str, float]
    """The tier's counters and gauges, by their metrics' names without `tier_`."""
    refusals: list[TierRefusal] = []

    @property
    def is_reachable(self) -> bool:
        """True where the tier can be asked for objects now."""
        return self.is_open and not self.is_shut and not self.is_hung


class GroupStatus(Struct, frozen=True):
    """The RAM that the objects of one group of one identity take."""

    identity: str
    """The first digits. Empty for the sum of all groups that are not listed."""
    model: str
    gid: int
    kind: str
    """Empty while no engine has greeted with this identity since the daemon began."""
    objects: int
    held_bytes: int


class SessionStatus(Struct, frozen=True):
    """The state of one session: one greeting of an engine."""

    engine_id: str
    model: str
    identity: str
    chunk_tokens: int
    groups: str
    """Every group as gid:kind/tokens per block."""
    leases: int
    writing_bytes: int
    is_connected: bool
    """False where the scheduler is gone and its workers may still copy."""
    since: float


class Outcome(StrEnum):
    """The fate of the tokens of a request, in one word."""

    LOADED = "loaded"  # Tokens were loaded from outside the engine.
    LOCAL = "local"  # The engine's own cache reached as far as this one.
    MISS = "miss"  # Nothing was found.
    UNUSED = "unused"  # There was a hit, and the request ended before it was loaded.
    DECLINED = "declined"  # There was no lookup, or no answer in time. The text has the reason.
    FAILED = "failed"  # The load failed, and the tokens were computed.


class DecisionStatus(Struct, frozen=True):
    """The course of one request that ended."""

    request_id: str
    identity: str
    age: float
    prompt: str
    """The length of the prompt."""
    outcome: Outcome
    text: str
    """The tokens that were loaded, or the reason why none were."""
    limit: str
    """The reason why the hit was not longer. Empty where it could not be longer."""
    facts: dict[str, str]
    """The lines that `hybridkv explain` prints, by their title."""


class Problem(Struct, frozen=True):
    """A condition that is not as it should be. `level` is bad, warn or note."""

    level: str
    text: str


class MemoryVerdict(Struct, frozen=True):
    """The gain that more memory would bring, by the last hour. None where nothing was looked up."""

    hit: float | None
    ceiling: float | None
    text: str


class WindowStatus(Struct, frozen=True):
    """The activity of the last `seconds`.

    `hit` is the share of the tokens asked for that was hit, and `ceiling` that of a cache of
    unlimited size. Both are None where nothing was looked up.
    """

    seconds: float
    hit: float | None
    ceiling: float | None
    hit_tokens: float
    asked_tokens: float
    loaded_tokens: float
    """Tokens that engines loaded instead of computing them."""
    saved_seconds: float | None
    """The computing time that loads spared, at each engine's measured speed, less the time from the
    lookups to the ends of the loads. None where no speed was known."""
    wait_seconds: float | None
    """The mean wait of lookups that waited for tiers. None where none did."""
    per_second: dict[str, float]


class StatusHistory(Struct, frozen=True):
    """The past. Every list has one value for each interval between two samples, oldest first."""

    step_seconds: float
    ages: list[float]
    """Seconds before the last sample."""
    hit: list[float | None]
    ceiling: list[float | None]
    lookups: list[float]
    wait_seconds: list[float | None]
    evicted: list[float]
    loaded: list[float]
    stored: list[float]
    sessions: list[float]
    bytes: dict[str, list[float]]
    """By tier, `ram` included."""
    read: dict[str, list[float]]
    written: dict[str, list[float]]


class DaemonSetup(Struct, frozen=True):
    """The place where a daemon runs, and its settings."""

    host: str
    socket_path: str
    settings: dict[str, str]
    """The settings by the arguments of `hybridkv serve`, without any password."""


class Status(Struct, frozen=True, omit_defaults=True):
    """The whole status of a daemon at one moment."""

    version: str
    setup: DaemonSetup
    uptime_seconds: float
    values: dict[str, float]
    """Every counter and gauge, named as `hybridkv stats` prints it."""
    minute: WindowStatus
    recent: WindowStatus
    """The last hour."""
    health: list[Problem]
    """The worst first."""
    help: str
    """The gain of the cache: what was loaded in the last hour, and the time that it saved."""
    verdict: MemoryVerdict
    tiers: list[TierStatus]
    groups: list[GroupStatus]
    """The largest first."""
    sessions: list[SessionStatus]
    decisions: list[DecisionStatus]
    """The latest first."""
    hour: StatusHistory
