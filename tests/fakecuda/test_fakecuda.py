"""The fake runtime refuses what the real one does, and sees what C would take in silence."""

import ctypes
from collections.abc import Callable, Iterator
from ctypes import byref, c_int, c_size_t, c_void_p
from typing import Any

import numpy as np
import pytest
import torch

from tests.fakecuda.prototypes import Misuse, prototypes
from tests.fakecuda.runtime import (
    ALREADY_REGISTERED,
    ILLEGAL_ADDRESS,
    INVALID_VALUE,
    MISALIGNED_ADDRESS,
    NON_BLOCKING,
    NOT_REGISTERED,
    SUCCESS,
    Attributes,
    FakeRuntime,
)
from tests.fakecuda.torch_cuda import FakeCuda, fake_cuda

DEFAULT_KIND = 4
STREAM_ORDER, ANY_ORDER = 1, 3
SIZE = 4096


@pytest.fixture
def cuda() -> Iterator[FakeCuda]:
    with fake_cuda() as fake:
        yield fake


@pytest.fixture
def runtime(cuda: FakeCuda) -> FakeRuntime:
    return cuda.runtime


def on_device() -> torch.Tensor:
    return torch.zeros(SIZE, dtype=torch.uint8, device="cuda")


def pinned(byte: int) -> torch.Tensor:
    return torch.empty(SIZE, dtype=torch.uint8, pin_memory=True).fill_(byte)


def new_stream(runtime: FakeRuntime) -> int:
    handle = c_void_p()
    assert runtime.cudaStreamCreateWithPriority(byref(handle), NON_BLOCKING, -1) == SUCCESS
    assert handle.value is not None
    return handle.value


def copy_async(
    runtime: FakeRuntime, to: int, source: int, size: int = SIZE, stream: int | None = None
) -> int:
    """Call cudaMemcpyAsync as CudaDevice does. Returns the status."""
    return runtime.cudaMemcpyAsync(
        c_void_p(to), c_void_p(source), c_size_t(size), DEFAULT_KIND, c_void_p(stream)
    )


def test_a_name_that_the_library_has_not(runtime: FakeRuntime) -> None:
    with pytest.raises(AttributeError, match=r"libcudart.so.13: undefined symbol: cudaMemcpyAsink"):
        runtime.cudaMemcpyAsink()


@pytest.mark.parametrize(
    "call",
    [
        lambda runtime, a, b: runtime.cudaMemcpyAsync(a, b, c_size_t(8), DEFAULT_KIND),
        lambda runtime, a, b: runtime.cudaMemcpyAsync(a, b, c_size_t(8), DEFAULT_KIND, None, 0),
        lambda runtime, a, b: runtime.cudaMemcpyAsync(a, b, 8, DEFAULT_KIND, None),
        lambda runtime, a, b: runtime.cudaMemcpyAsync(a.value, b, c_size_t(8), DEFAULT_KIND, None),
        lambda runtime, a, b: runtime.cudaMemcpyAsync(a, b, c_size_t(8), c_size_t(4), None),
        lambda runtime, a, b: runtime.cudaMemcpyAsync(a, b, c_size_t(8), DEFAULT_KIND, 0),
        lambda runtime, a, b: runtime.cudaMemcpyAsync(a, b, c_size_t(8), DEFAULT_KIND, c_void_p(9)),
        lambda runtime, a, b: runtime.cudaRuntimeGetVersion(byref(ctypes.c_int16())),
        lambda runtime, a, b: runtime.cudaGetLastError(None),
    ],
)
def test_a_call_with_other_arguments_is_seen(
    runtime: FakeRuntime, call: Callable[[Any, Any, Any], Any]
) -> None:
    memory, source = on_device(), pinned(1)
    with pytest.raises(Misuse):
        call(runtime, c_void_p(memory.data_ptr()), c_void_p(source.data_ptr()))
    assert runtime.wrongs


