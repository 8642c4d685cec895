"""The digest of the weights that a worker has in memory: what tells one model's KV from another's.

Files do not tell it: weights come from hubs, object storage, loaders and trainers, and change while
the engine runs. Two workers have the same digest if their tensors have the same names, order,
shapes, dtypes and bytes. It holds for one kind of device and one packing of the weights.
"""

import hashlib
import logging
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import xxhash

from hybridkv.core.sizes import format_size
from hybridkv.vllm.module_tensors import closures, is_handler, own_tensors
from hybridkv.vllm.weights_sample import sample_weights

logger = logging.getLogger("vllm.hybridkv")

DIGEST_BYTES = 16
WORDS_MAX = 1 << 22
"""Words of 8 bytes that a device digests at once; it needs some four times their memory."""
WAY_SECONDS = 0.001
"""How long a step that computes nothing lets a reading go on alone, as vLLM's own loop does."""
PROBE_ROWS = 512
PROBE_SECONDS_MAX = 60.0
"""How long reading weights may take that a library keeps in memory of its own."""
CHANGING_METHODS = (
    *("load_model", "reload_weights", "reset_weights", "sleep", "wake_up", "update_weights"),
    *("start_weight_update", "start_draft_weight_update", "finish_weight_update"),
)
"""Methods of vLLM's workers and model runners that may change the weights."""
_ODD = (-7046029254386353131, -4417276706812531889, -8796714831421723037)
"""Odd factors near 2**64 divided by the golden ratio and two others, as signed words."""
_Probe = Callable[..., torch.Tensor]
"""A layer's function of (inputs, an unused weight, None)."""


class WeightsDigest(NamedTuple):
    """What a worker's weights are."""

    digest: str
    """2 * DIGEST_BYTES hexadecimal digits; no other worker has it where `unread` is not empty."""
    unread: tuple[str, ...]
    """Modules whose weights a library keeps where they cannot be read."""
    size_bytes: int
    seconds: float


class WeightsAnswer(NamedTuple):
    """What a worker says of its weights in the report of a step."""

    question: int
    """The scheduler role's last question."""
    digest: str
    """Empty while the weights are not known."""
    version: int
    """How often they may have changed, because a method ran that may change them."""
    era: int
    """How often they were seen to be others, or another version. They are looked at (a sample) in
    each step in which they are not known, so steps of one era had the same weights."""


class StoppedError(Exception):
    """The weights are about to change while they are read."""


class PackedWeights:
    """Digests of the weights that a library keeps in memory of its own.

    A function that multiplies with them is all that there is, so they are read as its answers to
    units, if that takes no more than PROBE_SECONDS_MAX in all. Nobody can write to that memory: new
    weights have a new handler. Each handler is therefore read once, and one that is not read keeps
    a random digest.
    """

    def __init__(self) -> None:
        self._digests: WeakKeyDictionary[Any, tuple[bytes, bool]] = WeakKeyDictionary()
        """By handler, each with whether it was read."""
        self._operations, self._done, self._seconds = 0, 0, 0.0
        """Multiplications that this reading needs and has done, and its seconds so far."""

    def begin(self, handlers: Iterable[Any]) -> None:
        """Begin a reading of all these."""
        new = [one for one in handlers if one not in self._digests]
        self._operations = sum(one.k * one.k * one.n for one in new)
        self._done, self._seconds = 0, 0.0

    def digest(
        self, handler: Any, linear: _Probe, unused: torch.Tensor, stop: Callable[[], bool]
    ) -> tuple[bytes, bool]:
        """The digest, and whether it was read from the weights."""
        if handler not in self._digests:
            content = self._read(handler, linear, unused, stop)
            self._digests[handler] = content or secrets.token_bytes(DIGEST_BYTES), bool(content)
        return self._digests[handler]

    def _read(
        self, handler: Any, linear: _Probe, unused: torch.Tensor, stop: Callable[[], bool]
    ) -> bytes:
        """The digest of the matrix, row by row; empty where that takes too long."""
        digest = xxhash.xxh3_128()
        for start in range(0, handler.k, PROBE_ROWS):
            if stop():
                raise StoppedError
            if self._seconds * self._operations > PROBE_SECONDS_MAX * max(1, self._done):
                return b""
            started = time.perf_counter()
            rows = min(PROBE_ROWS, handler.k - start)
            units = torch.zeros(rows, handler.k, dtype=unused.dtype)
            units.diagonal(start).fill_(1)
            answers = linear(units, unused, None)
            if not answers.isfinite().all():
                return b""  # Such a value hides the others of its column.
            digest.update(_bytes_of(answers))
            self._seconds += time.perf_counter() - started
            self._done += rows * handler.k * handler.n
        return digest.digest()


