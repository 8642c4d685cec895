"""All that the copier needs of a device: streams, events, memory, copies, kernels and threads.

CudaDevice is the real one. The tests have a simulated one, which runs queued work in any order that
the streams allow. Addresses are those of unified memory, so host and device differ by value.

A *lane* is the work of one of the copier's threads, written as a generator. It yields what it waits
for, so that a simulation can run all lanes in one thread, in any order.
"""

from array import array
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from threading import Condition
from typing import Generic, NewType, Protocol, TypeVar

import torch

from hybridkv.connector.copy.tables import BlockTables, KernelLaunch
from hybridkv.core.errors import HybridKVError

Stream = NewType("Stream", int)
Item = TypeVar("Item")


class DeviceError(HybridKVError):
    """The device refused a call, or failed work that was queued before."""


class DeviceMemoryError(DeviceError):
    """The device has less free memory than an allocation asks for."""


class Waitable(Protocol):
    """Something that a lane waits for."""

    def is_over(self) -> bool:
        """Return True once the wait is over. Raises DeviceError where it ended in an error."""

    def wait(self) -> None:
        """Block until `is_over` returns True or raises. This method itself raises nothing."""


Lane = Generator[Waitable, None, None]


class CopyList:
    """Memory copies that one call queues, in any order: addresses and bytes."""

    def __init__(self) -> None:
        self.targets, self.sources, self.sizes = array("Q"), array("Q"), array("Q")

    def append_copy(self, target: int, source: int, size: int) -> None:
        """Add a copy of `size` bytes from the address `source` to the address `target`."""
        self.targets.append(target)
        self.sources.append(source)
        self.sizes.append(size)

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        """Iterate over (target, source, size)."""
        return zip(self.targets, self.sources, self.sizes, strict=True)


class Kernels(Protocol):
    """The programs that run on the device, where plain copies would not do."""

    can_digest: bool
    """True if `digest_pieces` can be called."""

    def copy_blocks(self, launch: KernelLaunch, is_gather: bool) -> None:
        """Copy blocks into the staging (a gather), or from there into the blocks (a scatter)."""

    def digest_pieces(
        self, entries_address: int, objects: int, pieces_max: int, digests_address: int
    ) -> None:
        """Write the digests (shm.slots) of all whole pieces of some parts to `digests_address`.

        The parts' entries (tables) are at `entries_address`. No part has more than `pieces_max`
        whole pieces, and each has room for as many digests.
        """


class Device(Protocol):
    """One accelerator. Every call may raise DeviceError.

    Calls come from the engine's thread and from lanes. A thread that is neither must not call,
    because CUDA would choose another device for it.
    """

    def free_bytes(self) -> int:
        """Return the bytes of device memory that nobody has allocated."""

    def allocate(self, size: int, pinned: bool = False) -> torch.Tensor:
        """Allocate bytes on the device, or pinned bytes on the host. Raises DeviceMemoryError."""

    def current_stream(self) -> Stream:
        """Return the stream of the engine's thread."""

    def new_stream(self, *, is_urgent: bool = False) -> Stream:
        """Create a stream of the engine's priority, or of the highest one.

        The kernels of an urgent stream do not wait for kernels that the engine has queued. Copies
        need no such priority, because they run beside kernels.
        """

    def record(self, stream: Stream) -> Waitable:
        """Return an event that is over when all work is done that the stream has by now."""

    def wait_event(self, stream: Stream, event: Waitable) -> None:
        """Let work that the stream gets from now on wait for the event. The host does not wait."""

    def copy(self, to: int, source: int, size: int, stream: Stream) -> None:
        """Queue a copy. The caller waits for it where the memory of the host is not pinned."""

    def copy_all(self, copies: CopyList, stream: Stream) -> None:
        """Queue copies of which none depends on another. `stream` is one of `new_stream`."""

    def make_kernels(
        self,
        tables: BlockTables,
        device_rows: torch.Tensor,
        groups: Sequence[Sequence[torch.Tensor]],
        staging: torch.Tensor,
    ) -> Kernels:
        """Compile kernels for these physical views and try them with `staging`, not yet in use.

        `device_rows` has the rows of `tables` on the device.
        """

    def launch(self, work: Callable[[], None], stream: Stream) -> None:
        """Queue the kernels that `work` launches."""

    def register(self, address: int, size: int) -> bool:
        """Pin pages of the host, which may take long. False if refused: see `clear_error`."""

    def unregister(self, address: int) -> None:
        """Unpin what was registered at this address."""

    def clear_error(self) -> None:
        """Forget the error of a refused call. The thread's next launch would raise it."""

    def submit(self, work: Callable[[], bytes]) -> "Result":
        """Run `work` on a thread for hashing."""

    def start_lane(self, name: str, lane: Lane) -> None:
        """Run a lane in a thread of its own."""

    def enter_thread(self) -> None:
        """Choose this device for the thread of a lane, which calls this before all else."""

    def wait_for(self, waitable: Waitable) -> None:
        """Block the caller, who is no lane, until the wait is over. Any thread may call it."""


class Result(Waitable, Protocol):
    """The bytes that the work of `Device.submit` returns, once that is over."""

    def result(self) -> bytes:
        """Return the bytes, or raise what the work raised. Called once the wait is over."""


class JobQueue(Waitable, Generic[Item]):
    """A queue from the engine's thread to a lane, which waits for it as for any Waitable."""

    def __init__(self) -> None:
        self._items: deque[Item] = deque()
        self._filled = Condition()

    def push(self, *items: Item) -> None:
        """Add the items to the end, and wake the lane."""
        with self._filled:
            self._items.extend(items)
            self._filled.notify()

    def pop(self) -> Item | None:
        """Remove the first item and return it. Returns None if the queue is empty."""
        return self._items.popleft() if self._items else None

    def is_over(self) -> bool:
        return bool(self._items)

    def wait(self) -> None:
        with self._filled:
            self._filled.wait_for(self.is_over)


def wait_in_lane(waitable: Waitable) -> Lane:
    """Wait in a lane: `yield from wait_in_lane(event)`. Raises DeviceError as `is_over` does."""
    while not waitable.is_over():
        yield waitable