def test_argtypes_are_those_of_ctypes(runtime: FakeRuntime) -> None:
    memory, source = on_device(), pinned(7)
    call = runtime.cudaMemcpyAsync
    call.argtypes = [c_void_p, c_void_p, c_size_t, c_int, c_void_p]
    assert call(memory.data_ptr(), source.data_ptr(), SIZE, DEFAULT_KIND, None) == SUCCESS
    torch.cuda.synchronize()
    assert memory.cpu().tolist() == [7] * SIZE
    with pytest.raises((ctypes.ArgumentError, TypeError)):
        call(memory.data_ptr(), source.data_ptr(), "size", DEFAULT_KIND, None)
    runtime.cudaHostUnregister.argtypes = [c_int]
    with pytest.raises(Misuse):
        runtime.cudaHostUnregister(memory.data_ptr())


def test_a_copy_runs_when_its_stream_is_waited_for(runtime: FakeRuntime) -> None:
    """It reads its source then, and no other stream runs for it."""
    memory, source = on_device(), pinned(1)
    stream, second_stream = new_stream(runtime), new_stream(runtime)
    assert copy_async(runtime, memory.data_ptr(), source.data_ptr(), stream=stream) == SUCCESS
    source.fill_(2)
    runtime.finish(second_stream)
    assert memory.cpu().tolist() == [0] * SIZE
    runtime.await_mark(second_stream, runtime.record(stream))
    runtime.finish(second_stream)
    assert memory.cpu().tolist() == [2] * SIZE


def test_pageable_memory_is_copied_at_once(runtime: FakeRuntime) -> None:
    memory, source = on_device(), torch.full((SIZE,), 9, dtype=torch.uint8)
    assert copy_async(runtime, memory.data_ptr(), source.data_ptr()) == SUCCESS
    assert memory.cpu().tolist() == [9] * SIZE
    assert runtime.pageable_copies == 1


