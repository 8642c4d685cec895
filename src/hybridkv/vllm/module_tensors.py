"""The tensors that a module computes with: its own, and those that vLLM's kernels made of them.

Parameters, buffers and what the module's functions keep always count. The module's other
attributes are searched only where it has fewer bytes than its weights need (`weight_sizes`). They
also hold workspaces, counters and caches, which change in every step and are no weights.

Nothing here reads a byte of a tensor, so weights may be unmapped meanwhile.
"""

import logging
import re
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hybridkv.vllm import seams
from hybridkv.vllm.packed_probes import Probe, int8_probe, linear_probe
from hybridkv.vllm.weight_sizes import (
    WeightSize,
    emptied_parameter,
    is_quantized,
    kind_of,
    weight_sizes,
)

logger = logging.getLogger("vllm.hybridkv")

OBJECTS_MAX = 4096
"""The most objects that are looked at in search of one module's weights. A module that has more is
unread."""
_CHANGING = re.compile(
    "workspace|buffer|cache|scratch|captur|sink|plans|locks|lora|expert_load|prepare_finalize"
)
"""Names of attributes whose tensors change while the engine computes."""
_FOREIGN = ("torch", "vllm.config", "vllm.distributed", "vllm.v1", "transformers", "logging")
"""Packages whose objects hold no weights."""
_MODULE_FIELDS = frozenset(vars(torch.nn.Module()))
_LEAVES = (str, bytes, int, float, complex, type(None), type, Enum, types.ModuleType, torch.dtype)


class Place(NamedTuple):
    """An object, and where it was found."""

    holder: Any
    """A mapping, a sequence, or an object with attributes."""
    key: Any
    """The key or index of a mapping or a sequence, else the attribute's name."""
    value: object
    """The object that was there."""

    def is_kept(self) -> bool:
        """Return True if the holder still has the same object there."""
        try:
            if isinstance(self.holder, Mapping | Sequence):
                return self.holder[self.key] is self.value
            return getattr(self.holder, self.key) is self.value
        except (LookupError, AttributeError, ValueError):
            return False


@dataclass(frozen=True, slots=True)
class ReachedTensor:
    """A tensor that a module computes with."""

    name: str
    tensor: torch.Tensor
    places: tuple[Place, ...]
    """From the module's own attributes inwards. The last value is the tensor, or a wrapper that
    was taken apart."""


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A matrix that oneDNN keeps in memory of its own."""

    name: str
    handler: Any
    """vLLM's object for the matrix, with `k` rows and `n` columns. New weights have another one."""
    places: tuple[Place, ...]
    """Where the matrix is held, from the module's own dict inwards."""
    element_bytes: int
    probe: Probe | None
    """How the matrix is read. None where it cannot be."""

    @property
    def size_bytes(self) -> int:
        """The size of the elements as the kernel has them, without oneDNN's padding."""
        return int(self.handler.k * self.handler.n * self.element_bytes)


@dataclass(frozen=True, slots=True)
class ModuleContent:
    """The weights that one module computes with, in a fixed order."""

    name: str
    kind: str
    """The class of the module's quantization method, else of the module."""
    tensors: tuple[ReachedTensor, ...]
    matrices: tuple[PackedMatrix, ...]
    is_unread: bool
    """True if the module has weights that were not found."""
    owners: frozenset[str] = frozenset()
    """The names of the modules that have it as a child."""


IsLeftOut = Callable[[torch.Tensor], bool]
"""A function that returns True for a tensor that is known to be no weight, like a KV cache."""


def module_contents(
    models: Mapping[str, torch.nn.Module], is_left_out: IsLeftOut = lambda _: False
) -> Iterator[ModuleContent]:
    """Yield the content of every module of `models` by name, in their order.

    Raises nothing: a module that cannot be looked at is unread.
    """
    storage = _offloaded_storage()
    for role, model in models.items():
        parents: dict[int, dict[str, torch.nn.Module]] = {}
        for path, module in model.named_modules():
            for child in module.children():
                parents.setdefault(id(child), {})[f"{role}.{path}"] = module
        for path, module in model.named_modules():
            name = f"{role}.{path}"
            try:
                found = _FoundWeights(name, is_left_out)
                yield _content(module, parents.get(id(module), {}), found, storage)
            except Exception:  # Modules and kernels are not ours, and may raise anything.
                logger.debug("hybridkv: %s cannot be looked at", name, exc_info=True)
                yield ModuleContent(name, type(module).__name__, (), (), is_unread=True)


