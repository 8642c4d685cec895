"""CudaDevice's own calls, each compared with its prototype. Above it all runs in tests/devicesim.

A call that is misspelt, that has an argument less, or whose status nobody reads is seen here.
tests/gpu/test_bytes.py has what only a GPU can show.
"""

import ctypes
import threading
from collections.abc import Callable, Mapping
from ctypes import byref, c_int, c_size_t, c_void_p
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybridkv.connector.copy import cuda_device
from hybridkv.connector.copy.cuda_device import CudaDevice, translated
from hybridkv.connector.copy.device import CopyList, DeviceError, DeviceMemoryError, Lane
from tests.unit.connector.cuda_prototypes import Misuse, prototypes
from tests.waiting import DEADLINE_SECONDS

VERSIONS = [12060, 12090, 13000]
"""Without copies in one call, and with both forms of it."""
REFUSED = 1
HIGHEST_PRIORITY = -5
STREAM = 0x7F0000001000


class Runtime:
    """The library of one version. It writes down the numbers that each call gets."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.calls: list[tuple[str, list[int]]] = []
        self.refused: set[str] = set()
        """Names of functions that fail."""
        self._known = prototypes(version)
        self._results: Mapping[str, tuple[int, Any]] = {
            "cudaDeviceGetStreamPriorityRange": (1, c_int(HIGHEST_PRIORITY)),
            "cudaRuntimeGetVersion": (0, c_int(version)),
            "cudaStreamCreateWithPriority": (0, c_void_p(STREAM)),
        }

    def __getattr__(self, name: str) -> Callable[..., int]:
        if name not in self._known:
            raise AttributeError(f"undefined symbol: {name}")

        def call(*arguments: Any) -> int:
            values = self._known[name].values(arguments, None)
            self.calls.append((name, values))
            if name in self.refused:
                return REFUSED
            if name in self._results:
                place, result = self._results[name]
                ctypes.memmove(values[place], byref(result), ctypes.sizeof(result))
            return 0

        return call

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.calls]


class Stream:
    """What torch makes of a handle."""

    def __init__(self, handle: int, device: torch.device) -> None:
        self.handle, self.device = handle, device
        self.waited_for: list[object] = []

    def wait_event(self, event: object) -> None:
        self.waited_for.append(event)


class Event:
    """An event of torch."""

    def __init__(self, blocking: bool) -> None:
        self.blocking = blocking
        self.recorded: list[object] = []

    def record(self, stream: object) -> None:
        self.recorded.append(stream)


@pytest.fixture(params=VERSIONS)
def runtime(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Runtime:
    runtime = Runtime(request.param)
    monkeypatch.setattr(cuda_device, "load_runtime", lambda: runtime)
    cuda = SimpleNamespace(current_device=lambda: 3, ExternalStream=Stream, Event=Event)
    monkeypatch.setattr(torch, "cuda", cuda)
    return runtime


@pytest.fixture
def device(runtime: Runtime) -> CudaDevice:
    made = CudaDevice(torch.device("cuda", 1))
    runtime.calls.clear()
    return made


def numbers(address: int, count: int) -> list[int]:
    """Returns the 64-bit numbers at an address."""
    return list((ctypes.c_uint64 * count).from_address(address))


def copies(count: int) -> CopyList:
    found = CopyList()
    for number in range(count):
        found.append_copy(0x7F00_0000_0000 + number, 0x7E00_0000_0000 + number, (1 << 33) + number)
    return found


def test_streams_are_ours_alone_and_of_a_priority_that_the_device_has(
    runtime: Runtime, device: CudaDevice
) -> None:
    """A stream without cudaStreamNonBlocking waits for the default stream, on which others work."""
    assert device.new_stream() == STREAM
    assert device.new_stream(is_urgent=True) == STREAM
    assert [values[1:] for _, values in runtime.calls] == [[1, 0], [1, HIGHEST_PRIORITY]]


def test_a_copy_has_whole_addresses_and_its_stream(runtime: Runtime, device: CudaDevice) -> None:
    stream = device.new_stream()
    device.copy_all(copies(1), stream)
    default_kind = 4
    target, source, size = next(iter(copies(1)))
    assert runtime.calls[1:] == [("cudaMemcpyAsync", [target, source, size, default_kind, STREAM])]


def test_copies_go_in_one_call_in_the_order_of_the_stream(
    runtime: Runtime, device: CudaDevice
) -> None:
    stream, several = device.new_stream(), copies(3)
    device.copy_all(several, stream)
    if runtime.version == VERSIONS[0]:
        assert runtime.names[1:] == ["cudaMemcpyAsync"] * 3
        return
    name, values = runtime.calls[1]
    assert (name, len(runtime.calls)) == ("cudaMemcpyBatchAsync", 2)
    columns = [numbers(address, 3) for address in values[:3]]
    assert [*zip(*columns, strict=True)] == [tuple(copy) for copy in several]
    assert values[3] == 3
    stream_order = 1
    assert [c_int.from_address(values[4]).value, values[6]] == [stream_order, 1]
    assert values[-1] == STREAM


def test_where_copies_in_one_call_are_refused_they_are_queued_one_by_one(
    runtime: Runtime, device: CudaDevice
) -> None:
    """A thread's error stays until it is taken, and torch's next launch would raise it."""
    stream = device.new_stream()
    runtime.refused.add("cudaMemcpyBatchAsync")
    one_by_one = ["cudaMemcpyAsync"] * 2
    for tried in (["cudaMemcpyBatchAsync", "cudaGetLastError"], []):
        runtime.calls.clear()
        device.copy_all(copies(2), stream)
        tried = tried if runtime.version > VERSIONS[0] else []
        assert runtime.names == tried + one_by_one


CALLS: dict[str, Callable[[CudaDevice], Any]] = {
    "cudaDeviceGetStreamPriorityRange": lambda device: CudaDevice(torch.device("cuda", 1)),
    "cudaStreamCreateWithPriority": lambda device: device.new_stream(),
    "cudaMemcpyAsync": lambda device: device.copy(1, 2, 3, device.new_stream()),
    "cudaHostUnregister": lambda device: device.unregister(4096),
}
"""Each call of the runtime whose status is an error, by its name, and what makes it."""


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_fails_is_an_error_and_the_next_launch_is_none(
    name: str, runtime: Runtime, device: CudaDevice
) -> None:
    runtime.refused.add(name)
    with pytest.raises(DeviceError, match=f"{name} failed with CUDA error {REFUSED}"):
        CALLS[name](device)
    assert runtime.names[-1] == "cudaGetLastError"


def test_a_refused_registration_is_told(runtime: Runtime, device: CudaDevice) -> None:
    assert device.register(1 << 40, 4096)
    assert runtime.calls == [("cudaHostRegister", [1 << 40, 4096, 0])]
    runtime.refused.add("cudaHostRegister")
    assert not device.register(1 << 40, 4096)


def test_events_are_of_their_streams_and_waits_sleep(runtime: Runtime, device: CudaDevice) -> None:
    stream = device.new_stream()
    event = device.record(stream)
    device.wait_event(stream, event)
    assert isinstance(event.event, Event)
    assert event.event.blocking
    (recorded,) = event.event.recorded
    assert isinstance(recorded, Stream)
    assert recorded.handle == STREAM
    assert recorded.waited_for == [event.event]


def test_a_lane_works_on_the_engines_device_whatever_index_it_has(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[object] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append, raising=False)
    device, ended = CudaDevice(torch.device("cuda")), threading.Event()

    def lane() -> Lane:
        device.enter_thread()
        assert torch.is_inference_mode_enabled()
        ended.set()
        yield from ()

    device.start_lane("hybridkv-store", lane())
    assert ended.wait(DEADLINE_SECONDS)
    assert chosen == [torch.device("cuda", 3)]


def test_only_a_lack_of_memory_makes_a_ring_smaller() -> None:
    with pytest.raises(DeviceMemoryError), translated():
        raise torch.OutOfMemoryError("no memory")
    with pytest.raises(DeviceError) as raised, translated():
        raise RuntimeError("an illegal address")
    assert not isinstance(raised.value, DeviceMemoryError)


def test_the_runtime_is_the_one_that_torch_has_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    maps = [
        "7f00-7f01 r-xp 00000000 00:1f 11 /usr/lib/libc.so.6",
        "7f01-7f02 r--p 00000000 00:1f 12 /site packages/nvidia/cu13/lib/libcudart.so.13",
        "7f02-7f03 rw-p 00000000 00:00 0",
    ]
    loaded: list[str] = []
    monkeypatch.setattr(Path, "read_text", lambda path: "\n".join(maps))
    monkeypatch.setattr(ctypes, "CDLL", loaded.append)
    cuda_device.load_runtime()
    assert loaded == ["/site packages/nvidia/cu13/lib/libcudart.so.13"]
    del maps[1:]
    with pytest.raises(DeviceError):
        cuda_device.load_runtime()


def test_the_runtime_is_torchs_and_no_copy_of_another_package() -> None:
    line = "7f00-7f01 r-xp 00000000 fe:00 12 {}\n"
    copy = line.format("/site/torchvision.libs/libcudart.faf08d9a.so.13")
    own = line.format("/site/nvidia/cu13/lib/libcudart.so.13")
    assert cuda_device.runtime_path(copy + own) == "/site/nvidia/cu13/lib/libcudart.so.13"
    assert cuda_device.runtime_path(copy) == "/site/torchvision.libs/libcudart.faf08d9a.so.13"
    assert cuda_device.runtime_path(line.format("/site/libcuda.so.1")) is None


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("cudaMemcpyAsync", (c_void_p(1), c_void_p(2), c_size_t(8), 4)),
        ("cudaMemcpyAsync", (c_void_p(1), c_void_p(2), 8, 4, None)),
        ("cudaHostUnregister", (4096,)),
        ("cudaStreamCreateWithPriority", (byref(c_int()), 1, 0)),
        ("cudaStreamCreateWithPriority", (byref(c_void_p()), 1, byref(c_int()))),
    ],
)
def test_the_prototypes_see_what_c_would_take_in_silence(
    name: str, arguments: tuple[Any, ...]
) -> None:
    with pytest.raises(Misuse):
        prototypes(13000)[name].values(arguments, None)
