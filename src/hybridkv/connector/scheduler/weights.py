"""The proof that the workers have the weights that the engine's identity names.

Each worker looks at its weights around every step. An *era* of a worker is a run of looks that saw
the same weights. An era that has ended never comes back. Workers report in which era each step ran,
and the digest of the present era once they have read all bytes of the weights::

    steps      1   2   3   4   5   6   7   8
    eras       0   0   0   1   1   1   1   2
    digests    a           -   -   b       -    ("-": not read yet)

Here weights `a` computed the blocks of steps 1 to 3, and weights `b` those of steps 4 to 7. The two
must not be mixed. After a reset of the prefix cache the scheduler role asks for a new digest, with
a *question*, because the weights may have changed in places that the looks do not cover. Nothing is
offered and no stored object is committed before all of the engine's blocks are known to be of the
weights that the identity names (requirements D16).
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

from hybridkv.vllm.weights import WeightsAnswer

Digests = tuple[str, ...]
"""The digests of all ranks' weights, in the order of the ranks."""
Eras = tuple[int, ...]
"""The era of each rank, in the order of the ranks."""
STEPS_MAX = 4096
"""Planned steps that are not reported yet. With more of them the engine counts as stale."""


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A step that writes blocks, kept until all workers have reported in which era it ran."""

    number: int  # The number of its plan.
    question: int  # The last question when it was planned.
    loads_for: Eras  # The eras that its loads are for; empty = it loads nothing.
    computes: bool


@dataclass(frozen=True, slots=True)
class ReadWeights:
    """Digests of all ranks, with the eras and the question that they are for."""

    digests: Digests
    eras: Eras
    question: int


@dataclass(eq=False)
class RankLooks:
    """The era in which each step of a rank ran."""

    era: int = 0  # The era of the last step that was forgotten.
    by_step: dict[int, int] = field(default_factory=dict)
    """The eras of later steps by the plan's number, the oldest first."""

    def era_of(self, step: int) -> int | None:
        """Return the era of a step. None = not known yet.

        A rank may not look around a step, as after a fault. Its era is known if the steps before
        and after it have the same era. Otherwise the era is a negative number of its own.
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

    def forget_steps(self, step: int) -> None:
        """Forget the steps up to this one."""
        for number in [number for number in self.by_step if number <= step]:
            self.era = self.by_step.pop(number)


class WeightsState(Enum):
    """States of the watch. Only in CURRENT is anything offered, or a stored object committed.

    ======= ========================================== =====================================
    state   the engine's blocks are                    it ends with
    ======= ========================================== =====================================
    CURRENT of the weights that the identity names     a reset, or a step with other weights
    UNREAD  of weights that are not read yet           their digest; STALE if their era ends
    ASKED   of weights about which workers were asked  the answers of all workers
    RENAMED of weights that the daemon does not know   the caller, once it has told the daemon
    STALE   of several weights, or may be              a reset that leaves no block
    ======= ========================================== =====================================
    """

    CURRENT = auto()
    UNREAD = auto()
    ASKED = auto()
    RENAMED = auto()
    STALE = auto()


@dataclass(eq=False)
class WeightsWatch:
    """The reports of one engine's workers about their weights, and what follows from them.

    Without ranks nothing is ever in doubt. `state` follows from what is known.
    """

    identity_digests: Digests = ()  # The weights that the engine's identity names.
    facts_of: Callable[[Digests], Mapping[str, object]] = lambda digests: {}
    """Returns the facts of the engine's identity with these weights."""
    is_identified: bool = True
    """True if the daemon knows the engine by that identity. The caller that tells it sets this."""
    question: int = 0  # The number of the last question. Workers read their weights once for each.
    block_digests: Digests = ()
    """The weights that computed the engine's own blocks. Empty = it has no blocks."""
    is_stale: bool = False
    """True while the engine's prefix cache has, or may have, blocks of other weights as well."""
    _answers: dict[int, WeightsAnswer] = field(default_factory=dict)
    """The last answer of each rank."""
    _looks: dict[int, RankLooks] = field(default_factory=dict)
    _read: ReadWeights | None = None  # The last weights that all ranks had read.
    _steps: deque[PlannedStep] = field(default_factory=deque)
    _unread: PlannedStep | None = None
    """The last step that wrote blocks with weights whose digest is not known yet."""
    _unread_eras: Eras = ()  # The eras of that step.

    def __post_init__(self) -> None:
        digests = self.identity_digests
        self._answers = {rank: WeightsAnswer(0, 0, digests[rank]) for rank in range(len(digests))}
        self._looks = {rank: RankLooks() for rank in range(len(digests))}
        self._read = ReadWeights(digests, self._eras(), 0)

    @property
    def state(self) -> WeightsState:
        """The state, which decides whether anything is offered and committed."""
        if self.is_stale:
            return WeightsState.STALE
        if self._unread is not None:
            return WeightsState.UNREAD
        digests = self._present()
        if self.identity_digests and not digests:
            return WeightsState.ASKED
        if not self.is_identified or digests != self.identity_digests:
            return WeightsState.RENAMED
        return WeightsState.CURRENT

    @property
    def is_current(self) -> bool:
        """True if all that the engine computes and loads belongs to its identity."""
        return self.state is WeightsState.CURRENT

    @property
    def has_unasked_workers(self) -> bool:
        """True while some worker has not answered the present question or a later one."""
        return any(answer.question < self.question for answer in self._answers.values())

    @property
    def has_reading_workers(self) -> bool:
        """True while steps without tokens would let some worker read weights that are unread."""
        return any(answer.is_reading for answer in self._answers.values())

    @property
    def unread(self) -> int:
        """The modules of all ranks whose weights are not read, as far as they have answered."""
        return sum(answer.unread for answer in self._answers.values())

    @property
    def eras(self) -> Eras:
        """The eras that loads and stores are planned for. Empty while the weights are not known."""
        return self._eras() if self.is_current else ()

    def is_proven(self, step: int) -> bool:
        """Return True if the identity's weights computed all blocks up to this step's."""
        return self.is_current and (not self._steps or self._steps[0].number > step)

    def on_reset(self, is_empty: bool) -> None:
        """Ask a new question: the engine reset its prefix cache, and `is_empty` if all is gone."""
        self.question += 1
        if is_empty:
            self.block_digests, self.is_stale, self._unread = (), False, None
            self._steps.clear()

    def on_step_planned(self, number: int, *, loads_for: Eras = (), computes: bool = True) -> None:
        """Note the step of a plan, which computes tokens or has loads for workers of these eras."""
        if self.identity_digests and (loads_for or computes):
            self._steps.append(PlannedStep(number, self.question, loads_for, computes))
            if len(self._steps) > STEPS_MAX:
                self._steps.popleft()
                self.is_stale = True

    def on_answers(self, answers: Mapping[int, WeightsAnswer]) -> Digests | None:
        """Take the answers of ranks after a step.

        Returns the weights of a new identity, which the caller must tell to the daemon. None =
        there is none. They are returned again until `is_identified` is set, because the hook that
        tells the daemon may fail.
        """
        if not self.identity_digests:
            return None
        for rank, answer in answers.items():
            looks = self._looks[rank]
            looks.by_step.update({look.number: look.era for look in answer.steps})
            before = self._answers[rank]
            latest = max(answer, before, key=WeightsAnswer.order)
            self._answers[rank] = latest
            is_revised = latest.revision > before.revision
            if is_revised and (before.question, before.era) == (latest.question, latest.era):
                self._revise_blocks(rank, before.digest, latest.digest)
        digests = self._present()
        if digests:
            self._read = ReadWeights(digests, self._eras(), self.question)
            self._match_unread()
        self._take_steps()
        if self._unread is not None and self._unread_eras != self._eras():
            # The era of these blocks has ended, so no digest of it will come.
            self.is_stale, self._unread = True, None
        if not digests or self.is_stale:
            return None
        if digests != self.identity_digests:
            if self.block_digests not in ((), digests):
                # The new weights would go on with blocks of the old weights.
                self.is_stale = True
                return None
            self.identity_digests, self.is_identified = digests, False
        return None if self.is_identified else digests

    def _take_steps(self) -> None:
        """Take the blocks of all steps whose eras are known of all ranks."""
        while self._steps:
            step = self._steps[0]
            eras = [looks.era_of(step.number) for looks in self._looks.values()]
            if None in eras:
                break
            self._steps.popleft()
            self._on_blocks_written(step, tuple(era for era in eras if era is not None))
        looked = (number for looks in self._looks.values() for number in looks.by_step)
        first = self._steps[0].number if self._steps else max(looked, default=0) + 1
        for looks in self._looks.values():
            looks.forget_steps(first - 1)

    def _on_blocks_written(self, step: PlannedStep, eras: Eras) -> None:
        """Take the blocks of a step that ran in these eras. Workers refuse loads for other eras."""
        if not step.computes and step.loads_for != eras:
            return
        if self._unread is not None and self._unread_eras != eras:
            self.is_stale = True
        self._unread, self._unread_eras = step, eras
        self._match_unread()

    def _match_unread(self) -> None:
        """Compare the last digests with the unread step, whose blocks may be of these weights."""
        read, step = self._read, self._unread
        if read is None or step is None:
            return
        if self._unread_eras == read.eras and step.question <= read.question:
            self._unread = None
            if self.block_digests in ((), read.digests):
                self.block_digests = read.digests
            else:
                self.is_stale = True

    def _revise_blocks(self, rank: int, unread: str, digest: str) -> None:
        """Give the blocks of a rank's unread weights the digest of a later reading of them.

        Both are of one era, so the weights are the same.
        """
        if self.block_digests and self.block_digests[rank] == unread:
            digests = [*self.block_digests]
            digests[rank] = digest
            self.block_digests = tuple(digests)

    def _eras(self) -> Eras:
        return tuple(answer.era for _, answer in sorted(self._answers.items()))

    def _present(self) -> Digests:
        """Return all ranks' answers to the present question. Empty while one is missing."""
        answers = [answer for _, answer in sorted(self._answers.items())]
        if any(not answer.digest or answer.question != self.question for answer in answers):
            return ()
        return tuple(answer.digest for answer in answers)