def modules_on_one_buffer(contents: Sequence[ModuleContent]) -> frozenset[str]:
    """Return the names of modules whose parameters lie on those of other modules in memory.

    Then the memory is a buffer of somebody who keeps the weights elsewhere. Tied weights are one
    parameter in both modules, and SharedWeightParameter is vLLM's class for one tensor of many
    layers. A module and its child are one layer: MLA's attention has its projection as a child, and
    keeps both halves of its weight.
    """
    owners = {content.name: content.owners for content in contents}
    extents = sorted(
        _extent(content.name, reached)
        for content in contents
        for reached in content.tensors
        if _is_own_parameter(reached)
    )
    names: set[str] = set()
    widest: _Extent | None = None
    for extent in extents:
        if widest is None or widest.device != extent.device or widest.end <= extent.start:
            widest = extent
            continue
        modules = {extent.module, widest.module}
        is_layer = any(modules & owners[name] for name in modules) or len(modules) == 1
        if extent.parameter != widest.parameter and not is_layer:
            names |= modules
        widest = max(widest, extent, key=lambda each: each.end)
    return frozenset(names)


class _Extent(NamedTuple):
    """The memory from a parameter's first byte to its last one."""

    device: str
    start: int
    end: int
    parameter: int  # Its id.
    module: str


def _extent(module: str, reached: ReachedTensor) -> _Extent:
    tensor = reached.tensor
    start = tensor.data_ptr()
    sides = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in sides)
    end = start + (last + 1) * tensor.element_size()
    return _Extent(str(tensor.device), start, end, id(reached.places[-1].value), module)


def _is_own_parameter(reached: ReachedTensor) -> bool:
    """Return True for a parameter with bytes of its own, as far as its module knows."""
    parameter = reached.places[-1].value
    if len(reached.places) > 1 or not isinstance(parameter, torch.nn.Parameter):
        return False
    # A sparse tensor has no address, and is unread in any case.
    has_bytes = reached.tensor.layout is torch.strided and reached.tensor.numel() > 0
    return has_bytes and seams.shared_partitions(parameter) is None


def adapter_bytes(module: torch.nn.Module) -> int:
    """Return the bytes that a LoRA wrapper keeps for adapters beside its layer. 0 for others."""
    if not seams.is_lora_wrapper(module):
        return 0
    return sum(
        tensor.nbytes
        for value in [*vars(module).values()]
        for tensor in (value if isinstance(value, tuple | list) else ())
        if isinstance(tensor, torch.Tensor)
    )


def _offloaded_storage() -> Mapping[int, Place] | None:
    """Return where the bytes of offloaded parameters are, by the parameter's id.

    None where vLLM's offloader is not known, so that the bytes may be anywhere.
    """
    try:
        return {
            id(weight.parameter): Place(
                weight.holder, weight.attribute, getattr(weight.holder, weight.attribute)
            )
            for weight in seams.offloaded_weights()
        }
    except Exception:  # The offloader may be of any class and version.
        logger.debug("hybridkv: the offloader is not known", exc_info=True)
        return None


