"""The weights that a worker has in memory: which they are, and whether they still are.

A digest of all bytes says which they are (`weights_digest`). It takes seconds, and proves the
moment in which it was taken. A sentinel looks at some words around every step (`weights_sentinel`).
A run of looks that saw the same is an *era*; a digest that was read within an era is that of all
its steps.
"""

import functools
import logging
import secrets
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from hybridkv.core.sizes import format_size
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

WAY_SECONDS = 0.001
"""How long a step that computes nothing lets a reading go on alone, as vLLM's own loop does."""
CHANGING_METHODS = (
    *("load_model", "reload_weights", "reset_weights", "update_weights", "load_weights"),
    *("start_weight_update", "start_draft_weight_update", "finish_weight_update"),
    *("apply_model", "sleep", "wake_up", "discard", "checkpoint_restore"),
)
"""Methods of vLLM's workers, model runners and models that may change the weights.

That is no proof of anything, as others may too. The weights are read anew after these at once,
also where the sentinel sees nothing."""
MEMORY_TAGS = ("weights", "kv_cache")
"""What vLLM's sleep mode takes the memory of, unless it says which."""


class StepLook(NamedTuple):
    """In which era a step ran."""

    number: int  # That of the step's plan.
    era: int


class WeightsAnswer(NamedTuple):
    """What a worker says of its weights in the report of a step."""

    question: int
    """The scheduler role's last question."""
    era: int
    """How often the sentinel saw other weights, or a method ran that may change them."""
    digest: str
    """That of the era, read after the question; empty while it is not known."""
    steps: tuple[StepLook, ...] = ()
    """Steps of which it is known only now. A step in which the weights changed has an era alone."""

    def order(self) -> tuple[int, int, bool]:
        """Later answers are greater."""
        return self.question, self.era, bool(self.digest)


@dataclass(eq=False)
class _Reading:
    """A reading of all bytes beside the steps."""

    question: int
    era: int
    thread: threading.Thread | None = None
    is_stopped: bool = False
    found: WeightsDigest | None = None  # Once it is over.

    @property
    def is_running(self) -> bool:
        return self.thread is not None and self.thread.is_alive()

    def stop(self) -> None:
        """Stop it and wait for its end: memory that is read must not go away."""
        self.is_stopped = True
        if self.thread is not None:
            self.thread.join()


@dataclass(eq=False)
class _TakenLook:
    """A look of the sentinel that was not compared yet."""

    step: int  # The number of the step's plan.
    version: int  # How often a method had run that may change the weights.
    look: WeightsLook | None  # None = it failed.
    is_end: bool = False  # Whether it was taken after the step had computed.
    read: _Reading | None = None  # A reading that was over before.


