"""Functions of the CUDA runtime as cuda_runtime_api.h declares them, and how ctypes passes values.

A function of a library does not know how many arguments it was given, or of what width. So each
call is compared with the prototype here, and what C would not notice is a Misuse.
"""

import ctypes
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_COMMON = """
cudaDeviceGetStreamPriorityRange(int *leastPriority, int *greatestPriority)
cudaGetLastError(void)
cudaHostRegister(void *ptr, size_t size, unsigned int flags)
cudaHostUnregister(void *ptr)
cudaMemcpyAsync(void *dst, const void *src, size_t count, enum cudaMemcpyKind kind, \
cudaStream_t stream)
cudaPeekAtLastError(void)
cudaRuntimeGetVersion(int *runtimeVersion)
cudaStreamCreateWithPriority(cudaStream_t *pStream, unsigned int flags, int priority)
"""
_BATCH_12 = """
cudaMemcpyBatchAsync(void **dsts, void **srcs, size_t *sizes, size_t count, \
struct cudaMemcpyAttributes *attrs, size_t *attrsIdxs, size_t numAttrs, size_t *failIdx, \
cudaStream_t stream)
"""
_BATCH_13 = """
cudaMemcpyBatchAsync(void *const *dsts, const void *const *srcs, const size_t *sizes, \
size_t count, struct cudaMemcpyAttributes *attrs, size_t *attrsIdxs, size_t numAttrs, \
cudaStream_t stream)
"""
_POINTER_BYTES = 8
_BYTES = {"int": 4, "unsigned int": 4, "size_t": 8, "cudaStream_t": 8, "void *": 8}
_ATTRIBUTES_BYTES = 24


class Misuse(AssertionError):
    """The call does in silence what its caller does not mean."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a function, as its prototype declares it."""

    name: str
    size: int
    """Bytes of its type."""
    is_pointer: bool
    target_size: int
    """Bytes of what a pointer points to; 0 where that is `void`."""


@dataclass(frozen=True, slots=True)
class Prototype:
    """The declaration of one function."""

    name: str
    parameters: tuple[Parameter, ...]

    def values(self, arguments: Sequence[Any], argtypes: Sequence[Any] | None) -> list[int]:
        """Return the numbers that the function gets. Pointers are addresses. Raises Misuse."""
        if len(arguments) != len(self.parameters):
            raise Misuse(f"{self.name} gets {len(arguments)} arguments of {len(self.parameters)}")
        if argtypes is not None and len(argtypes) != len(arguments):
            raise Misuse(f"{self.name} has {len(argtypes)} argtypes of {len(self.parameters)}")
        types = argtypes or [None] * len(arguments)
        return [
            self._value(parameter, argument, argtype)
            for parameter, argument, argtype in zip(self.parameters, arguments, types, strict=True)
        ]

    def _value(self, parameter: Parameter, argument: Any, argtype: Any) -> int:
        if argtype is not None:
            argtype.from_param(argument)  # Raises ctypes.ArgumentError or TypeError, as the call.
            if isinstance(argument, int):
                argument = argtype(argument)
        if argument is None:
            return self._sized(parameter, 0, _POINTER_BYTES)
        if isinstance(argument, int):
            return self._sized(parameter, argument, ctypes.sizeof(ctypes.c_int))
        if isinstance(argument, ctypes._SimpleCData):
            return self._sized(parameter, argument.value or 0, ctypes.sizeof(argument))
        if isinstance(argument, ctypes.Array):
            target = ctypes.sizeof(argument._type_)
            return self._address(parameter, ctypes.addressof(argument), target)
        if isinstance(argument, ctypes._Pointer):
            target = argument.contents
            return self._address(parameter, ctypes.addressof(target), ctypes.sizeof(target))
        if hasattr(argument, "_obj"):  # ctypes.byref
            target = argument._obj
            return self._address(parameter, ctypes.addressof(target), ctypes.sizeof(target))
        raise ctypes.ArgumentError(f"Don't know how to convert parameter {parameter.name}")

    def _sized(self, parameter: Parameter, value: int, size: int) -> int:
        if size != parameter.size:
            raise Misuse(
                f"{self.name}: {parameter.name} has {8 * parameter.size} bits and gets {8 * size}"
            )
        return value

    def _address(self, parameter: Parameter, address: int, target_size: int) -> int:
        if not parameter.is_pointer:
            raise Misuse(f"{self.name}: {parameter.name} is no pointer")
        if parameter.target_size and target_size % parameter.target_size:
            raise Misuse(
                f"{self.name}: {parameter.name} points to {parameter.target_size} bytes and gets "
                f"the address of {target_size}"
            )
        return address


def prototypes(version: int) -> Mapping[str, Prototype]:
    """Return the functions of this version of the runtime (12090 is 12.9), by name."""
    batch = _BATCH_13 if version >= 13000 else _BATCH_12 if version >= 12080 else ""
    text = _COMMON + batch
    found = (_prototype(line) for line in text.splitlines() if line)
    return {prototype.name: prototype for prototype in found}


def _prototype(line: str) -> Prototype:
    matched = re.fullmatch(r"(\w+)\((.*)\)", line)
    assert matched is not None, line
    name, inside = matched.groups()
    words = [] if inside == "void" else inside.split(", ")
    return Prototype(name, tuple(map(_parameter, words)))


def _parameter(text: str) -> Parameter:
    """Parse a parameter: `size_t *sizes` -> an address of values of 8 bytes each.

    `const void *src` is an address of anything.
    """
    matched = re.fullmatch(r"(.*?)(\w+)", text)
    assert matched is not None, text
    kind, name = (part.strip() for part in matched.groups())
    kind = re.sub(r"\bconst\b ?", "", kind).strip()
    if not kind.endswith("*"):
        return Parameter(name, 4 if kind.startswith("enum ") else _BYTES[kind], False, 0)
    target = kind[:-1].strip()
    if target == "void":
        size = 0
    elif target == "struct cudaMemcpyAttributes":
        size = _ATTRIBUTES_BYTES
    else:
        size = _BYTES[target]
    return Parameter(name, _POINTER_BYTES, True, size)
