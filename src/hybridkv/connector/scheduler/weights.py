"""Whether the workers have the weights that the engine's identity names.

Each worker looks at its weights around every step. An *era* of a worker is a run of looks that saw
the same weights, and ends for good. Workers say in which era each step ran, and the digest of the
present era once they have read all bytes of it::

    steps      1   2   3   4   5   6   7   8
    eras       0   0   0   1   1   1   1   2
    digests    a           -   -   b       -    ("-": not read yet)

Here blocks of steps 1 to 3 were computed by weights `a`, and those of 4 to 7 by `b`; nothing of
them belongs together. The scheduler role asks for a new digest after a reset of the prefix cache,
because the weights may have changed in places that nobody looks at. Nothing is offered, and nothing
that was stored is committed, before all of the engine's blocks are known to be of the weights that
the identity names (requirements D16).
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from hybridkv.vllm.weights import WeightsAnswer

Digests = tuple[str, ...]
"""The weights of all ranks, in the order of the ranks."""
Eras = tuple[int, ...]
"""The era of each rank, in the order of the ranks."""
STEPS_MAX = 4096
"""Planned steps of which workers have said nothing yet; more cannot be told afterwards."""


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A step that writes blocks, until all workers have said in which era it ran."""

    number: int  # That of its plan.
    question: int  # The last question when it was planned.
    loads_for: Eras  # The eras that its loads are for; empty = it loads nothing.
    computes: bool


@dataclass(frozen=True, slots=True)
class ReadWeights:
    """Digests of all ranks, and the eras and the question that they answer."""

    digests: Digests
    eras: Eras
    question: int


@dataclass(eq=False)
class RankLooks:
    """In which era each of a rank's steps ran."""

    era: int = 0  # That of the last step which nobody asks about any more.
    by_step: dict[int, int] = field(default_factory=dict)
    """The eras of later steps by the plan's number, the oldest first."""

    def era_of(self, step: int) -> int | None:
        """The era of a step; None = not known yet.

        The rank may never look around a step, as after a fault. Its era is known if the steps
        before and after it have the same one. Otherwise the era is negative, and nobody else's.
        """
        if step in self.by_step:
            return self.by_step[step]
        before, after = self.era, None
        for number, era in self.by_step.items():
            if number > step:
                after = era
                break
            before = era
        if after is None:
            return None
        return after if before == after else -step

    def forget(self, step: int) -> None:
        """Nobody asks any more about steps up to this one."""
        for number in [number for number in self.by_step if number <= step]:
            self.era = self.by_step.pop(number)


