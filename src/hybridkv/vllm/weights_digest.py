"""The digest of a model's weights in memory, which tells one model's KV from another's.

Files do not tell it: weights come from hubs, object storage, loaders and trainers, and change while
the engine runs. Two models have the same digest if their tensors have the same names, order,
shapes, dtypes and bytes. Digests are compared within one kind of device and one packing of weights.
"""

import hashlib
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
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
    modules_on_one_buffer,
)
from hybridkv.vllm.packed_probes import Probe

logger = logging.getLogger("vllm.hybridkv")

DIGEST_BYTES = 16
WORDS_MAX = 1 << 22
"""Words of 8 bytes that a device digests at once. It needs some four times their memory."""
PROBE_ROWS = 512
PROBE_SECONDS_MAX = 60.0
"""How long the start of an engine may take to read weights that a library keeps in memory of its
own."""
PROBE_SECONDS_MIN = 5.0
"""Seconds of such work before which nobody can say how long all of it takes."""
_ODD = (-7046029254386353131, -4417276706812531889, -8796714831421723037)
"""Odd factors near 2**64 divided by the golden ratio and two others, as signed words."""
READ_SHARE_MIN = 0.75
"""The part of a model's memory that must have been read. vLLM also counts the allocator's
roundings, workspaces and tables, which are a few percent. Hidden experts or linear layers are more
than a quarter of every model."""
WORKSPACE_BYTES = 64 << 20
"""What workspaces and the empty parts of the allocator's segments (2 and 20 MiB) take of a model's
memory, however small the model is. On a GPU that is a quarter of a small one."""


class UnreadModule(NamedTuple):
    """A module that computes with weights of which nothing is known."""

    name: str
    """With the model's role in front, as `model.layers.0.mlp.experts`."""
    kind: str
    """The class of the module's quantization method, else of the module."""


class WeightsDigest(NamedTuple):
    """The digest of a worker's weights, and what could not be read of them."""

    digest: str
    """2 * DIGEST_BYTES hexadecimal digits. No other engine has them if `unread` is not empty."""
    unread: tuple[UnreadModule, ...]
    size_bytes: int
    """Bytes that were read. Tensors that share memory count once."""
    seconds: float
    is_late: bool = False
    """True if there are matrices for which only the time was missing."""

    def unread_text(self) -> str:
        """Return `3 modules (2 Mxfp4MoEMethod, 1 Linear; first model.layers.0.mlp)`, or ""."""
        if not self.unread:
            return ""
        kinds = Counter(module.kind for module in self.unread)
        counts = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
        noun = "module" if len(self.unread) == 1 else "modules"
        return f"{len(self.unread)} {noun} ({counts}; first {self.unread[0].name})"


class StoppedError(Exception):
    """A reading was stopped, because the weights are about to change."""


class _MatrixDigest(NamedTuple):
    """What a digest has of a packed matrix."""

    content: bytes
    is_read: bool
    """True if `content` is of the matrix, False if it is random."""
    is_late: bool
    """True if the matrix is not read yet."""


@dataclass(eq=False, slots=True)
class _BegunMatrix:
    """A matrix of which some products are read."""

    digest: xxhash.xxh3_128 = field(default_factory=xxhash.xxh3_128)
    done: int = 0  # Inputs whose products are in the digest.


