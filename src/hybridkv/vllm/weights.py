"""The weights that a worker has in memory: which they are, and whether they still are.

A digest of all bytes says which they are (`weights_digest`). It takes seconds, and proves the
moment in which it was taken. A sentinel looks at some words around every step (`weights_sentinel`).
A run of looks that saw the same is an *era*. A digest that was read within an era is that of all
its steps.
"""

import functools
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from hybridkv.core.sizes import format_size
from hybridkv.vllm import seams
from hybridkv.vllm.weights_digest import (
    DIGEST_BYTES,
    PackedWeights,
    StoppedError,
    UnreadModule,
    WeightsDigest,
    digest_weights,
)
from hybridkv.vllm.weights_sentinel import WeightsLook, WeightsSentinel

logger = logging.getLogger("vllm.hybridkv")

SLICE_SECONDS = 0.02
"""How long a step without tokens may be delayed by reading packed weights."""
UPDATE_SECONDS_MAX = 1.0
"""The same for the first step after the weights changed. With less, an update of a small model on a
busy processor would give an engine that is never idle a name of its own."""
LATE_SECONDS_MAX = 300.0
"""How long steps without tokens go on reading packed weights for which a start had no time."""
YIELD_SECONDS = 0.001
"""How long a step that computes nothing waits for a reading, as vLLM's own loop does."""
_UNREAD = (
    "hybridkv: the weights of %s cannot be read in memory, so this engine shares with no other and"
    " with no later one; weights_identity can name them"
)


class StepLook(NamedTuple):
    """The era in which a step ran."""

    number: int  # The number of the step's plan.
    era: int


class WeightsAnswer(NamedTuple):
    """The worker's answer about its weights, in the report of a step."""

    question: int
    """The number of the scheduler role's last question."""
    era: int
    """How often the sentinel saw other weights, or a method ran that may change them."""
    digest: str
    """The digest of the era's weights, read after the question. Empty while it is not known."""
    steps: tuple[StepLook, ...] = ()
    """Steps whose era became known since the last report. A step in which the weights changed has
    an era of its own."""
    revision: int = 0
    """How often weights that were unread in this era could be read later. The digest of a later
    revision is of the same weights."""
    unread: int = 0  # Modules whose weights are not read.
    is_reading: bool = False  # True if steps without tokens would let the worker read on.

    def order(self) -> tuple[int, int, bool, int]:
        """Return a value that is greater for a later answer of the same worker."""
        return self.question, self.era, bool(self.digest), self.revision


@dataclass(eq=False)
class WeightsReading:
    """A reading of all bytes beside the steps."""

    question: int
    era: int
    revision: int = 0  # How many readings of the same question and era came before.
    thread: threading.Thread | None = None
    is_outdated: bool = False  # True once what was late in it can be read.
    is_stopped: bool = False
    found: WeightsDigest | None = None  # None until the reading is over.

    def stop_reading(self) -> None:
        """Stop the reading and wait for its end: memory that is read must not go away."""
        self.is_stopped = True
        if self.thread is not None:
            self.thread.join()


@dataclass(eq=False)
class _PendingLook:
    """A look of the sentinel that was not compared yet."""

    step: int  # The number of the step's plan.
    version: int  # How often a method had run that may change the weights.
    look: WeightsLook | None  # None = it failed.
    is_end: bool = False  # True if the look was taken after the step had computed.
    finished_reading: WeightsReading | None = None  # A reading that was over before the look.


class _SeenWeights(NamedTuple):
    """The weights as a look saw them that was compared."""

    version: int  # How often a method had run that may change the weights.
    words: bytes  # The digest of the words that the sentinel watches.


