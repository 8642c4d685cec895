"""The digest of the weights that a worker has in memory: what tells one model's KV from another's.

Files do not tell it: weights come from hubs, object storage, loaders and trainers, and change while
the engine runs.  Two workers have the same digest if their tensors have the same names, order,
shapes, dtypes and bytes.  It holds for one kind of device and one packing of the weights, which are
part of the identity by themselves.
"""

import hashlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import xxhash
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

DIGEST_BYTES = 16
WORDS_MAX = 1 << 22
"""Words of 8 bytes that a device digests at once; it needs some four times their memory."""
PROBE_ROWS = 512
PROBE_OPERATIONS_MAX = 4e12
"""Multiplications and additions for reading weights that a library keeps; a CPU takes seconds."""
CHANGING_METHODS = (
    *("load_model", "reload_weights", "reset_weights", "wake_up"),
    *("start_weight_update", "start_draft_weight_update", "update_weights", "finish_weight_update"),
)
"""Methods of vLLM's workers and model runners after which the weights may be others."""
_ODD = (-7046029254386353131, -4417276706812531889, -8796714831421723037)
"""Odd factors near 2**64 divided by the golden ratio and two others, as signed words."""


class WeightsDigest(NamedTuple):
    """What a worker's weights are."""

    digest: str
    """2 * DIGEST_BYTES hexadecimal digits; empty where `unread` is not."""
    unread: tuple[str, ...]
    """Parameters whose values a library keeps where they cannot be read."""
    size_bytes: int
    seconds: float


class EngineWeights:
    """The models of one worker, found through the call that registers its KV caches."""

    def __init__(self, runner: Any, worker: Any) -> None:
        """`worker` may be None; `runner` has the model."""
        self._runner, self._worker = runner, worker

    @classmethod
    def of_caller(cls) -> "EngineWeights | None":
        """The weights of the model runner among the callers; None where there is none."""
        runner, frame = None, sys._getframe(1)
        while frame is not None:
            owner = frame.f_locals.get("self")
            if runner is None and isinstance(getattr(owner, "model", None), torch.nn.Module):
                runner = owner
            elif runner is not None and getattr(owner, "model_runner", None) is runner:
                return cls(runner, owner)
            frame = frame.f_back  # type: ignore[assignment]
        return cls(runner, None) if runner is not None else None

    def digest(self) -> WeightsDigest:
        """Read all weights of the model and of its drafter. It may take seconds."""
        drafter = getattr(self._runner, "drafter", None) or getattr(
            self._runner, "speculator", None
        )
        models = {"model": self._runner.model, "drafter": getattr(drafter, "model", None)}
        return digest_weights(
            {name: model for name, model in models.items() if isinstance(model, torch.nn.Module)}
        )

    def watch(self, changed: Callable[[], None]) -> None:
        """Call `changed` after each method of CHANGING_METHODS, also after one that raised."""
        for owner in (self._runner, self._worker):
            for name in CHANGING_METHODS:
                method = getattr(owner, name, None)
                if callable(method):
                    setattr(owner, name, _followed(method, changed))