def test_pages_are_registered_once(runtime: FakeRuntime) -> None:
    memory = torch.zeros(8 * SIZE, dtype=torch.uint8)
    start = -(-memory.data_ptr() // SIZE) * SIZE

    def register(at: int, size: int, flags: int = 0) -> int:
        return runtime.cudaHostRegister(c_void_p(start + at), c_size_t(size), flags)

    assert register(0, 0) == INVALID_VALUE
    assert register(0, 2 * SIZE, 0x100) == INVALID_VALUE
    assert register(0, 2 * SIZE) == SUCCESS
    assert register(0, 2 * SIZE) == ALREADY_REGISTERED
    assert register(SIZE, 2 * SIZE) == ALREADY_REGISTERED
    assert register(2 * SIZE, SIZE + 1) == SUCCESS
    assert register(3 * SIZE + 8, 8) == ALREADY_REGISTERED, "a page has one registration"
    assert runtime.cudaGetLastError() == ALREADY_REGISTERED
    assert runtime.cudaGetLastError() == SUCCESS
    assert runtime.cudaHostUnregister(c_void_p(start + SIZE)) == NOT_REGISTERED
    assert runtime.cudaHostUnregister(c_void_p(start)) == SUCCESS
    assert runtime.cudaHostUnregister(c_void_p(start)) == NOT_REGISTERED
    # A copy from one registration into the next is refused, and ours must not ask for it.
    assert register(0, 2 * SIZE) == SUCCESS
    target = on_device()
    assert copy_async(runtime, target.data_ptr(), start + SIZE + 8) == INVALID_VALUE
    assert runtime.wrongs


@pytest.mark.parametrize("version", [12090, 13000])
@pytest.mark.parametrize("order", [STREAM_ORDER, ANY_ORDER])
def test_a_batch(version: int, order: int) -> None:
    """With an order other than the stream's, the sources are read whenever CUDA likes: at once."""
    with fake_cuda(version) as cuda:
        runtime, memory, source = cuda.runtime, on_device(), pinned(1)
        stream = new_stream(runtime)
        to = np.array([memory.data_ptr(), memory.data_ptr() + 64], np.uint64)
        origin = np.array([source.data_ptr(), source.data_ptr() + 64], np.uint64)
        sizes = np.array([64, 32], np.uint64)
        attributes, first, failed = Attributes(order=order), c_size_t(0), c_size_t()

        def copy(stream: int, attributes_count: int = 1, with_index: bool = version < 13000) -> Any:
            return runtime.cudaMemcpyBatchAsync(
                c_void_p(to.ctypes.data),
                c_void_p(origin.ctypes.data),
                c_void_p(sizes.ctypes.data),
                c_size_t(len(to)),
                byref(attributes),
                byref(first),
                c_size_t(attributes_count),
                *([byref(failed)] if with_index else []),
                c_void_p(stream),
            )

        assert copy(0) == INVALID_VALUE, "the legacy stream"
        assert copy(stream, 0) == INVALID_VALUE
        attributes.order = 0
        assert copy(stream) == INVALID_VALUE
        attributes.order = order
        sizes[1] = 0
        assert copy(stream) == INVALID_VALUE
        assert failed.value == (1 if version < 13000 else 0)
        sizes[1] = 32
        assert runtime.cudaGetLastError() == INVALID_VALUE
        assert copy(stream) == SUCCESS
        source.fill_(2)
        runtime.finish(stream)
        value = 2 if order == STREAM_ORDER else 1
        assert memory.cpu().tolist() == [value] * 96 + [0] * (SIZE - 96)
        assert not runtime.wrongs
        with pytest.raises(Misuse, match="arguments of"):
            copy(stream, with_index=version >= 13000)
        to[1] = to[0] + 8
        with pytest.raises(Misuse, match="the same bytes"):
            copy(stream)


def test_memory_that_the_device_has_not_ends_the_context(cuda: FakeCuda) -> None:
    runtime, memory, source = cuda.runtime, on_device(), pinned(1)
    assert copy_async(runtime, memory.data_ptr(), source.data_ptr()) == SUCCESS
    runtime.unmap(list(runtime.device_memory))
    with pytest.raises(RuntimeError, match=str(ILLEGAL_ADDRESS)):
        torch.cuda.synchronize()
    assert copy_async(runtime, memory.data_ptr(), source.data_ptr()) == ILLEGAL_ADDRESS
    assert runtime.cudaGetLastError() == ILLEGAL_ADDRESS
    assert runtime.cudaGetLastError() == ILLEGAL_ADDRESS


def test_a_misaligned_word_ends_the_context(cuda: FakeCuda) -> None:
    memory = on_device()
    cuda.queue(lambda: cuda.runtime.touch(memory.data_ptr() + 4, 8, 8))
    with pytest.raises(RuntimeError, match=str(MISALIGNED_ADDRESS)):
        torch.cuda.synchronize()


def test_torch_refuses_a_device_without_an_index_and_tensors_of_two_devices(cuda: FakeCuda) -> None:
    with pytest.raises(ValueError, match="with a specified index"):
        torch.cuda.set_device(torch.device("cuda"))
    with pytest.raises(RuntimeError, match="same device"):
        torch.index_select(on_device(), 0, torch.tensor([1]))
    with pytest.raises(TypeError):
        on_device().numpy()
    assert on_device().device == torch.device("cuda", 1)
    assert on_device().to("cpu").device == torch.device("cpu")
    assert torch.zeros(3).to("cuda:1").is_cuda


def test_an_error_that_nobody_took_is_that_of_the_next_launch(runtime: FakeRuntime) -> None:
    assert runtime.cudaHostUnregister(c_void_p(SIZE)) == NOT_REGISTERED
    with pytest.raises(RuntimeError, match=f"{NOT_REGISTERED}, of a call before this launch"):
        on_device().fill_(1)
    on_device().fill_(1)


def test_the_versions_differ_in_one_function() -> None:
    old, new = prototypes(12090), prototypes(13000)
    assert old.keys() == new.keys()
    assert [name for name in old if old[name] != new[name]] == ["cudaMemcpyBatchAsync"]
    names = [parameter.name for parameter in old["cudaMemcpyBatchAsync"].parameters]
    assert names[-3:] == ["numAttrs", "failIdx", "stream"]
    assert old.keys() - prototypes(12060).keys() == {"cudaMemcpyBatchAsync"}
