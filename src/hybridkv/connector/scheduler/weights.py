"""Whether the workers have the weights that the engine's identity names.

Workers digest their weights and say so in each report. The scheduler role asks for a new digest
after a reset of the prefix cache, because the weights may have changed before it. Until all workers
have answered, nothing is offered, and what is stored is not committed.

Steps may run of which no answer tells the weights, as between two resets in a row. They are in
doubt until the next digest comes: it is theirs too if the workers say that one era has all of them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from hybridkv.vllm.weights import WeightsAnswer

Digests = tuple[str, ...]
"""The weights of all ranks, in the order of the ranks."""


@dataclass(eq=False)
class WeightsWatch:
    """What one engine's workers say of their weights; without ranks nothing is ever in doubt."""

    named: Digests = ()  # The weights that the engine's identity names.
    facts_of: Callable[[Digests], Mapping[str, object]] = lambda digests: {}
    """The facts of the identity of an engine with other weights."""
    question: int = 0  # Its number; workers read their weights once for each.
    _heard: dict[int, WeightsAnswer] = field(default_factory=dict)
    """The last answer of each rank since the engine's own blocks began."""
    _eras: dict[int, int] = field(default_factory=dict)
    """The era of each rank in the first step whose weights no digest has told yet."""
    _cached: Digests | None = ()
    """The weights that computed the engine's own blocks: () = there are none, None = others too."""
    _begun: int = 0  # The question with which the engine's own blocks began.
    _ran: bool = False  # Whether tokens were computed while the weights were not known.
    _in_doubt: bool = False  # Whether that was so in steps before the last question too.

    def __post_init__(self) -> None:
        self._heard = {
            rank: WeightsAnswer(0, digest, 0, era=0) for rank, digest in enumerate(self.named)
        }

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
        asked = [answer.question for answer in self._heard.values()]
        return len(asked) < len(self.named) or min(asked, default=0) < self.question

    @property
    def is_stale(self) -> bool:
        """Whether blocks of other weights are in the engine's prefix cache, until it is reset."""
        return self._cached is None

    @property
    def versions(self) -> tuple[tuple[str, int], ...]:
        """(digest, version) of each rank."""
        return tuple((answer.digest, answer.version) for _, answer in sorted(self._heard.items()))

    def reset(self, is_empty: bool) -> None:
        """The engine reset its prefix cache; `is_empty`: nothing of it is left."""
        self.question += 1
        if is_empty:
            self._cached, self._begun, self._ran, self._in_doubt = (), self.question, False, False
            self._heard.clear()
            self._eras.clear()
        elif self._ran:
            # Steps ran with weights that were being read, and this answer will not come.
            self._in_doubt = True

    def missed(self) -> None:
        """Steps ran unheard, as while the role was switched off: they may be of other weights."""
        self._ran = True
        self._heard = {rank: heard._replace(digest="") for rank, heard in self._heard.items()}

    def planned(self) -> None:
        """A step computes tokens."""
        if self.is_current:
            self._cached = self.named
        else:
            self._ran = True

    def heard(self, answers: Mapping[int, WeightsAnswer]) -> Digests | None:
        """Take what ranks say after a step; the weights of a new identity, if it begins now."""
        if not self.named:
            return None
        for rank, answer in answers.items():
            if answer.question < self._begun:
                continue  # Of a step before the reset, whose blocks are gone.
            last = self._heard.get(rank, answer)
            self._eras.setdefault(rank, last.era)
            same = last.question, last.version
            is_late = answer.question < self.question
            if is_late and answer.digest not in ("", self.named[rank]):
                # A step ran with weights that are not the identity's.
                self._cached = None
            elif (not last.digest and same != (answer.question, answer.version)) or (
                is_late and not answer.digest
            ):
                # A step ran with weights that were never read.
                self._in_doubt = True
            self._heard[rank] = answer
        digests = self._digests()
        if len(digests) < len(self.named) or "" in digests:
            return None
        eras = {rank: answer.era for rank, answer in self._heard.items()}
        if self._cached not in ((), digests) or (self._in_doubt and eras != self._eras):
            self._cached = None
        elif self._ran:
            self._cached = digests
        self._ran, self._in_doubt, self._eras = False, False, eras
        if self.is_stale or digests == self.named:
            return None
        self.named = digests
        return digests

    def _digests(self) -> Digests:
        """Of the ranks that have heard the present question."""
        heard = sorted(self._heard.items())
        return tuple(answer.digest for _, answer in heard if answer.question == self.question)