class EngineWeights:
    """The models of one worker, found through the call that registers its KV caches.

    All methods belong to the worker's thread, which also changes weights.
    """

    def __init__(
        self,
        runner: Any = None,
        worker: Any = None,
        before_sleep: Callable[[], None] | None = None,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`runner` is vLLM's model runner, without which the weights cannot be read.

        `worker` is vLLM's worker, whose methods are followed. `before_sleep` ends what else uses
        the engine's memory. It is called before that memory goes away. `now` is a clock in seconds.
        """
        self.runner = runner
        self._before_sleep = before_sleep
        self._now = now
        self._packed = PackedWeights(now)
        self._late_seconds = 0.0  # Seconds that steps without tokens have read packed weights.
        self.sentinel = WeightsSentinel()
        self._asleep: set[str] = set()  # Tags of memory that may be gone.
        self.question = 0  # The number of the scheduler role's last question.
        self._version = 0  # How often a method ran that may change the weights.
        self._looks: deque[_PendingLook] = deque()
        self._seen: _SeenWeights | None = None
        """What the last look saw that was compared. None = it is like no other."""
        self._era = -1
        self._eras: dict[int, int] = {}
        """The eras of steps that no report has had yet, by the plan's number."""
        self._settled = 0
        self._last_step = 0
        self.reading: WeightsReading | None = None  # The reading that was begun last.
        self._confirmed_reading: WeightsReading | None = None
        """The last reading after which a look saw the reading's era."""
        self._is_blind = False  # True if the last look failed, so that no digest tells anything.
        owners = (runner, worker, *seams.models_of(runner).values())
        names = [*seams.CHANGING_METHODS, *seams.extension_methods(worker)]
        seams.follow_methods(owners, names, self._followed)

    @classmethod
    def of_caller(cls, before_sleep: Callable[[], None] | None = None) -> "EngineWeights":
        """Return the weights of the model runner among the callers, and follow its methods."""
        runner, worker = seams.runner_and_worker_on_stack()
        return cls(runner, worker, before_sleep)

    @property
    def is_asleep(self) -> bool:
        """True while memory of the engine may be gone, so that nothing may be read or written."""
        return bool(self._asleep)

    @property
    def era(self) -> int:
        """The era of the last look that was compared."""
        return self._era

    @property
    def settled(self) -> int:
        """The number of the last step of which a look was compared."""
        return self._settled

    @property
    def digest(self) -> str:
        """The digest of the present era, read after the last question. Empty if none was read."""
        reading = self._confirmed_reading
        if reading is None or reading.found is None or self._asleep:
            return ""
        # A method that may change the weights ran since the last look.
        is_changed = self._seen is None or self._seen.version != self._version
        return reading.found.digest if self._is_of_now(reading) and not is_changed else ""

    def take_step_answer(self) -> WeightsAnswer:
        """Return what the report of the present step says. Each step is in one answer alone."""
        self.compare()
        pending = {look.step for look in self._looks}
        settled = [number for number in self._eras if number not in pending]
        steps = tuple(StepLook(number, self._eras.pop(number)) for number in settled)
        digest, reading = self.digest, self._confirmed_reading
        answer = WeightsAnswer(self.question, self._era, digest, steps)
        if not digest or reading is None or reading.found is None:
            return answer
        return answer._replace(
            revision=reading.revision,
            unread=len(reading.found.unread),
            is_reading=self._reads_on(reading),
        )

    def read(self) -> WeightsDigest:
        """Read the weights now, before the engine's first step, and return their digest.

        This may take seconds.
        """
        self._look_now()
        found = self._digest(lambda: False, multiplies=True)
        self.reading = WeightsReading(self.question, self._era, found=found)
        self._look_now()
        self._eras.clear()
        return found

    def begin_step(self, number: int, question: int, *, is_idle: bool = False) -> None:
        """Look at the weights where a step begins, and read them beside it if they are not known.

        `number` is that of the step's plan, `question` the scheduler role's last question.
        `is_idle`: the step writes no block.
        """
        self.question = max(self.question, question)
        self.look_at_step(number, is_idle=is_idle)
        reading = self.reading
        if is_idle and reading is not None and self._is_of_now(reading):
            self._read_late(reading)
        is_outdated = reading is not None and reading.is_outdated
        is_read = reading is not None and self._is_of_now(reading)
        if (not is_outdated and (self.digest or is_read)) or self._is_blind or self._asleep:
            return
        if reading is not None:
            reading.is_stopped = True
        self._begin_reading(reading)

    def look_at_step(self, number: int, *, is_idle: bool = False) -> None:
        """Look at the weights where a step begins, unless it is idle and the weights are known."""
        if self._asleep or number == self._last_step:
            return
        self._last_step = number
        if not is_idle or not self.digest or self._has_unconfirmed_reading():
            self._look(number)
        self.compare()

    def computed(self) -> None:
        """Look at the weights after the step that began last has computed what it stores."""
        if not self._asleep:
            self._look(self._last_step, is_end=True)

    def yield_to_reading(self) -> None:
        """Let the reading thread run for YIELD_SECONDS.

        An engine in the caller's own process does step after step while a request waits, and never
        yields the interpreter. Each of the reading's thousand calls would wait for its turn.
        """
        reading = self.reading
        if reading is not None and reading.thread is not None:
            reading.thread.join(YIELD_SECONDS)

    def close(self) -> None:
        """Stop the reading that goes on, and wait for its end."""
        if self.reading is not None:
            self.reading.stop_reading()
            self.reading = None

    def _is_of_now(self, reading: WeightsReading) -> bool:
        """Return True if a reading answers the last question, and may be of the present weights."""
        return (reading.question, reading.era) == (self.question, self._era)

    def _has_unconfirmed_reading(self) -> bool:
        """Return True if a reading is over after which no look was taken."""
        reading = self.reading
        is_over = reading is not None and reading.found is not None
        return is_over and reading is not self._confirmed_reading

    def _reads_on(self, reading: WeightsReading) -> bool:
        """Return True if steps without tokens would let the late weights of a reading be read."""
        if reading is not self.reading:
            return True  # A later one has begun, and must be confirmed.
        is_late = reading.found is not None and reading.found.is_late
        return is_late and (reading.is_outdated or self._late_seconds < LATE_SECONDS_MAX)

    def _read_late(self, reading: WeightsReading) -> None:
        """Read on for SLICE_SECONDS in the packed weights for which a reading had no time."""
        found = reading.found
        if found is None or reading.is_outdated or not found.is_late:
            return
        if self._late_seconds < LATE_SECONDS_MAX:
            started = self._now()
            reading.is_outdated = self._read_matrices(SLICE_SECONDS)
            self._late_seconds += self._now() - started

    def _read_matrices(self, seconds_max: float) -> bool:
        """Read on in the packed weights. Returns True if none is late."""
        with torch.inference_mode():
            return self._packed.read_matrices(self.sentinel.matrices, seconds_max)

    def _begin_reading(self, previous: WeightsReading | None) -> None:
        """Begin a reading in a thread of its own, once the previous one has ended.

        The thread multiplies by no packed weights, because the steps do so meanwhile.
        """
        reading = WeightsReading(self.question, self._era)
        if previous is not None and previous.is_outdated and self._is_of_now(previous):
            reading.revision = previous.revision + 1
        else:
            self._read_matrices(UPDATE_SECONDS_MAX)  # They may have come with an update.
        self._start_reading(reading, previous)
        self.reading = reading

    def _start_reading(self, reading: WeightsReading, previous: WeightsReading | None) -> None:
        def run() -> None:
            if previous is not None and previous.thread is not None:
                previous.thread.join()
            try:
                reading.found = self._digest(lambda: reading.is_stopped)
            except StoppedError:
                return

        reading.thread = threading.Thread(target=run, name="hybridkv-weights", daemon=True)
        reading.thread.start()  # Where that raises, the next step tries again.

    def _look_now(self) -> None:
        """Take a look and wait until it has arrived."""
        self._look(self._last_step)
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        self.compare()

    def _look(self, step: int, *, is_end: bool = False) -> None:
        """Take a look, which is compared once it has arrived."""
        look, reading = None, self.reading
        try:
            models = seams.models_of(self.runner)
            look = self.sentinel.look(models) if models else None
        except Exception:  # noqa: BLE001  # the log has it
            self._report_blindness()
        self._is_blind = self._is_blind or look is None
        is_over = reading is not None and reading.found is not None
        finished = reading if is_over else None
        self._looks.append(_PendingLook(step, self._version, look, is_end, finished))

    def compare(self) -> None:
        """Compare the looks that have arrived, in the order in which they were taken."""
        while self._looks:
            pending = self._looks[0]
            words = self._words(pending)
            if words is None:
                return
            self._looks.popleft()
            seen = _SeenWeights(pending.version, words)
            if seen != self._seen:
                self._era += 1
                self._packed.renew()
            # What a step computed while the weights changed is of an era that ends with it.
            changed_during_step = pending.is_end and seen != self._seen
            self._seen = None if changed_during_step else seen
            self._eras[pending.step] = self._era
            self._settled = pending.step
            reading = pending.finished_reading
            if reading is not None and not changed_during_step and self._is_of_now(reading):
                self._confirmed_reading = reading

    def _words(self, pending: _PendingLook) -> bytes | None:
        """Return the words that a look saw. None = they have not arrived yet.

        A failed look returns random words, so it never equals another look.
        """
        try:
            if pending.look is not None:
                words = pending.look.words_digest()
                self._is_blind = self._is_blind and words is None
                return words
        except Exception:  # noqa: BLE001  # the log has it
            self._report_blindness()
        return secrets.token_bytes(8)

    def _report_blindness(self) -> None:
        """Log that a look failed, unless the look before failed too.

        The handler of the exception calls this.
        """
        if not self._is_blind:
            logger.exception("hybridkv: the weights cannot be looked at in each step")
        self._is_blind = True

    def _change(self) -> None:
        """Note that a method runs now that may change the weights."""
        self.close()
        self._confirmed_reading = None  # It may keep memory of old weights.
        self._version += 1
        self._late_seconds = 0.0

    def _followed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that calls `method` of vLLM, and notes what it may do."""

        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            self._change()
            released = seams.released_memory(name, args, kwargs)
            if released:
                self._asleep.update(released)
                self._end_copies()
            result = method(*args, **kwargs)
            self._asleep.difference_update(seams.restored_memory(name, args, kwargs))
            return result

        return call

    def _end_copies(self) -> None:
        try:
            if self._before_sleep is not None:
                self._before_sleep()
        except Exception:
            logger.exception("hybridkv: copies could not be ended before the engine sleeps")

    def _digest(self, stop: Callable[[], bool], *, multiplies: bool = False) -> WeightsDigest:
        """Read all weights of the model and of its drafter. See `digest_weights`."""
        started = time.perf_counter()
        occupied_bytes = seams.occupied_bytes(self.runner)
        if self._version and seams.has_static_buffers():
            # Such a method writes into the buffers, and vLLM goes on with what is elsewhere.
            logger.warning(_UNREAD, f"model (PrefetchOffloader, after {self._version} updates)")
            content = self._packed.unread_content("model").hex()
            return WeightsDigest(content, (UnreadModule("model", "PrefetchOffloader"),), 0, 0.0)
        try:
            # The engine's tensors may be of inference mode, which is set thread by thread.
            with torch.inference_mode():
                models = seams.models_of(self.runner)
                found = digest_weights(
                    models, self._packed, stop, occupied_bytes, multiplies=multiplies
                )
        except StoppedError:
            raise
        except Exception as error:
            logger.exception("hybridkv: the weights cannot be read")
            random, seconds = secrets.token_hex(DIGEST_BYTES), time.perf_counter() - started
            return WeightsDigest(random, (UnreadModule("model", type(error).__name__),), 0, seconds)
        size = format_size(found.size_bytes)
        text = "hybridkv: weights %s: %s were read in %.3f s"
        logger.info(text, found.digest, size, found.seconds)
        if found.unread:
            logger.warning(_UNREAD, found.unread_text())
        return found