def _content(
    module: torch.nn.Module,
    parents: Mapping[str, torch.nn.Module],
    found: "_FoundWeights",
    storage: Mapping[int, Place] | None,
) -> ModuleContent:
    """Return the content of one module, which the modules `parents` contain, by name.

    `found` has nothing yet. `storage` is that of `_offloaded_storage`.
    """
    name = found.module_name
    for reached in _own_tensors(name, module, storage or {}):
        found.add_tensor(reached)
    sizes = weight_sizes(module, [reached.tensor.numel() for reached in found.tensors])
    emptied = emptied_parameter(module)
    for attribute, function in [*vars(module).items()]:  # Steps may set attributes meanwhile.
        for cell in _cells(function):
            places = Place(vars(module), attribute, function), cell
            found.add_object(f"{name}.{attribute}()", places)
            kept = cell.value
            if sizes and emptied is not None and seams.is_packed_matrix(kept):
                probe = linear_probe(kept, function, emptied)
                width = emptied.element_size()
                found.add_matrix(PackedMatrix(f"{name}.{attribute}()", kept, places, width, probe))
    if emptied is not None and not found.suffices(sizes):
        for parent in parents.values():
            # The attention of MLA has both halves of its layer's weight.
            for place in _attributes(seams.attention_kernel(parent)):
                found.add_object(f"{name}.impl.{place.key}", (place,))
    is_whole = True
    if not found.suffices(sizes) or (is_quantized(module) and not sizes):
        is_whole = _search(name, module, found)
    is_here = storage is not None and not seams.is_split_over_replicas(module)
    is_unread = not (is_here and is_whole and found.suffices(sizes))
    return ModuleContent(
        name=name,
        kind=kind_of(module),
        tensors=tuple(found.tensors),
        matrices=tuple(found.matrices),
        is_unread=is_unread,
        owners=frozenset(parents),
    )


class _FoundWeights:
    """The tensors and matrices of one module that were found so far, each object once."""

    def __init__(self, module_name: str, is_left_out: IsLeftOut) -> None:
        self.module_name = module_name
        self.tensors: list[ReachedTensor] = []
        self.matrices: list[PackedMatrix] = []
        self._is_left_out = is_left_out
        self._seen: set[int] = set()

    def add_object(self, name: str, places: tuple[Place, ...]) -> None:
        """Add the object in the last place if it is a tensor, taken apart if it is a wrapper."""
        value = places[-1].value
        if isinstance(value, torch.Tensor):
            for path, tensor in _plain_tensors(value):
                self.add_tensor(ReachedTensor(name + path, tensor, places))

    def add_tensor(self, reached: ReachedTensor) -> None:
        """Add a tensor, unless it has no bytes or is known to be no weight."""
        tensor = reached.tensor
        if id(tensor) not in self._seen and not tensor.is_meta and not self._is_left_out(tensor):
            self._seen.add(id(tensor))
            self.tensors.append(reached)

    def add_matrix(self, matrix: PackedMatrix) -> None:
        """Add a packed matrix, unless its handler was added before."""
        if id(matrix.handler) not in self._seen:
            self._seen.add(id(matrix.handler))
            self.matrices.append(matrix)

    def suffices(self, sizes: Sequence[WeightSize]) -> bool:
        """Return True if there are as many bytes as the weights of these sizes need.

        A tensor with the name of one kind of weights does not count for another kind.
        """
        weights = [
            _FoundBytes(reached.name.removeprefix(self.module_name), reached.tensor.nbytes)
            for reached in self.tensors
            if any(size.admits(reached.tensor.numel()) for size in sizes)
        ]
        weights += [_FoundBytes("", matrix.size_bytes) for matrix in self.matrices]
        for size in sizes:
            foreign_names = [foreign.name for foreign in sizes if foreign is not size]
            own_bytes = (
                weight.size_bytes
                for weight in weights
                if not any(name in weight.name for name in foreign_names)
            )
            if sum(own_bytes) < size.size_bytes:
                return False
        needed_bytes = sum(size.size_bytes for size in sizes)
        return sum(weight.size_bytes for weight in weights) >= needed_bytes


class _FoundBytes(NamedTuple):
    """The size of something that can be weights."""

    name: str
    """The name within the module. Empty where it tells nothing."""
    size_bytes: int


def _search(name: str, module: torch.nn.Module, found: _FoundWeights) -> bool:
    """Add what the module's attributes hold to `found`, nearest first, but for other modules.

    Returns True if the search came to an end within OBJECTS_MAX.
    """
    method = getattr(module, "quant_method", None)
    seen: dict[int, object] = {id(module): module}  # With the objects, so that no number is reused.
    queue = deque[_Step]()
    for owner in (module, method) if isinstance(method, torch.nn.Module) else (module,):
        queue.extend(_Step(name, (place,)) for place in _attributes(owner))
    looked = 0
    while queue:
        step = queue.popleft()
        place = step.places[-1]
        if id(place.value) in seen or not _can_have_weights(place):
            continue
        looked += 1
        if looked > OBJECTS_MAX:
            return False
        seen[id(place.value)] = place.value
        key = place.key if isinstance(place.key, str | int) else type(place.key).__name__
        path = f"{step.path}.{key}"
        if seams.is_packed_matrix(place.value):
            dtype = getattr(module, "params_dtype", None)
            config = seams.int8_kernel_config(place.holder, place.key)
            is_known = config is not None and isinstance(dtype, torch.dtype)
            probe = int8_probe(place.value, config, dtype) if is_known else None
            found.add_matrix(PackedMatrix(path, place.value, step.places, 1, probe))
        elif isinstance(place.value, torch.Tensor):
            found.add_object(path, step.places)
        else:
            children = _children(place.value)
            queue.extend(_Step(path, (*step.places, child)) for child in children)
    return True


