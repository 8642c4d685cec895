"""What a day of a real model measured, as values. The JSON of a run is made of them."""

from dataclasses import dataclass, field
from typing import Any

from tests.engine.server import Streamed

COMPUTED, OWN_HIT, RESTARTED, FROM_DISK = "computed", "own hit", "after a restart", "from disk"
"""The ways to a first token: no cache, the engine's own, the daemon's RAM, a directory."""
WAYS = (COMPUTED, OWN_HIT, RESTARTED, FROM_DISK)
NATIVE, LMCACHE = "vLLM's offloading", "LMCache"


@dataclass
class Prompt:
    """The answers to one prompt, by way."""

    tokens: int
    answers: dict[str, Streamed] = field(default_factory=dict)

    def is_same(self, way: str) -> bool:
        """Whether an answer has the tokens of the computed one."""
        return self.answers[way].tokens == self.answers[COMPUTED].tokens


@dataclass
class Turns:
    """A conversation that grows, during which the engine is restarted."""

    restarted_before: int
    """The number of the first turn after the restart, from 0."""
    with_cache: list[Streamed] = field(default_factory=list)
    without: list[Streamed] = field(default_factory=list)


@dataclass
class Killed:
    """A hit during which the daemon was killed, and a hit on another prompt with the next one."""

    during: Streamed
    afterwards: Streamed
    is_same: bool


@dataclass
class Ratios:
    """Times of the attached engine over those of one without a connector, round by round."""

    prefill: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)


@dataclass
class Cost:
    """What new prompts take where nothing hits."""

    prompt_tokens: int
    decoded_tokens: int
    starts: list[Ratios] = field(default_factory=list)
    """For each start of the engine without a connector, since equal processes differ too."""


@dataclass
class ModelDay:
    """All figures of one model."""

    model: str
    dtype: str
    groups: str = ""
    """Groups of layers, as the daemon names them."""
    chunk_tokens: int = 0
    stored_token_bytes: float = 0.0
    prompts: list[Prompt] = field(default_factory=list)
    users: list[Prompt] = field(default_factory=list)
    """Prompts that are asked at once."""
    turns: Turns | None = None
    killed: Killed | None = None
    cost: Cost | None = None
    lookups: dict[str, int] = field(default_factory=dict)
    """Lookups of the engine that had a directory alone, by result and reason."""
    codecs: list[dict[str, Any]] = field(default_factory=list)
    peers: dict[str, str] = field(default_factory=dict)
    """The version of a peer that ran, or why it did not."""
    seconds: float = 0.0


@dataclass
class Run:
    """All figures of one run."""

    date: str
    machine: str
    versions: dict[str, str]
    load: float
    """The load of the machine in the minute before the run."""
    days: list[ModelDay] = field(default_factory=list)