class _Reading(NamedTuple):
    """A complete reading, with what it was for and a sample that was the same before and after."""

    question: int
    version: int
    found: WeightsDigest
    sample: bytes


class EngineWeights:
    """The models of one worker, found through the call that registers its KV caches.

    All methods but the reading itself belong to the worker's thread, which also changes weights.
    """

    def __init__(self, runner: Any = None, worker: Any = None) -> None:
        """`runner` has the model; without one the weights cannot be read."""
        self._runner = runner
        self._packed = PackedWeights()
        self._question, self._version = 0, 0
        """The scheduler role's last question, and how often the weights may have changed."""
        self._read: _Reading | None = None  # The last complete one.
        self._is_unseen = False  # Whether they could not be looked at.
        self._sampled_version, self._sample = -1, b""
        """What the last look saw; empty where it failed."""
        self._era = -1
        self._reader: tuple[threading.Thread, threading.Event, tuple[int, int]] | None = None
        """The thread that reads now, what stops it, and what it reads for."""
        for owner in (runner, worker):
            for name in CHANGING_METHODS:
                method = getattr(owner, name, None)
                if callable(method):
                    setattr(owner, name, self._followed(method))

    @classmethod
    def of_caller(cls) -> "EngineWeights":
        """The weights of the model runner among the callers, whose methods are followed then."""
        runner, frame = None, sys._getframe(1)
        while frame is not None:
            owner = frame.f_locals.get("self")
            own = getattr(owner, "__dict__", {})
            if runner is None and isinstance(own.get("model"), torch.nn.Module):
                runner = owner
            elif runner is not None and own.get("model_runner") is runner:
                return cls(runner, owner)
            frame = frame.f_back  # type: ignore[assignment]
        return cls(runner)

    @property
    def answer(self) -> WeightsAnswer:
        """What the report of the present step says."""
        read = self._read
        digest = read.found.digest if read is not None and self._is_known(read) else ""
        return WeightsAnswer(self._question, digest, self._version, self._era)

    def read(self) -> WeightsDigest:
        """Read the weights now, which may take seconds."""
        self._look()
        found = self._digest(lambda: False)
        self._read = _Reading(self._question, self._version, found, self._sample)
        return found

    def _is_known(self, read: "_Reading") -> bool:
        """Whether the reading is of the weights that the last look saw."""
        is_asked = (read.question, read.version) == (self._question, self._version)
        return is_asked and read.sample == self._sample

    def _look(self) -> None:
        """Sample the weights, and begin an era if they are others."""
        sample = self._take_sample()
        if not sample or (self._version, sample) != (self._sampled_version, self._sample):
            self._era += 1
        self._sampled_version, self._sample = self._version, sample

    def step(self, question: int) -> None:
        """A step begins; read the weights beside it if the question or the weights are new."""
        self._question = max(self._question, question)
        now = self._question, self._version
        read = self._read
        if read is not None and self._is_known(read):
            return
        self._look()
        is_read = read is not None and self._is_known(read)
        reader = self._reader
        # One that has ended saw weights that changed meanwhile, and another one begins.
        is_reading = reader is not None and reader[2] == now and reader[0].is_alive()
        if is_read or is_reading:
            return
        before = self._reader
        if before is not None:
            before[1].set()
        stopped = threading.Event()

        def run() -> None:
            if before is not None:
                before[0].join()
            sample = self._take_sample()
            try:
                found = self._digest(stopped.is_set)
            except StoppedError:
                return
            if self._take_sample() == sample and not stopped.is_set():
                self._read = _Reading(*now, found, sample)

        thread = threading.Thread(target=run, name="hybridkv-weights", daemon=True)
        self._reader = thread, stopped, now
        thread.start()

    def give_way(self) -> None:
        """Let a reading go on, or end, for WAY_SECONDS.

        An engine in the caller's own process does step after step while a request waits, and never
        lets go of the interpreter; each of the reading's thousand calls would wait for its turn.
        """
        if self._reader is not None:
            self._reader[0].join(WAY_SECONDS)

    def close(self) -> None:
        """Stop a reading and wait for its end: memory that is read must not go away."""
        if self._reader is not None:
            thread, stopped, _ = self._reader
            stopped.set()
            thread.join()
            self._reader = None

    def _change(self) -> None:
        """The weights may be others from here on."""
        self.close()
        self._version += 1

    def _followed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._change()
            return method(*args, **kwargs)

        return call

    def _models(self) -> dict[str, torch.nn.Module]:
        """The model and its drafter."""
        runner = self._runner
        drafter = getattr(runner, "drafter", None) or getattr(runner, "speculator", None)
        models = (getattr(owner, "model", None) for owner in (runner, drafter))
        named = zip(("model", "drafter"), models, strict=True)
        return {role: model for role, model in named if isinstance(model, torch.nn.Module)}

    def _take_sample(self) -> bytes:
        """A sample of the weights; empty where that fails, so that no step is like another."""
        try:
            with torch.inference_mode():
                return sample_weights(self._models().values())
        except Exception:
            if not self._is_unseen:
                logger.exception("hybridkv: the weights cannot be looked at in each step")
            self._is_unseen = True
            return b""

    def _digest(self, stop: Callable[[], bool]) -> WeightsDigest:
        """Read all weights of the model and of its drafter."""
        started = time.perf_counter()
        try:
            # The engine's tensors may be of inference mode, which is set thread by thread.
            with torch.inference_mode():
                found = digest_weights(self._models(), self._packed, stop)
        except StoppedError:
            raise
        except Exception as error:
            logger.exception("hybridkv: the weights cannot be read")
            random = secrets.token_hex(DIGEST_BYTES)
            return WeightsDigest(random, (str(error),), 0, time.perf_counter() - started)
        said = found.digest, format_size(found.size_bytes), found.seconds
        logger.info("hybridkv: weights %s: %s were read in %.3f s", *said)
        if found.unread:
            text = (
                "hybridkv: the weights of %d modules (%s ...) cannot be read in memory within %g s,"
                " so this engine shares with no other and with no later one;"
                " weights_identity can name them"
            )
            logger.warning(text, len(found.unread), found.unread[0], PROBE_SECONDS_MAX)
        return found