@dataclass(eq=False)
class WeightsWatch:
    """What one engine's workers say of their weights; without ranks nothing is ever in doubt."""

    named: Digests = ()  # The weights that the engine's identity names.
    facts_of: Callable[[Digests], Mapping[str, object]] = lambda digests: {}
    """The facts of the identity of an engine with other weights."""
    is_identified: bool = True
    """Whether the daemon knows the engine by that identity; set by whoever has told it."""
    question: int = 0  # Its number; workers read their weights once for each.
    _answers: dict[int, WeightsAnswer] = field(default_factory=dict)
    """The last answer of each rank."""
    _looks: dict[int, RankLooks] = field(default_factory=dict)
    _read: ReadWeights | None = None  # The last weights that all ranks had read.
    _steps: deque[PlannedStep] = field(default_factory=deque)
    _blocks: Digests | None = ()
    """The weights that computed the engine's own blocks: () = there are none, None = several."""
    _unread: PlannedStep | None = None
    """The last step that wrote blocks with weights that no digest has told yet,"""
    _unread_eras: Eras = ()  # and its eras.

    def __post_init__(self) -> None:
        ranks = range(len(self.named))
        self._answers = {rank: WeightsAnswer(0, 0, self.named[rank]) for rank in ranks}
        self._looks = {rank: RankLooks() for rank in ranks}
        self._read = ReadWeights(self.named, self._eras(), 0)

    @property
    def is_current(self) -> bool:
        """Whether all that the engine computes and loads belongs to its identity."""
        is_named = self.is_identified and self._present() == self.named
        return is_named and not self.is_stale and self._unread is None

    @property
    def is_untold(self) -> bool:
        """Whether some worker has not heard the present question yet."""
        return any(answer.question < self.question for answer in self._answers.values())

    @property
    def is_stale(self) -> bool:
        """Whether blocks of other weights are in the engine's prefix cache, until it is reset."""
        return self._blocks is None

    @property
    def eras(self) -> Eras:
        """The eras that loads and stores are planned for; empty while the weights are not known."""
        return self._eras() if self.is_current else ()

    def is_proven(self, step: int) -> bool:
        """Whether all blocks that were written up to this step are of the identity's weights."""
        return self.is_current and (not self._steps or self._steps[0].number > step)

    def reset(self, is_empty: bool) -> None:
        """The engine reset its prefix cache; `is_empty`: nothing of it is left."""
        self.question += 1
        if is_empty:
            self._blocks, self._unread = (), None
            self._steps.clear()

    def planned(self, number: int, *, loads_for: Eras = (), computes: bool = True) -> None:
        """A step with this number computes tokens, or loads some for workers of these eras."""
        if self.named and (loads_for or computes):
            self._steps.append(PlannedStep(number, self.question, loads_for, computes))
            if len(self._steps) > STEPS_MAX:
                self._steps.popleft()
                self._blocks = None

    def heard(self, answers: Mapping[int, WeightsAnswer]) -> Digests | None:
        """Take what ranks say after a step; the weights of an identity to be told to the daemon.

        None = there is none. The same are returned again until `is_identified` is set, because the
        hook that tells it may fail.
        """
        if not self.named:
            return None
        for rank, answer in answers.items():
            looks = self._looks[rank]
            looks.by_step.update({look.number: look.era for look in answer.steps})
            self._answers[rank] = max(self._answers[rank], answer, key=WeightsAnswer.order)
        digests = self._present()
        if digests:
            self._read = ReadWeights(digests, self._eras(), self.question)
            self._told()
        self._take_steps()
        if self._unread is not None and self._unread_eras != self._eras():
            # Their era has ended, so no digest of it will come.
            self._blocks, self._unread = None, None
        if not digests or self.is_stale:
            return None
        if digests != self.named:
            if self._blocks not in ((), digests):
                # Other weights would go on with these blocks.
                self._blocks = None
                return None
            self.named, self.is_identified = digests, False
        return None if self.is_identified else digests

    def _take_steps(self) -> None:
        """Note what the steps wrote of which all ranks have said in which era they ran."""
        while self._steps:
            step = self._steps[0]
            eras = [looks.era_of(step.number) for looks in self._looks.values()]
            if None in eras:
                break
            self._steps.popleft()
            self._wrote(step, tuple(era for era in eras if era is not None))
        first = self._steps[0].number if self._steps else max(self._last_looks(), default=0) + 1
        for looks in self._looks.values():
            looks.forget(first - 1)

    def _last_looks(self) -> list[int]:
        return [number for looks in self._looks.values() for number in looks.by_step]

    def _wrote(self, step: PlannedStep, eras: Eras) -> None:
        """A step ran in these eras. Loads for workers of others were refused."""
        if not step.computes and step.loads_for != eras:
            return
        if self._unread is not None and self._unread_eras != eras:
            self._blocks = None
        self._unread, self._unread_eras = step, eras
        self._told()

    def _told(self) -> None:
        """The last digests may be those of the blocks that no digest has told yet."""
        read, step = self._read, self._unread
        if read is None or step is None:
            return
        if self._unread_eras == read.eras and step.question <= read.question:
            self._unread = None
            self._blocks = read.digests if self._blocks in ((), read.digests) else None

    def _eras(self) -> Eras:
        return tuple(answer.era for _, answer in sorted(self._answers.items()))

    def _present(self) -> Digests:
        """Of all ranks, answering the present question; empty while some are not known."""
        answers = [answer for _, answer in sorted(self._answers.items())]
        if any(not one.digest or one.question != self.question for one in answers):
            return ()
        return tuple(answer.digest for answer in answers)
