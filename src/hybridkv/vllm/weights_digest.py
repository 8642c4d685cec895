"""The digest of a model's weights in memory: what tells one model's KV from another's.

Files do not tell it: weights come from hubs, object storage, loaders and trainers, and change while
the engine runs. Two models have the same digest if their tensors have the same names, order,
shapes, dtypes and bytes. It holds for one kind of device and one packing of the weights.
"""

import hashlib
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import xxhash

from hybridkv.vllm.module_tensors import (
    ModuleContent,
    PackedMatrix,
    ReachedTensor,
    adapter_bytes,
    module_contents,
)

logger = logging.getLogger("vllm.hybridkv")

DIGEST_BYTES = 16
WORDS_MAX = 1 << 22
"""Words of 8 bytes that a device digests at once; it needs some four times their memory."""
PROBE_ROWS = 512
PROBE_SECONDS_MAX = 60.0
"""How long reading weights may take that a library keeps in memory of its own."""
_ODD = (-7046029254386353131, -4417276706812531889, -8796714831421723037)
"""Odd factors near 2**64 divided by the golden ratio and two others, as signed words."""
READ_SHARE_MIN = 0.75
"""The part of a model's memory that must have been read. What vLLM counts also has the allocator's
roundings, workspaces and tables of a few percent; experts or linear layers that are hidden are more
than a quarter of every model."""
WORKSPACE_BYTES = 64 << 20
"""What workspaces and the empty parts of the allocator's segments (2 and 20 MiB) take of a model's
memory, however small the model is; a quarter of a small one on a GPU."""


class UnreadModule(NamedTuple):
    """A module that computes with weights of which nothing is known."""

    name: str
    """With the model's role in front, as `model.layers.0.mlp.experts`."""
    kind: str
    """The class of its quantization method, else its own."""


class WeightsDigest(NamedTuple):
    """What a worker's weights are."""

    digest: str
    """2 * DIGEST_BYTES hexadecimal digits; no other engine has it where `unread` is not empty."""
    unread: tuple[UnreadModule, ...]
    size_bytes: int
    """Bytes that were read; tensors that share memory count once."""
    seconds: float

    def unread_text(self) -> str:
        """Returns `3 modules (2 Mxfp4MoEMethod, 1 Linear; first model.layers.0.mlp)`; or empty."""
        if not self.unread:
            return ""
        kinds = Counter(module.kind for module in self.unread)
        counts = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
        noun = "module" if len(self.unread) == 1 else "modules"
        return f"{len(self.unread)} {noun} ({counts}; first {self.unread[0].name})"


class StoppedError(Exception):
    """The weights are about to change while they are read."""


class _MatrixDigest(NamedTuple):
    """What stands for a packed matrix."""

    content: bytes
    is_read: bool
    """Whether `content` is of the matrix, and not random."""


class PackedWeights:
    """What one engine knows of weights that are not read from memory.

    A library keeps weights in memory of its own, and a function that multiplies with them is all
    that there is. They are read as its answers (`packed_probes`), if these take no more than
    PROBE_SECONDS_MAX in all. Nobody can write to that memory: new weights have a new handler. Each
    handler is therefore read once, and one that is not read keeps a random digest.

    Other unread weights have random bytes too, the same ones until `renew`. Each engine needs an
    object of its own: two engines in one process may have other weights.
    """

    def __init__(self) -> None:
        self._digests: WeakKeyDictionary[Any, _MatrixDigest] = WeakKeyDictionary()
        """By handler."""
        self._operations, self._done, self._seconds = 0, 0, 0.0
        """Multiplications that this reading needs and has done, and its seconds so far."""
        self._unread_token = secrets.token_bytes(DIGEST_BYTES)

    def renew(self) -> None:
        """Weights may be others from here on: what cannot be read counts as changed."""
        self._unread_token = secrets.token_bytes(DIGEST_BYTES)

    def begin(self, matrices: Iterable[PackedMatrix]) -> None:
        """Begin a reading of all these."""
        new = (matrix for matrix in matrices if matrix.handler not in self._digests)
        self._operations = sum(
            matrix.probe.questions * matrix.handler.k * matrix.handler.n
            for matrix in new
            if matrix.probe is not None
        )
        self._done, self._seconds = 0, 0.0

    def unread_content(self, name: str) -> bytes:
        """What stands for the weights of an unread module."""
        return hashlib.blake2b(self._unread_token + name.encode(), digest_size=16).digest()

    def digest(self, matrix: PackedMatrix, stop: Callable[[], bool]) -> _MatrixDigest:
        """What stands for a matrix; StoppedError on `stop`."""
        handler = matrix.handler
        if handler not in self._digests:
            content = self._read(matrix, stop)
            random = secrets.token_bytes(DIGEST_BYTES)
            self._digests[handler] = _MatrixDigest(content or random, bool(content))
        return self._digests[handler]

    def _read(self, matrix: PackedMatrix, stop: Callable[[], bool]) -> bytes:
        """The digest of the matrix's answers; empty where it has none, or they take too long."""
        handler, probe, digest = matrix.handler, matrix.probe, xxhash.xxh3_128()
        if probe is None:
            return b""
        for start in range(0, probe.questions, PROBE_ROWS):
            if stop():
                raise StoppedError
            if self._seconds * self._operations > PROBE_SECONDS_MAX * max(1, self._done):
                return b""
            started = time.perf_counter()
            count = min(PROBE_ROWS, probe.questions - start)
            answers = probe.answers(start, count)
            if not answers.isfinite().all():
                return b""  # Such a value hides the others of its column.
            digest.update(_bytes_of(answers))
            self._seconds += time.perf_counter() - started
            self._done += count * handler.k * handler.n
        return digest.digest()


