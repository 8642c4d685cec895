"""A sentinel over the weights: a few words of every tensor, compared around every step.

A digest of all bytes takes seconds and proves the moment in which it was taken. Between two digests
the sentinel sees, in each step, that the weights are others, whoever wrote them. It does not see a
change that leaves every watched word alone.
"""

import operator
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash

from hybridkv.vllm.module_tensors import PackedMatrix, Place, module_contents

WORDS = 32
"""Elements of each tensor that are watched."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By bytes of an element: tensors of every type are read as these."""


@dataclass(frozen=True, slots=True)
class WeightsLook:
    """The words that the sentinel saw in one look, which may still be on their way to the host."""

    serial: int  # How often modules, parameters or buffers were exchanged.
    words: Sequence[np.ndarray]  # On the host, whole once `arrivals` are over.
    arrivals: Sequence[torch.cuda.Event] = ()

    def words_digest(self) -> bytes | None:
        """Return the same bytes for the same words. None while copies from a device go on.

        Raises an error of the device, also that of an earlier kernel.
        """
        if not all(event.query() for event in self.arrivals):
            return None
        seen = xxhash.xxh3_128(self.serial.to_bytes(8, "little"))
        for words in self.words:
            seen.update(words.data)
        return seen.digest()


class _WordKind(NamedTuple):
    """The device and the size of words that are gathered together."""

    device: torch.device
    element_bytes: int


class _ScatteredWords(NamedTuple):
    """The words of a tensor with gaps between its elements."""

    tensor: torch.Tensor
    indices: tuple[torch.Tensor, ...]  # One tensor for each dim.


class WeightsSentinel:
    """Watches the tensors that a digest reads. It belongs to one thread."""

    def __init__(self) -> None:
        self._serial = 0
        self._models: dict[str, torch.nn.Module] = {}
        self._dicts: list[dict[Any, Any]] = []
        """The holders of places in dictionaries: of modules, tensors, and the objects through which
        these are reached. One of these objects is another one where a tensor was replaced."""
        self._keys: list[Any] = []
        self._values: list[object] = []
        """The key and the value of each of these places."""
        self._places: list[Place] = []
        """Places outside dictionaries."""
        self._tensors: list[torch.Tensor] = []
        self._addresses: list[int] = []
        """Where the bytes of each of the tensors were when it was found."""
        self._samples: dict[_WordKind, list[torch.Tensor]] = {}
        """Views of the words on devices, without a copy."""
        self._host_samples: dict[int, list[np.ndarray]] = {}
        """The same on the host, by bytes of an element."""
        self._scattered: list[_ScatteredWords] = []
        self.matrices: list[PackedMatrix] = []
        """The packed matrices, which have no words to watch. New weights have other objects."""

    def look(self, models: Mapping[str, torch.nn.Module]) -> WeightsLook:
        """Gather the words. A device does so after what it computes now, and nothing waits.

        Each step of the engine waits for this. So what grows with the number of tensors is a loop
        inside NumPy, PyTorch or `map`.
        """
        with torch.inference_mode():
            if not self._is_kept(models):
                self._find(models)
            words = [np.concatenate(views) for views in self._host_samples.values()]
            arrivals = []
            found = [torch.cat(views) for views in self._samples.values()]
            found += [tensor[indices].view(-1) for tensor, indices in self._scattered]
            for gathered in found:
                if gathered.device.type == "cpu":
                    words.append(gathered.numpy())
                    continue
                host = torch.empty(gathered.shape, dtype=gathered.dtype, pin_memory=True)
                words.append(host.copy_(gathered, non_blocking=True).numpy())
                arrivals.append(torch.cuda.Event())
                arrivals[-1].record()
            return WeightsLook(self._serial, words, arrivals)

    def _is_kept(self, models: Mapping[str, torch.nn.Module]) -> bool:
        """Return True if all tensors and modules are where they were found."""
        known = self._models
        if known.keys() != models.keys() or any(models[name] is not known[name] for name in known):
            return False
        present = map(dict.get, self._dicts, self._keys)
        if not all(map(operator.is_, present, self._values)):
            return False
        if not all(map(Place.is_kept, self._places)):
            return False
        return [*map(torch.Tensor.data_ptr, self._tensors)] == self._addresses

    def _find(self, models: Mapping[str, torch.nn.Module]) -> None:
        """Find the tensors of `models` anew, and choose their words."""
        self._serial += 1
        self._models = dict(models)
        self._samples, self._host_samples, self._scattered = {}, {}, []
        self.matrices = []
        modules = [module for model in models.values() for module in model.modules()]
        places = [
            Place(module._modules, name, child)
            for module in modules
            for name, child in module._modules.items()
        ]
        tensors: list[torch.Tensor] = []
        for content in module_contents(models):
            self.matrices += content.matrices
            for matrix in content.matrices:
                places += matrix.places
            for reached in content.tensors:
                places += reached.places
                tensors.append(reached.tensor)
        in_dicts = [place for place in places if isinstance(place.holder, dict)]
        self._dicts = [place.holder for place in in_dicts]
        self._keys = [place.key for place in in_dicts]
        self._values = [place.value for place in in_dicts]
        self._places = [place for place in places if not isinstance(place.holder, dict)]
        self._tensors = tensors
        self._addresses = [tensor.data_ptr() for tensor in tensors]
        for number, tensor in enumerate(tensors):
            if tensor.numel():
                self._watch(tensor.detach(), random.Random(number))

    def _watch(self, tensor: torch.Tensor, rng: random.Random) -> None:
        """Choose the words of one tensor."""
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor)
        words, size = tensor.view(_INTEGERS[tensor.element_size()]), tensor.numel()
        # An odd distance, so that the words of a matrix lie in several columns.
        step = max(1, size // WORDS - 1) | 1
        count = min(WORDS, size // step)
        start = rng.randrange(size - (count - 1) * step)
        order = sorted(range(words.dim()), key=words.stride, reverse=True)
        if words.permute(order).is_contiguous():
            sample = words.as_strided((count,), (step,), words.storage_offset() + start)
            kind = _WordKind(words.device, words.element_size())
            if words.device.type == "cpu":
                self._host_samples.setdefault(kind.element_bytes, []).append(sample.numpy())
            else:
                self._samples.setdefault(kind, []).append(sample)
        else:
            places = torch.arange(start, start + count * step, step, device=words.device)
            indices = torch.unravel_index(places, words.shape)
            self._scattered.append(_ScatteredWords(words, indices))
