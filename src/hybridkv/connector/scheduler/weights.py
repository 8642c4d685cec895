"""Whether the workers have the weights that the engine's identity names.

Workers digest their weights and say so in each report. The scheduler role asks for a new digest
after a reset of the prefix cache, because the weights may have changed before it. Until all workers
have answered, nothing is offered, and what is stored is not committed.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

Digests = tuple[str, ...]
"""The weights of all ranks, in the order of the ranks."""


@dataclass(eq=False)
class WeightsWatch:
    """What one engine's workers say of their weights; without ranks nothing is ever in doubt."""

    named: Digests = ()  # The weights that the engine's identity names.
    facts_of: Callable[[Digests], Mapping[str, object]] = lambda digests: {}
    """The facts of the identity of an engine with other weights."""
    question: int = 0  # Its number; workers read their weights once for each.
    _heard: dict[int, tuple[int, str, int]] = field(default_factory=dict)
    """The last EngineWeights.answer of each rank since the engine's own blocks began."""
    _cached: Digests | None = ()
    """The weights that computed the engine's own blocks: () = there are none, None = others too."""
    _begun: int = 0  # The question with which the engine's own blocks began.
    _ran: bool = False  # Whether tokens were computed while the weights were not known.

    def __post_init__(self) -> None:
        self._heard = {rank: (0, digest, 0) for rank, digest in enumerate(self.named)}

    @property
    def is_current(self) -> bool:
        """Whether all that the engine computes and loads belongs to its identity."""
        return not self.is_stale and self._digests() == self.named

    @property
    def is_doubtful(self) -> bool:
        """Whether the workers' answers will tell what the engine computes now."""
        return not self.is_stale and not self.is_current

    @property
    def is_untold(self) -> bool:
        """Whether some worker has not heard the present question yet."""
        asked = [question for question, _, _ in self._heard.values()]
        return len(asked) < len(self.named) or any(one < self.question for one in asked)

    @property
    def is_stale(self) -> bool:
        """Whether blocks of other weights are in the engine's prefix cache, until it is reset."""
        return self._cached is None

    @property
    def versions(self) -> tuple[tuple[str, int], ...]:
        """(digest, version) of each rank."""
        return tuple((digest, version) for _, (_, digest, version) in sorted(self._heard.items()))

    def reset(self, is_empty: bool) -> None:
        """The engine reset its prefix cache; `is_empty`: nothing of it is left."""
        self.question += 1
        if is_empty:
            self._cached, self._begun, self._ran = (), self.question, False
            self._heard.clear()
        elif self._ran:
            # Steps ran with weights that were being read, and this answer will not come.
            self._cached, self._ran = None, False

    def missed(self) -> None:
        """Steps ran unheard, as while the role was switched off: they may be of other weights."""
        self._ran = True
        self._heard = {rank: (asked, "", at) for rank, (asked, _, at) in self._heard.items()}

    def planned(self) -> None:
        """A step computes tokens."""
        if self.is_current:
            self._cached = self.named
        else:
            self._ran = True

    def heard(self, answers: Mapping[int, tuple[int, str, int]]) -> Digests | None:
        """Take what ranks say after a step; the weights of a new identity, if it begins now."""
        if not self.named:
            return None
        for rank, answer in answers.items():
            question, digest, version = answer
            if question < self._begun:
                continue  # Of a step before the reset, whose blocks are gone.
            last = self._heard.get(rank, answer)
            is_lost = not last[1] and (last[0], last[2]) != (question, version)
            if is_lost or (question < self.question and digest != self.named[rank]):
                # A step ran with weights that were never read, or with others.
                self._cached = None
            self._heard[rank] = answer
        digests = self._digests()
        if len(digests) < len(self.named) or "" in digests:
            return None
        if self._cached not in ((), digests):
            self._cached = None
        elif self._ran:
            self._cached = digests
        self._ran = False
        if self.is_stale or digests == self.named:
            return None
        self.named = digests
        return digests

    def _digests(self) -> Digests:
        """Of the ranks that have heard the present question."""
        heard = sorted(self._heard.items())
        return tuple(digest for _, (asked, digest, _) in heard if asked == self.question)