class PackedWeights:
    """The digests of one engine's weights that are not read from memory.

    oneDNN keeps weights in memory of its own, and offers nothing but a multiplication with them.
    They are read as products (`packed_probes`). Nobody can write to that memory: new weights have a
    new handler. Each handler is therefore read once.

    oneDNN's object for a matrix is one thread's at a time: two threads that multiply by one matrix
    get wrong products, or end the process. So only the thread that computes the engine's steps may
    call `read_matrices` and `matrix_digest`, between two steps.

    Unread weights have random bytes, the same ones until `renew`. Each engine needs an object of
    its own: two engines in one process may have other weights.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now  # A clock in seconds.
        self._digests: WeakKeyDictionary[Any, bytes] = WeakKeyDictionary()
        """By handler. Empty for a matrix that no product tells from others."""
        self._begun: WeakKeyDictionary[Any, _BegunMatrix] = WeakKeyDictionary()
        self._operations, self._done, self._seconds = 0, 0, 0.0
        """Multiplications that this reading needs and has done, and its seconds so far."""
        self._seconds_max = 0.0  # How long this reading may take.
        self._speed = 0.0  # Multiplications a second; 0.0 = not known yet.
        self._unread_token = secrets.token_bytes(DIGEST_BYTES)

    def renew(self) -> None:
        """Count weights that cannot be read as changed, because all weights may be others now."""
        self._unread_token = secrets.token_bytes(DIGEST_BYTES)

    def begin_reading(
        self, matrices: Iterable[PackedMatrix], seconds_max: float | None = None
    ) -> None:
        """Begin a reading of all these matrices, of at most PROBE_SECONDS_MAX unless said."""
        self._operations = sum(map(self._operations_left, matrices))
        self._seconds_max = PROBE_SECONDS_MAX if seconds_max is None else seconds_max
        self._done, self._seconds = 0, 0.0

    def read_matrices(
        self, matrices: Sequence[PackedMatrix], seconds_max: float | None = None
    ) -> bool:
        """Read on in these matrices for `seconds_max`. Returns True if none of them is late."""
        self.begin_reading(matrices, seconds_max)
        return not any(self.matrix_digest(matrix, lambda: False).is_late for matrix in matrices)

    def unread_content(self, name: str) -> bytes:
        """Return what the digest has in place of the weights of an unread module."""
        return hashlib.blake2b(self._unread_token + name.encode(), digest_size=16).digest()

    def matrix_digest(self, matrix: PackedMatrix, stop: Callable[[], bool]) -> _MatrixDigest:
        """Read a matrix, unless there is no time. Raises StoppedError on `stop`."""
        handler = matrix.handler
        if handler not in self._digests and matrix.probe is not None:
            try:
                content = self._read(matrix, matrix.probe, stop)
            except StoppedError:
                raise
            except Exception:  # A build of vLLM may lack the kernel.
                logger.debug("hybridkv: %s cannot be read", matrix.name, exc_info=True)
                content = b""
            if content is not None:
                self._digests[handler] = content
        return self.known_digest(matrix)

    def known_digest(self, matrix: PackedMatrix) -> _MatrixDigest:
        """Return what is known of a matrix, in any thread."""
        content = self._digests.get(matrix.handler)
        is_late = content is None and matrix.probe is not None
        if content:
            return _MatrixDigest(content, is_read=True, is_late=False)
        return _MatrixDigest(self.unread_content(matrix.name), is_read=False, is_late=is_late)

    def _read(self, matrix: PackedMatrix, probe: Probe, stop: Callable[[], bool]) -> bytes | None:
        """Return the digest of the matrix's products. Empty if they tell nothing.

        None = there was no time for all of them; the next call goes on. Raises StoppedError on
        `stop`.
        """
        handler = matrix.handler
        begun = self._begun.setdefault(handler, _BegunMatrix())
        while begun.done < probe.questions:
            if stop():
                raise StoppedError
            seconds_left = self._seconds_left()
            if seconds_left <= 0.0:
                return None
            width = handler.k * handler.n
            rows = int(seconds_left * self._speed / width) if self._speed else PROBE_ROWS
            count = min(max(1, rows), PROBE_ROWS, probe.questions - begun.done)
            started = self._now()
            answers = probe.answers(begun.done, count)
            if not answers.isfinite().all():
                return b""  # An infinite value hides the other values of its column.
            begun.digest.update(tensor_bytes(answers))
            begun.done += count
            self._seconds += self._now() - started
            self._done += count * width
            self._speed = self._done / self._seconds if self._seconds else 0.0
        return begun.digest.digest()

    def _seconds_left(self) -> float:
        """Return how much longer this reading may take. 0.0 if the time will not suffice."""
        left = self._seconds_max - self._seconds
        if self._seconds < PROBE_SECONDS_MIN:
            return left
        return left if self._seconds * self._operations <= self._seconds_max * self._done else 0.0

    def _operations_left(self, matrix: PackedMatrix) -> int:
        handler, probe = matrix.handler, matrix.probe
        if probe is None or handler in self._digests:
            return 0
        begun = self._begun.get(handler)
        questions = probe.questions - (begun.done if begun is not None else 0)
        return int(questions * handler.k * handler.n)


def digest_weights(
    models: Mapping[str, torch.nn.Module],
    packed: PackedWeights | None = None,
    stop: Callable[[], bool] = lambda: False,
    occupied_bytes: int = 0,
    is_left_out: Callable[[torch.Tensor], bool] = lambda _: False,
    multiplies: bool = True,
) -> WeightsDigest:
    """Return the digest of all weights of `models` by name, in their order.

    `multiplies`: no step runs meanwhile, so packed matrices may be read (`PackedWeights`).

    `occupied_bytes` is what vLLM says the models occupy, 0 where it does not say. All weights are
    unread where fewer bytes were read than READ_SHARE_MIN of it, less WORKSPACE_BYTES. Raises
    StoppedError on `stop`.
    """
    started = time.perf_counter()
    whole = _WholeDigest(packed or PackedWeights(), stop, multiplies)
    if not models:
        whole.add_unread("no model", "")
    contents = list(module_contents(models, is_left_out))
    if multiplies:
        whole.packed.begin_reading(matrix for content in contents for matrix in content.matrices)
    on_buffers = modules_on_one_buffer(contents)
    for content in contents:
        whole.add_module(content, is_unread=content.is_unread or content.name in on_buffers)
    modules = (module for model in models.values() for module in model.modules())
    weights_bytes = occupied_bytes - sum(map(adapter_bytes, modules))
    if whole.size_bytes < READ_SHARE_MIN * (weights_bytes - WORKSPACE_BYTES):
        whole.add_unread("model", "most of its memory")
    return whole.finished(started)


class _DigestPart(NamedTuple):
    """One tensor, matrix or unread module in a digest."""

    head: str
    """The name, and the form of what has one."""
    content: bytes | torch.Tensor
    """A digest, or the words of `device_content`, which are fetched at the end."""


class _TensorAddress(NamedTuple):
    """The place of a tensor's bytes, which tensors that share memory have in common."""

    device: torch.device
    address: int


