"""Load or compute: up to which boundary the objects of a prompt are worth reading from tiers.

Reading a hit takes the time of its bytes at the speed that was last measured. Computing takes the
engine's time for the rest of the prompt. The decision is one over a table: the hits that RAM has
room for, each with its time (core.coverage.loadable_hits).
"""

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import NamedTuple

from hybridkv.core.coverage import LoadableHit, PromptHit


class ShortfallKind(Enum):
    """The reasons why a lookup gets less than the tiers have: a metric, its label, a sentence."""

    CROWDED = "promotions_cut", "crowded", "too many lookups wait for tiers"
    TIERS_AWAY = "promotions_cut", "tiers_away", "no tier can be asked at the moment"
    SILENT = "promotions_cut", "tiers_away", "{tier} does not answer"
    SLOWER = (
        "promotions_cut",
        "slower",
        "reading {tokens} tokens would take {read_seconds:.2g} s, "
        "computing them {compute_seconds:.2g} s",
    )
    NO_ROOM = "promotions_cut", "no_room", "RAM has room for {fits} of {tokens} tokens"
    FAILED = "promotions_cut", "failed", "{tier}: {error}"
    NOT_FOUND_IN_TIME = "deadlines_missed", "", "no tier had a thread to look for it in time"
    NOT_READ_IN_TIME = "deadlines_missed", "", "it was not read in time"

    def __init__(self, metric: str, label: str, sentence: str) -> None:
        self.counter = metric, label
        self.sentence = sentence  # With the names of facts in braces.


class Shortfall(NamedTuple):
    """A reason why a lookup gets less than the tiers have, with its facts."""

    kind: ShortfallKind
    facts: Mapping[str, str | float]

    @property
    def sentence(self) -> str:
        """The reason for people, such as "disk does not answer"."""
        return self.kind.sentence.format(**self.facts)


class LoadChoice(NamedTuple):
    """What is read for a lookup, and why it is not more."""

    hits: Sequence[PromptHit] = ()
    """The hits for which is read, ascending: the best one, and one that comes earlier.

    It is empty where nothing is read."""
    shortfalls: Sequence[Shortfall] = ()  # Why tiers could make a longer hit.


def choose_load(
    loadable: Sequence[LoadableHit],
    resident: PromptHit,
    longest: PromptHit,
    token_seconds: float,
    patience_seconds: float,
) -> LoadChoice:
    """Decide which of the loadable hits is read, if any.

    `resident` is the hit that RAM alone has, `longest` that of RAM and tiers. The times are as in
    `best_load`.
    """
    by_tokens = {hit.tokens: hit for hit in loadable}
    fits = max(by_tokens, default=resident.tokens)
    seconds = {tokens: hit.read_seconds for tokens, hit in by_tokens.items()}
    best = best_load(resident.tokens, seconds, token_seconds, patience_seconds)
    shortfalls: list[Shortfall] = []
    if fits < longest.tokens:
        room_facts = {"fits": fits, "tokens": longest.tokens}
        shortfalls.append(Shortfall(ShortfallKind.NO_ROOM, room_facts))
    if best < fits:
        time_facts = {
            "tokens": fits,
            "read_seconds": seconds[fits],
            "compute_seconds": (fits - resident.tokens) * token_seconds,
        }
        shortfalls.append(Shortfall(ShortfallKind.SLOWER, time_facts))
    hits = by_tokens[best].hits if best > resident.tokens else ()
    return LoadChoice(hits, shortfalls)


def best_load(
    resident: int, read_seconds: Mapping[int, float], token_seconds: float, patience_seconds: float
) -> int:
    """Returns the hit, in tokens, with which a prompt is ready first.

    `resident` is the hit that needs no reading. `read_seconds` has the others, and the seconds of
    reading each. `token_seconds` is the time of computing a token, 0 = not known: the largest hit
    is best. Reading that would outlast `patience_seconds` is not begun.
    """
    best, gain = resident, 0.0
    for tokens, read in sorted(read_seconds.items(), reverse=True):
        if tokens > resident:
            compute = (tokens - resident) * token_seconds
            saved = compute - read if token_seconds else float(tokens)
            if read <= patience_seconds and saved > gain:
                best, gain = tokens, saved
    return best
