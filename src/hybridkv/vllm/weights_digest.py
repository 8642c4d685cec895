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
"""Words of 8 bytes that a device digests at once. It needs some four times their memory."""
PROBE_ROWS = 512
PROBE_SECONDS_MAX = 60.0
"""How long reading the weights may take that a library keeps in memory of its own."""
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
    """The digest of a packed matrix."""

    content: bytes
    is_read: bool
    """True if `content` is of the matrix, False if it is random."""


class PackedWeights:
    """The digests of one engine's weights that are not read from memory.

    oneDNN keeps weights in memory of its own, and offers nothing but a multiplication with them.
    They are read as products (`packed_probes`), if these take no more than PROBE_SECONDS_MAX in
    all. Nobody can write to that memory: new weights have a new handler. Each handler is therefore
    read once, and a handler that is not read keeps a random digest.

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
        """Count weights that cannot be read as changed, because all weights may be others now."""
        self._unread_token = secrets.token_bytes(DIGEST_BYTES)

    def begin_reading(self, matrices: Iterable[PackedMatrix]) -> None:
        """Begin a reading of all these matrices."""
        new = (matrix for matrix in matrices if matrix.handler not in self._digests)
        self._operations = sum(
            matrix.probe.questions * matrix.handler.k * matrix.handler.n
            for matrix in new
            if matrix.probe is not None
        )
        self._done, self._seconds = 0, 0.0

    def unread_content(self, name: str) -> bytes:
        """Return what the digest has in place of the weights of an unread module."""
        return hashlib.blake2b(self._unread_token + name.encode(), digest_size=16).digest()

    def matrix_digest(self, matrix: PackedMatrix, stop: Callable[[], bool]) -> _MatrixDigest:
        """Return the digest of a matrix. Raises StoppedError on `stop`."""
        handler = matrix.handler
        if handler not in self._digests:
            content = self._read(matrix, stop)
            random = secrets.token_bytes(DIGEST_BYTES)
            self._digests[handler] = _MatrixDigest(content or random, bool(content))
        return self._digests[handler]

    def _read(self, matrix: PackedMatrix, stop: Callable[[], bool]) -> bytes:
        """Return the digest of the matrix's products. Empty if it has none or they take too long.

        Raises StoppedError on `stop`.
        """
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
                return b""  # An infinite value hides the other values of its column.
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
    """Return the digest of all weights of `models` by name, in their order.

    `occupied_bytes` is what vLLM says the models occupy, 0 where it does not say. All weights are
    unread where fewer bytes were read than READ_SHARE_MIN of it, less WORKSPACE_BYTES. Raises
    StoppedError on `stop`.
    """
    started = time.perf_counter()
    whole = _WholeDigest(packed or PackedWeights(), stop)
    if not models:
        whole.add_unread("no model", "")
    contents = list(module_contents(models, is_left_out))
    whole.packed.begin_reading(matrix for content in contents for matrix in content.matrices)
    for content in contents:
        whole.add_module(content)
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

    def __init__(self, packed: PackedWeights, stop: Callable[[], bool]) -> None:
        self.packed, self._stop = packed, stop
        self._parts: list[_DigestPart] = []
        self._unread: list[UnreadModule] = []
        self.size_bytes = 0
        self._counted: set[_TensorAddress] = set()
        """Where the tensors are that `size_bytes` counts."""

    def add_module(self, content: ModuleContent) -> None:
        """Add a module's tensors and packed matrices. Raises StoppedError."""
        is_unread = content.is_unread
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
            whole.update(content if isinstance(content, bytes) else _bytes_of(content))
        seconds = time.perf_counter() - started
        return WeightsDigest(whole.hexdigest(), tuple(self._unread), self.size_bytes, seconds)

    def _add_matrix(self, matrix: PackedMatrix) -> bool:
        """Add a packed matrix. Returns True if it was read. Raises StoppedError."""
        found = self.packed.matrix_digest(matrix, self._stop)
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
        content = xxhash.xxh3_128(_bytes_of(run)).digest() if is_host else device_content(run)
        self._parts.append(_DigestPart(f"{reached.name} {form}\n", content))
        address = _TensorAddress(tensor.device, tensor.data_ptr())
        self.size_bytes += 0 if address in self._counted else tensor.nbytes
        self._counted.add(address)


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's bytes in one run, without a copy where they lie in one run."""
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(order).contiguous().view(-1).view(torch.uint8)


def _bytes_of(tensor: torch.Tensor) -> Any:
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