class _Step(NamedTuple):
    """An object that is looked at next."""

    path: str
    """The name of what holds the object."""
    places: tuple[Place, ...]


def _can_have_weights(place: Place) -> bool:
    """Return True if the object can be weights or hold weights."""
    if isinstance(place.key, str) and _CHANGING.search(place.key.lower()):
        return False
    value = place.value
    if isinstance(value, torch.Tensor):
        return True
    if isinstance(value, (*_LEAVES, torch.nn.Module)):
        return False
    package = type(value).__module__
    return not any(package == name or package.startswith(f"{name}.") for name in _FOREIGN)


def _children(value: object) -> Iterator[Place]:
    """Yield the objects that an object holds, in its own order."""
    if isinstance(value, Mapping):
        yield from (Place(value, key, item) for key, item in [*value.items()])
    elif isinstance(value, list | tuple):
        yield from (Place(value, index, item) for index, item in enumerate(value))
    elif isinstance(value, types.FunctionType):
        yield from _cells(value)
        yield Place(value, "__defaults__", value.__defaults__)
        yield Place(value, "__kwdefaults__", value.__kwdefaults__)
    elif isinstance(value, types.MethodType):
        yield Place(value, "__self__", value.__self__)
    elif isinstance(value, partial):
        for name in ("func", "args", "keywords"):
            yield Place(value, name, getattr(value, name))
    else:
        yield from _attributes(value)


def _attributes(value: object) -> Iterator[Place]:
    """Yield an object's own attributes in the order in which they were set, then its slots."""
    fields = dict(getattr(value, "__dict__", {}))
    if isinstance(value, torch.nn.Module):
        fields = {name: item for name, item in fields.items() if name not in _MODULE_FIELDS}
    yield from (Place(value, name, item) for name, item in fields.items())
    for base in type(value).__mro__:
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in fields and hasattr(value, name):
                yield Place(value, name, getattr(value, name))


def _cells(function: object) -> Iterator[Place]:
    """Yield the objects that a function keeps of the scope in which it was made."""
    for cell in seams.closure_cells(function):
        yield Place(cell, "cell_contents", cell.cell_contents)


def _own_tensors(
    where: str, module: torch.nn.Module, storage: Mapping[int, Place]
) -> Iterator[ReachedTensor]:
    """Yield the parameters and buffers of this module alone, wrappers taken apart.

    A parameter whose bytes are in `storage` is read there.
    """
    for fields in (module._parameters, module._buffers):
        for name, tensor in [*fields.items()]:
            if tensor is None:
                continue
            places = [Place(fields, name, tensor)]
            if id(tensor) in storage:
                places.append(storage[id(tensor)])
            weight = places[-1].value
            assert isinstance(weight, torch.Tensor)
            for path, plain in _plain_tensors(weight):
                yield ReachedTensor(f"{where}.{name}{path}", plain, tuple(places))


def _plain_tensors(tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (the rest of the name, tensor) of what a wrapper consists of, else ("", the tensor)."""
    partitions = seams.shared_partitions(tensor)
    if partitions is not None:
        for key, part in partitions.items():
            for path, plain in _plain_tensors(part):
                yield f".{key}{path}", plain
    elif is_traceable_wrapper_subclass(tensor):
        for inner in tensor.__tensor_flatten__()[0]:
            for path, plain in _plain_tensors(getattr(tensor, inner)):
                yield f".{inner}{path}", plain
    else:
        yield "", tensor
