"""A sentinel over the weights: a few words of every tensor, compared around every step.

A digest of all bytes takes seconds and proves the moment in which it was taken. Between two digests
the sentinel sees, in each step, that the weights are others, whoever wrote them. It does not see a
change that leaves every watched word alone.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from hybridkv.vllm.module_tensors import Place, module_contents

WORDS = 32
"""Elements of each tensor that are watched."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By bytes of an element: tensors of every type are read as these."""


@dataclass(frozen=True, slots=True)
class WeightsLook:
    """What the sentinel saw, once it has arrived on the host."""

    serial: int  # How often tensors were exchanged for others.
    words: Sequence[torch.Tensor]  # On the host, whole once `arrivals` are over.
    arrivals: Sequence[torch.cuda.Event] = ()

    def digest(self) -> bytes | None:
        """The same bytes where the same was seen; None while copies from a device are under way."""
        if not all(event.query() for event in self.arrivals):
            return None  # An error of the device is raised, also that of an earlier kernel.
        seen = xxhash.xxh3_128(self.serial.to_bytes(8, "little"))
        for words in self.words:
            seen.update(words.numpy())
        return seen.digest()


@dataclass(frozen=True, slots=True)
class _Watched:
    """A tensor and the address of its bytes when it was found."""

    tensor: torch.Tensor
    address: int


class WeightsSentinel:
    """Watches the tensors that a digest reads. Nothing of it is for several threads."""

    def __init__(self) -> None:
        self._serial = 0
        self._models: dict[str, torch.nn.Module] = {}
        self._in_dicts: list[Place] = []
        """Where the tensors stand, and what else would be another one if they were replaced."""
        self._places: list[Place] = []
        """Those of these places that are in no dictionary."""
        self._watched: list[_Watched] = []
        self._samples: dict[tuple[torch.device, int], list[torch.Tensor]] = {}
        """Views of the words, without a copy, by device and bytes of an element."""
        self._scattered: list[tuple[torch.Tensor, Any]] = []
        """Tensors with gaps between their elements, and the indices of their words."""

    def look(self, models: Mapping[str, torch.nn.Module]) -> WeightsLook:
        """Gather the words: on a device behind what it computes now, and nothing waits for it."""
        with torch.inference_mode():
            if not self._is_kept(models):
                self._find(models)
            found = [torch.cat(views) for views in self._samples.values()]
            found += [words[index].view(-1) for words, index in self._scattered]
            words, arrivals = [], []
            for gathered in found:
                if gathered.device.type == "cpu":
                    words.append(gathered)
                    continue
                host = torch.empty(gathered.shape, dtype=gathered.dtype, pin_memory=True)
                words.append(host.copy_(gathered, non_blocking=True))
                arrivals.append(torch.cuda.Event())
                arrivals[-1].record()
            return WeightsLook(self._serial, words, arrivals)

    def _is_kept(self, models: Mapping[str, torch.nn.Module]) -> bool:
        """Whether all tensors and modules are where they were found."""
        known = self._models
        if known.keys() != models.keys() or any(models[name] is not known[name] for name in known):
            return False
        if not all(holder.get(key) is value for holder, key, value in self._in_dicts):
            return False
        if not all(place.is_kept() for place in self._places):
            return False
        return all(one.tensor.data_ptr() == one.address for one in self._watched)

    def _find(self, models: Mapping[str, torch.nn.Module]) -> None:
        self._serial += 1
        self._models = dict(models)
        self._samples, self._scattered = {}, []
        modules = [module for model in models.values() for module in model.modules()]
        places = [
            Place(module._modules, name, child)
            for module in modules
            for name, child in module._modules.items()
        ]
        tensors: list[torch.Tensor] = []
        for content in module_contents(models):
            for matrix in content.matrices:
                places += matrix.places
            for reached in content.tensors:
                places += reached.places
                tensors.append(reached.tensor)
        self._in_dicts = [place for place in places if isinstance(place.holder, dict)]
        self._places = [place for place in places if not isinstance(place.holder, dict)]
        self._watched = [_Watched(tensor, tensor.data_ptr()) for tensor in tensors]
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
            self._samples.setdefault((words.device, words.element_size()), []).append(sample)
        else:
            places = torch.arange(start, start + count * step, step, device=words.device)
            self._scattered.append((words, torch.unravel_index(places, words.shape)))