class _WholeDigest:
    """A digest that is being made, module by module."""

    def __init__(self, packed: PackedWeights, stop: Callable[[], bool], multiplies: bool) -> None:
        self.packed, self._stop, self._multiplies = packed, stop, multiplies
        self._parts: list[_DigestPart] = []
        self._unread: list[UnreadModule] = []
        self._is_late = False
        self.size_bytes = 0
        self._counted: set[_TensorAddress] = set()
        """Where the tensors are that `size_bytes` counts."""

    def add_module(self, content: ModuleContent, *, is_unread: bool) -> None:
        """Add a module's tensors and packed matrices. Raises StoppedError."""
        parts: list[ReachedTensor | PackedMatrix] = [*content.tensors, *content.matrices]
        for part in parts:
            if self._stop():
                raise StoppedError
            is_read = True
            try:
                if isinstance(part, ReachedTensor):
                    self._add_tensor(part)
                else:
                    is_read = self._add_matrix(part)
            except StoppedError:
                raise
            except Exception:  # A foreign class may refuse anything.
                logger.debug("hybridkv: %s cannot be read", part.name, exc_info=True)
                is_read = False
            is_unread = is_unread or not is_read
        if is_unread:
            self.add_unread(content.name, content.kind)

    def add_unread(self, name: str, kind: str) -> None:
        """Add weights of which nothing is known, so that no other engine has the same digest."""
        self._unread.append(UnreadModule(name, kind))
        self._parts.append(_DigestPart(name, self.packed.unread_content(name)))

    def finished(self, started: float) -> WeightsDigest:
        """Return the digest of all that was added. `started` is of time.perf_counter."""
        whole = hashlib.blake2b(digest_size=DIGEST_BYTES)
        for head, content in self._parts:
            whole.update(head.encode())
            whole.update(content if isinstance(content, bytes) else tensor_bytes(content))
        seconds = time.perf_counter() - started
        unread = tuple(self._unread)
        return WeightsDigest(whole.hexdigest(), unread, self.size_bytes, seconds, self._is_late)

    def _add_matrix(self, matrix: PackedMatrix) -> bool:
        """Add a packed matrix. Returns True if it was read. Raises StoppedError."""
        if self._multiplies:
            found = self.packed.matrix_digest(matrix, self._stop)
        else:
            found = self.packed.known_digest(matrix)
        self._is_late = self._is_late or found.is_late
        self.size_bytes += matrix.size_bytes
        form = f"{matrix.handler.k} {matrix.handler.n}"
        self._parts.append(_DigestPart(f"{matrix.name} {form}\n", found.content))
        return found.is_read

    def _add_tensor(self, reached: ReachedTensor) -> None:
        """Add the bytes, name, dtype, shape and strides of a tensor."""
        tensor = reached.tensor.detach()
        form = f"{tensor.dtype} {tuple(tensor.shape)} {tensor.stride()}"
        run = _dense(tensor)
        is_host = run.device.type == "cpu"
        content = xxhash.xxh3_128(tensor_bytes(run)).digest() if is_host else device_content(run)
        self._parts.append(_DigestPart(f"{reached.name} {form}\n", content))
        address = _TensorAddress(tensor.device, tensor.data_ptr())
        self.size_bytes += 0 if address in self._counted else tensor.nbytes
        self._counted.add(address)


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's bytes in one run, without a copy where they lie in one run."""
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(order).contiguous().view(-1).view(torch.uint8)


def tensor_bytes(tensor: torch.Tensor) -> Any:
    """Return the tensor's elements in their order, whatever its strides and its device are."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()


def device_content(run: torch.Tensor) -> torch.Tensor:
    """Return two signed words that depend on every byte of `run` (uint8) and on its place.

    Arithmetic of words wraps around, so all of it is exact and the same on every device.
    """
    sums = torch.zeros(2, dtype=torch.int64, device=run.device)
    whole = run.numel() // 8 * 8
    rest = torch.zeros(8, dtype=torch.uint8, device=run.device)
    rest[: run.numel() - whole] = run[whole:]
    pieces = [run[at : min(at + 8 * WORDS_MAX, whole)] for at in range(0, whole, 8 * WORDS_MAX)]
    at = 0
    for piece in (*pieces, rest):
        # Words are read where they lie, unless they begin between two words.
        words = (piece if piece.storage_offset() % 8 == 0 else piece.clone()).view(torch.int64)
        place = torch.arange(at, at + len(words), dtype=torch.int64, device=run.device)
        mixed = place.mul_(_ODD[0]).bitwise_xor_(words).mul_(_ODD[1])
        mixed.bitwise_xor_(mixed >> 29).mul_(_ODD[2])
        mixed.bitwise_xor_(mixed >> 32)
        sums[0] += mixed.sum()
        sums[1] += mixed.mul_(mixed + 1).bitwise_xor_(mixed >> 31).sum()
        at += len(words)
    return sums