def _followed(method: Callable[..., Any], changed: Callable[[], None]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        finally:
            changed()

    return call


def digest_weights(models: Mapping[str, torch.nn.Module]) -> WeightsDigest:
    """The digest of all parameters and buffers of `models`, by name, in their order."""
    started = time.perf_counter()
    parts: list[tuple[str, bytes | torch.Tensor]] = []
    unread: list[str] = []
    size_bytes, operations = 0, 0.0
    for role, model in models.items():
        parents: dict[int, list[torch.nn.Module]] = {}
        for module in model.modules():
            for child in module.children():
                parents.setdefault(id(child), []).append(module)
        for prefix, module in model.named_modules():
            where = f"{role}.{prefix}"
            for name, tensor in _own_tensors(module):
                size_bytes += tensor.nbytes
                parts.append((f"{where}.{name} {_form(tensor)}\n", _content(tensor)))
            emptied = _emptied(module)
            if emptied is None:
                continue
            packed = list(_packed_tensors(module, parents.get(id(module), [])))
            probes = _probes(module)
            operations += sum(2.0 * rows * rows * columns for _, rows, columns in probes)
            if not (packed or probes) or operations > PROBE_OPERATIONS_MAX:
                unread.append(where)
                continue
            for name, tensor in packed:
                size_bytes += tensor.nbytes
                parts.append((f"{where}.{name} {_form(tensor)}\n", _content(tensor)))
            for linear, rows, columns in probes:
                size_bytes += rows * columns * emptied.element_size()
                parts.append((f"{where} {rows} {columns}\n", _probed(linear, emptied, rows)))
    whole = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for head, content in parts:
        whole.update(head.encode())
        whole.update(content if isinstance(content, bytes) else _bytes_of(content))
    digest = "" if unread else whole.hexdigest()
    return WeightsDigest(digest, tuple(unread), size_bytes, time.perf_counter() - started)


def _own_tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers of this module alone, wrappers taken apart."""
    for kind in (module.named_parameters, module.named_buffers):
        for name, tensor in kind(recurse=False):
            yield from _plain_tensors(name, tensor)


def _plain_tensors(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    partitions = getattr(tensor, "partitions", None)
    if isinstance(partitions, Mapping):
        # vLLM's SharedWeightParameter.
        for key, part in partitions.items():
            yield from _plain_tensors(f"{name}.{key}", part)
    elif is_traceable_wrapper_subclass(tensor):
        for inner in tensor.__tensor_flatten__()[0]:
            yield from _plain_tensors(f"{name}.{inner}", getattr(tensor, inner))
    elif not tensor.is_meta:
        yield name, tensor.detach()


def _form(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)} {tensor.stride()}"


def _emptied(module: torch.nn.Module) -> torch.Tensor | None:
    """The parameter whose values were packed elsewhere, as vLLM's CPU kernels do."""
    own = module.parameters(recurse=False)
    return next((one for one in own if one.numel() == 0 and not one.is_meta), None)


def _packed_tensors(
    module: torch.nn.Module, parents: list[torch.nn.Module]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Packed weights in the functions that use them, or in the attention's implementation."""
    for name, value in vars(module).items():
        for index, cell in enumerate(getattr(value, "__closure__", None) or ()):
            if isinstance(cell.cell_contents, torch.Tensor):
                yield f"{name}.{index}", cell.cell_contents
    for parent in parents:
        for name, value in vars(getattr(parent, "impl", None) or object).items():
            if isinstance(value, torch.Tensor):
                yield f"impl.{name}", value


def _probes(module: torch.nn.Module) -> list[tuple[Callable[..., torch.Tensor], int, int]]:
    """(function, rows, columns) of weights that oneDNN keeps in memory of its own."""
    probes = []
    for value in vars(module).values():
        for cell in getattr(value, "__closure__", None) or ():
            handler = cell.cell_contents
            if type(handler).__name__ == "CPUDNNLGEMMHandler":
                probes.append((value, int(handler.k), int(handler.n)))
    return probes


def _probed(linear: Callable[..., torch.Tensor], emptied: torch.Tensor, rows: int) -> bytes:
    """The digest of a matrix of `rows` rows, read exactly: each row is the answer to a unit."""
    digest = xxhash.xxh3_128()
    for start in range(0, rows, PROBE_ROWS):
        units = torch.zeros(min(PROBE_ROWS, rows - start), rows, dtype=emptied.dtype)
        units.diagonal(start).fill_(1)
        with torch.no_grad():
            digest.update(_bytes_of(linear(units, emptied, None)))
    return digest.digest()


def _content(tensor: torch.Tensor) -> bytes | torch.Tensor:
    """A digest of a tensor's bytes, on a device as two words that are there after its work."""
    if tensor.device.type == "cpu":
        return xxhash.xxh3_128(_bytes_of(_dense(tensor))).digest()
    return device_content(_dense(tensor))


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
    words = run[:whole].view(torch.int64)
    rest = torch.zeros(8, dtype=torch.uint8, device=run.device)
    rest[: run.numel() - whole] = run[whole:]
    pieces = [words[at : at + WORDS_MAX] for at in range(0, len(words), WORDS_MAX)]
    at = 0
    for piece in (*pieces, rest.view(torch.int64)):
        place = torch.arange(at, at + len(piece), dtype=torch.int64, device=run.device)
        mixed = place.mul_(_ODD[0]).bitwise_xor_(piece).mul_(_ODD[1])
        mixed.bitwise_xor_(mixed >> 29).mul_(_ODD[2])
        mixed.bitwise_xor_(mixed >> 32)
        sums[0] += mixed.sum()
        sums[1] += mixed.mul_(mixed + 1).bitwise_xor_(mixed >> 31).sum()
        at += len(piece)
    return sums