def digest_weights(
    models: Mapping[str, torch.nn.Module],
    packed: PackedWeights | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> WeightsDigest:
    """The digest of all weights of `models` by name, in their order; StoppedError on `stop`."""
    started = time.perf_counter()
    whole = _WholeDigest(packed or PackedWeights(), stop)
    if not models:
        whole.add_unread("no model")
    every = (module for model in models.values() for module in model.modules())
    kept = (one for module in every for _, one in closures(module) if is_handler(one))
    whole.packed.begin(kept)
    for role, model in models.items():
        parents: dict[int, list[torch.nn.Module]] = {}
        for module in model.modules():
            for child in module.children():
                parents.setdefault(id(child), []).append(module)
        for prefix, module in model.named_modules():
            whole.add_module(f"{role}.{prefix}", module, parents.get(id(module), []))
    return whole.finished(started)


class _WholeDigest:
    """A digest that is being made, module by module."""

    def __init__(self, packed: PackedWeights, stop: Callable[[], bool]) -> None:
        self.packed, self._stop = packed, stop
        self._parts: list[tuple[str, bytes | torch.Tensor]] = []
        """Names and forms with what they have; a device's words are fetched at the end."""
        self._unread: list[str] = []
        self._size_bytes = 0

    def add_module(
        self, where: str, module: torch.nn.Module, parents: list[torch.nn.Module]
    ) -> None:
        """A module's own parameters and buffers, and what kernels made of them."""
        if self._stop():
            raise StoppedError
        for name, tensor in own_tensors(module):
            self._add(f"{where}.{name}", tensor)
        emptied = _emptied(module)
        is_found = emptied is None
        for function, kept in closures(module):
            if isinstance(kept, torch.Tensor):
                is_found = True
                self._add(f"{where}()", kept)
            elif emptied is not None and is_handler(kept):
                is_found = True
                digest, is_read = self.packed.digest(kept, function, emptied, self._stop)
                self._size_bytes += kept.k * kept.n * emptied.element_size()
                self._parts.append((f"{where}() {kept.k} {kept.n}\n", digest))
                if not is_read:
                    self._unread.append(where)
        if emptied is None:
            return
        for parent in parents:
            for name, value in vars(getattr(parent, "impl", None) or object).items():
                if isinstance(value, torch.Tensor):
                    is_found = True
                    self._add(f"{where}.impl.{name}", value)
        if not is_found:
            self.add_unread(where)

    def add_unread(self, where: str) -> None:
        """Weights of which nothing is known, so that no two digests of them are the same."""
        self._unread.append(where)
        self._parts.append((where, secrets.token_bytes(DIGEST_BYTES)))

    def finished(self, started: float) -> WeightsDigest:
        """The digest of all that was added; `started` by time.perf_counter."""
        whole = hashlib.blake2b(digest_size=DIGEST_BYTES)
        for head, content in self._parts:
            whole.update(head.encode())
            whole.update(content if isinstance(content, bytes) else _bytes_of(content))
        seconds = time.perf_counter() - started
        return WeightsDigest(whole.hexdigest(), tuple(self._unread), self._size_bytes, seconds)

    def _add(self, name: str, tensor: torch.Tensor) -> None:
        self._size_bytes += tensor.nbytes
        form = f"{tensor.dtype} {tuple(tensor.shape)} {tensor.stride()}"
        run = _dense(tensor.detach())
        is_host = run.device.type == "cpu"
        content = xxhash.xxh3_128(_bytes_of(run)).digest() if is_host else device_content(run)
        self._parts.append((f"{name} {form}\n", content))


def _emptied(module: torch.nn.Module) -> torch.Tensor | None:
    """The parameter whose values were packed elsewhere, as vLLM's CPU kernels do."""
    own = module.parameters(recurse=False)
    return next((one for one in own if one.numel() == 0 and not one.is_meta), None)


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes in one run: as they lie there where that is possible, else copied."""
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(order).contiguous().view(-1).view(torch.uint8)


def _bytes_of(tensor: torch.Tensor) -> Any:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()


def device_content(run: torch.Tensor) -> torch.Tensor:
    """Two signed words that depend on every byte of `run` (uint8) and on its place.

    Arithmetic of words wraps around, so all of it is exact and the same on every device.
    """
    sums = torch.zeros(2, dtype=torch.int64, device=run.device)
    whole = run.numel() // 8 * 8
    rest = torch.zeros(8, dtype=torch.uint8, device=run.device)
    rest[: run.numel() - whole] = run[whole:]
    pieces = [run[at : min(at + 8 * WORDS_MAX, whole)] for at in range(0, whole, 8 * WORDS_MAX)]
    at = 0
    for one in (*pieces, rest):
        # Words are read where they lie, unless they begin between two words.
        piece = (one if one.storage_offset() % 8 == 0 else one.clone()).view(torch.int64)
        place = torch.arange(at, at + len(piece), dtype=torch.int64, device=run.device)
        mixed = place.mul_(_ODD[0]).bitwise_xor_(piece).mul_(_ODD[1])
        mixed.bitwise_xor_(mixed >> 29).mul_(_ODD[2])
        mixed.bitwise_xor_(mixed >> 32)
        sums[0] += mixed.sum()
        sums[1] += mixed.mul_(mixed + 1).bitwise_xor_(mixed >> 31).sum()
        at += len(piece)
    return sums