def digest_weights(
    models: Mapping[str, torch.nn.Module],
    packed: PackedWeights | None = None,
    stop: Callable[[], bool] = lambda: False,
    occupied_bytes: int = 0,
    is_left_out: Callable[[torch.Tensor], bool] = lambda _: False,
) -> WeightsDigest:
    """The digest of all weights of `models` by name, in their order; StoppedError on `stop`.

    `occupied_bytes` is what vLLM says the models occupy, 0 where it does not: with fewer than
    READ_SHARE_MIN of it read, less WORKSPACE_BYTES, the whole is unread.
    """
    started = time.perf_counter()
    whole = _WholeDigest(packed or PackedWeights(), stop)
    if not models:
        whole.add_unread("no model", "")
    contents = list(module_contents(models, is_left_out))
    whole.packed.begin(matrix for content in contents for matrix in content.matrices)
    for content in contents:
        whole.add_module(content)
    every = (module for model in models.values() for module in model.modules())
    weights_bytes = occupied_bytes - sum(map(adapter_bytes, every))
    if whole.size_bytes < READ_SHARE_MIN * (weights_bytes - WORKSPACE_BYTES):
        whole.add_unread("model", "most of its memory")
    return whole.finished(started)


class _WholeDigest:
    """A digest that is being made, module by module."""

    def __init__(self, packed: PackedWeights, stop: Callable[[], bool]) -> None:
        self.packed, self._stop = packed, stop
        self._parts: list[tuple[str, bytes | torch.Tensor]] = []
        """Names and forms with what they have; a device's words are fetched at the end."""
        self._unread: list[UnreadModule] = []
        self.size_bytes = 0
        self._counted: set[tuple[torch.device, int]] = set()
        """Where tensors are that `size_bytes` has."""

    def add_module(self, content: ModuleContent) -> None:
        """A module's tensors and packed matrices."""
        is_unread = content.is_unread
        parts: list[ReachedTensor | PackedMatrix] = [*content.tensors, *content.matrices]
        for part in parts:
            if self._stop():
                raise StoppedError
            is_read = True
            try:
                if isinstance(part, ReachedTensor):
                    self._add(part)
                else:
                    is_read = self._ask(part)
            except StoppedError:
                raise
            except Exception:  # A foreign class may refuse anything.
                logger.debug("hybridkv: %s cannot be read", part.name, exc_info=True)
                is_read = False
            is_unread = is_unread or not is_read
        if is_unread:
            self.add_unread(content.name, content.kind)

    def add_unread(self, name: str, kind: str) -> None:
        """Weights of which nothing is known, so that no other engine has the same digest."""
        self._unread.append(UnreadModule(name, kind))
        self._parts.append((name, self.packed.unread_content(name)))

    def finished(self, started: float) -> WeightsDigest:
        """The digest of all that was added; `started` by time.perf_counter."""
        whole = hashlib.blake2b(digest_size=DIGEST_BYTES)
        for head, content in self._parts:
            whole.update(head.encode())
            whole.update(content if isinstance(content, bytes) else _bytes_of(content))
        seconds = time.perf_counter() - started
        return WeightsDigest(whole.hexdigest(), tuple(self._unread), self.size_bytes, seconds)

    def _ask(self, matrix: PackedMatrix) -> bool:
        """Add a packed matrix; returns whether it was read."""
        found = self.packed.digest(matrix, self._stop)
        self.size_bytes += matrix.size_bytes
        form = f"{matrix.handler.k} {matrix.handler.n}"
        self._parts.append((f"{matrix.name} {form}\n", found.content))
        return found.is_read

    def _add(self, reached: ReachedTensor) -> None:
        """Add a tensor."""
        tensor = reached.tensor.detach()
        form = f"{tensor.dtype} {tuple(tensor.shape)} {tensor.stride()}"
        run = _dense(tensor)
        is_host = run.device.type == "cpu"
        content = xxhash.xxh3_128(_bytes_of(run)).digest() if is_host else device_content(run)
        self._parts.append((f"{reached.name} {form}\n", content))
        place = tensor.device, tensor.data_ptr()
        self.size_bytes += 0 if place in self._counted else tensor.nbytes
        self._counted.add(place)


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
    for lying in (*pieces, rest):
        # Words are read where they lie, unless they begin between two words.
        piece = (lying if lying.storage_offset() % 8 == 0 else lying.clone()).view(torch.int64)
        place = torch.arange(at, at + len(piece), dtype=torch.int64, device=run.device)
        mixed = place.mul_(_ODD[0]).bitwise_xor_(piece).mul_(_ODD[1])
        mixed.bitwise_xor_(mixed >> 29).mul_(_ODD[2])
        mixed.bitwise_xor_(mixed >> 32)
        sums[0] += mixed.sum()
        sums[1] += mixed.mul_(mixed + 1).bitwise_xor_(mixed >> 31).sum()
        at += len(piece)
    return sums