class EngineWeights:
    """The models of one worker, found through the call that registers its KV caches.

    All methods belong to the worker's thread, which also changes weights.
    """

    def __init__(
        self, runner: Any = None, worker: Any = None, before_sleep: Callable[[], None] | None = None
    ) -> None:
        """`runner` has the model; without one the weights cannot be read.

        `before_sleep` ends what else uses the engine's memory before that goes away.
        """
        self.runner = runner
        self._before_sleep = before_sleep
        self._packed = PackedWeights()
        self._sentinel = WeightsSentinel()
        self._asleep: set[str] = set()  # Tags of memory that may be gone.
        self.question = 0  # The scheduler role's last one.
        self._version = 0  # How often a method ran that may change the weights.
        self._looks: deque[_TakenLook] = deque()
        self._seen: tuple[int, bytes] | None = None
        """Version and words of the last look that was compared; None = like no other."""
        self._era = -1
        self._eras: dict[int, int] = {}
        """The eras of steps that no report has had yet, by the plan's number."""
        self._settled = 0
        self._last_step = 0
        self._reading: _Reading | None = None
        self._read: _Reading | None = None  # The last one in whose era a look came behind it.
        self._is_blind = False  # Whether the last look failed, so that no digest tells anything.
        names = [*CHANGING_METHODS, *_extension_methods(worker)]
        for owner in (runner, worker, *self._models().values()):
            for name in names:
                method = getattr(owner, name, None)
                if callable(method):
                    setattr(owner, name, self._followed(name, method))

    @classmethod
    def of_caller(cls, before_sleep: Callable[[], None] | None = None) -> "EngineWeights":
        """The weights of the model runner among the callers, whose methods are followed then."""
        runner, frame = None, sys._getframe(1)
        while frame is not None:
            owner = frame.f_locals.get("self")
            own = getattr(owner, "__dict__", {})
            if runner is None and _model_of(owner) is not None:
                runner = owner
            elif runner is not None and own.get("model_runner") is runner:
                return cls(runner, owner, before_sleep)
            frame = frame.f_back  # type: ignore[assignment]
        return cls(runner, None, before_sleep)

    @property
    def is_asleep(self) -> bool:
        """Whether memory of the engine may be gone, so that nothing may be read or written."""
        return bool(self._asleep)

    @property
    def era(self) -> int:
        """That of the last look which is known."""
        return self._era

    @property
    def settled(self) -> int:
        """The last step whose first look is known."""
        return self._settled

    @property
    def digest(self) -> str:
        """The digest of the present era, read after the last question; empty if there is none."""
        read = self._read
        if read is None or read.found is None or self._asleep:
            return ""
        is_present = (read.question, read.era) == (self.question, self._era)
        # A method that may change them ran since the last look.
        is_changed = self._seen is None or self._seen[0] != self._version
        return read.found.digest if is_present and not is_changed else ""

    def answer(self) -> WeightsAnswer:
        """What the report of the present step says; each step is in one answer."""
        self.compare()
        waiting = {taken.step for taken in self._looks}
        over = [number for number in self._eras if number not in waiting]
        steps = tuple(StepLook(number, self._eras.pop(number)) for number in over)
        return WeightsAnswer(self.question, self._era, self.digest, steps)

    def read(self) -> WeightsDigest:
        """Read the weights now, which may take seconds; the engine runs no step yet."""
        self._look_now()
        found = self._digest(lambda: False)
        self._reading = _Reading(self.question, self._era, found=found)
        self._look_now()
        self._eras.clear()
        return found

    def step(self, number: int, question: int, *, is_idle: bool = False) -> None:
        """A step begins; look at the weights, and read them beside it if they are not known.

        `is_idle`: it writes no block.
        """
        self.question = max(self.question, question)
        self.watch(number, is_idle=is_idle)
        reading = self._reading
        is_read = reading is not None and self._is_of_now(reading)
        if self.digest or is_read or self._is_blind or self._asleep:
            return
        if reading is not None:
            reading.is_stopped = True
        self._begin_reading(reading)

    def watch(self, number: int, *, is_idle: bool = False) -> None:
        """Look at the weights where a step begins that writes blocks, or they are not known."""
        if self._asleep or number == self._last_step:
            return
        self._last_step = number
        if not is_idle or not self.digest:
            self._look(number)
        self.compare()

    def computed(self) -> None:
        """The step that began last has computed what it stores."""
        if not self._asleep:
            self._look(self._last_step, is_end=True)

    def give_way(self) -> None:
        """Let a reading go on, or end, for WAY_SECONDS.

        An engine in the caller's own process does step after step while a request waits, and never
        lets go of the interpreter; each of the reading's thousand calls would wait for its turn.
        """
        reading = self._reading
        if reading is not None and reading.thread is not None:
            reading.thread.join(WAY_SECONDS)

    def close(self) -> None:
        """Stop a reading and wait for its end."""
        if self._reading is not None:
            self._reading.stop()
            self._reading = None

    def _is_of_now(self, reading: _Reading) -> bool:
        """Whether a reading answers the last question, and may be of the present weights."""
        return (reading.question, reading.era) == (self.question, self._era)

    def _begin_reading(self, before: _Reading | None) -> None:
        reading = _Reading(self.question, self._era)

        def run() -> None:
            if before is not None and before.thread is not None:
                before.thread.join()
            try:
                reading.found = self._digest(lambda: reading.is_stopped)
            except StoppedError:
                return

        reading.thread = threading.Thread(target=run, name="hybridkv-weights", daemon=True)
        reading.thread.start()  # Where that raises, the next step tries again.
        self._reading = reading

    def _look_now(self) -> None:
        """Take a look and wait until it has arrived."""
        self._look(self._last_step)
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        self.compare()

    def _look(self, step: int, *, is_end: bool = False) -> None:
        """Take a look; what it saw is compared once it has arrived."""
        look, reading = None, self._reading
        try:
            models = self._models()
            look = self._sentinel.look(models) if models else None
        except Exception:  # noqa: BLE001  # the log has it
            self._report_blindness()
        self._is_blind = self._is_blind or look is None
        is_over = reading is not None and reading.found is not None
        read = reading if is_over else None
        self._looks.append(_TakenLook(step, self._version, look, is_end, read))

    def compare(self) -> None:
        """Compare the looks that have arrived, in the order in which they were taken."""
        while self._looks:
            taken = self._looks[0]
            words = self._words(taken)
            if words is None:
                return
            self._looks.popleft()
            seen = taken.version, words
            if seen != self._seen:
                self._era += 1
                self._packed.renew()
            # What a step computed while the weights changed is of an era that ends with it.
            is_torn = taken.is_end and seen != self._seen
            self._seen = None if is_torn else seen
            self._eras[taken.step] = self._era
            self._settled = taken.step
            read = taken.read
            if read is not None and not is_torn and self._is_of_now(read):
                self._read = read

    def _words(self, taken: _TakenLook) -> bytes | None:
        """What a look saw; None = it has not arrived. One that failed is like no other."""
        try:
            if taken.look is not None:
                words = taken.look.digest()
                self._is_blind = self._is_blind and words is None
                return words
        except Exception:  # noqa: BLE001  # the log has it
            self._report_blindness()
        return secrets.token_bytes(8)

    def _report_blindness(self) -> None:
        """Say that a look failed, unless the one before did too; call this from its handler."""
        if not self._is_blind:
            logger.exception("hybridkv: the weights cannot be looked at in each step")
        self._is_blind = True

    def _change(self) -> None:
        """The weights may be others from here on."""
        self.close()
        self._version += 1

    def _followed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            self._change()
            tags = kwargs.get("tags", args[0] if args else None)
            if name in ("sleep", "discard"):
                self._asleep.update(tags if name == "discard" and tags else MEMORY_TAGS)
                self._end_copies()
            result = method(*args, **kwargs)
            if name == "wake_up":
                self._asleep.difference_update(tags or MEMORY_TAGS)
            return result

        return call

    def _end_copies(self) -> None:
        try:
            if self._before_sleep is not None:
                self._before_sleep()
        except Exception:
            logger.exception("hybridkv: copies could not be ended before the engine sleeps")

    def _models(self) -> dict[str, torch.nn.Module]:
        """The model and its drafter."""
        runner = self.runner
        drafter = getattr(runner, "drafter", None) or getattr(runner, "speculator", None)
        own, drafting = _model_of(runner), _unwrapped(getattr(drafter, "model", None))
        models = {"model": own, "drafter": drafting}
        return {role: model for role, model in models.items() if model is not None}

    def _digest(self, stop: Callable[[], bool]) -> WeightsDigest:
        """Read all weights of the model and of its drafter."""
        started = time.perf_counter()
        occupied = getattr(self.runner, "model_memory_usage", 0)
        occupied_bytes = occupied if isinstance(occupied, int) else 0
        try:
            # The engine's tensors may be of inference mode, which is set thread by thread.
            with torch.inference_mode():
                found = digest_weights(self._models(), self._packed, stop, occupied_bytes)
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
            text = (
                "hybridkv: the weights of %s cannot be read in memory,"
                " so this engine shares with no other and with no later one;"
                " weights_identity can name them"
            )
            logger.warning(text, found.unread_text())
        return found


def _extension_methods(worker: Any) -> Iterable[str]:
    """The methods of a worker extension, such as a trainer's own updates."""
    config = getattr(getattr(worker, "vllm_config", None), "parallel_config", None)
    extension = getattr(config, "worker_extension_cls", None)
    for cls in type(worker).__mro__ if extension else ():
        if f"{cls.__module__}.{cls.__qualname__}" == extension:
            methods = (name for name, value in vars(cls).items() if callable(value))
            yield from (name for name in methods if not name.startswith("__"))


def _model_of(owner: Any) -> torch.nn.Module | None:
    """The model of a model runner; None where `owner` is no model runner."""
    own = getattr(owner, "__dict__", {})
    return None if isinstance(owner, torch.nn.Module) else _unwrapped(own.get("model"))


def _unwrapped(model: Any) -> torch.nn.Module | None:
    """A model without the wrappers that replay its CUDA graphs."""
    for _ in range(4):
        if isinstance(model, torch.nn.Module) or model is None:
            return model
        unwrap = getattr(model, "unwrap", None)
        model = unwrap() if callable(unwrap) else None
    return None
