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

from hybridkv.connector.copy.tables import BlockTables, Move
from hybridkv.core.errors import HybridKVError

Stream = NewType("Stream", int)
Item = TypeVar("Item")


class DeviceError(HybridKVError):
    """The device refused a call, or failed work that was queued before."""


class DeviceMemoryError(DeviceError):
    """There is no such amount of memory."""


class Waitable(Protocol):
    """Something that a lane waits for."""

    def ready(self) -> bool:
        """Whether the wait is over; raises DeviceError where it ended in an error."""

    def wait(self) -> None:
        """Block until `ready` says True or raises. It raises nothing itself."""


Lane = Generator[Waitable, None, None]


class Pieces:
    """Copies that one call queues, in any order: addresses and bytes."""

    def __init__(self) -> None:
        self.targets, self.sources, self.sizes = array("Q"), array("Q"), array("Q")

    def add(self, target: int, source: int, size: int) -> None:
        """One more."""
        self.targets.append(target)
        self.sources.append(source)
        self.sizes.append(size)

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        return zip(self.targets, self.sources, self.sizes, strict=True)


class Kernels(Protocol):
    """The work that is done on the device by programs instead of by copies."""

    digests: bool
    """Whether `digest` can be called."""

    def move(self, move: Move, is_gather: bool) -> None:
        """Copy blocks into the staging, or from there into the blocks."""

    def digest(self, entries: int, objects: int, pieces: int, out: int) -> None:
        """Write the digests (shm.slots) of all whole pieces of some parts to the address `out`.

        `entries` is the address of the parts' entries (tables). Each part has room for the
        digests of `pieces`, which no part has more of.
        """


class Device(Protocol):
    """One accelerator. Every call may raise DeviceError.

    Calls come from the engine's thread and from lanes. A thread that is neither must not call,
    because CUDA would choose another device for it.
    """

    def free_bytes(self) -> int:
        """Device memory that nobody has allocated."""

    def allocate(self, size: int, pinned: bool = False) -> torch.Tensor:
        """Bytes on the device, or pinned bytes on the host. Raises DeviceMemoryError."""

    def current_stream(self) -> Stream:
        """The stream of the engine's thread."""

    def new_stream(self, *, is_urgent: bool = False) -> Stream:
        """A stream of the engine's priority, or of the highest one.

        Kernels that wait for nothing else do not wait for the engine's either where they are
        urgent. Copies need no such thing, because they run beside kernels.
        """

    def record(self, stream: Stream) -> Waitable:
        """An event that is over when the work is done which the stream has by now."""

    def wait_event(self, stream: Stream, event: Waitable) -> None:
        """Work that the stream gets from now on waits for the event; nothing waits on the host."""

    def copy(self, to: int, source: int, size: int, stream: Stream) -> None:
        """Queue a copy. The caller waits for it where the memory of the host is not pinned."""

    def copy_all(self, pieces: Pieces, stream: Stream) -> None:
        """Queue copies of which none depends on another. `stream` is one of `new_stream`."""

    def kernels(
        self,
        tables: BlockTables,
        table: torch.Tensor,
        groups: Sequence[Sequence[torch.Tensor]],
        staging: torch.Tensor,
    ) -> Kernels:
        """Kernels for these physical views, compiled and tried with `staging`, which is not in use.

        `table` has the rows of `tables` on the device.
        """

    def launch(self, work: Callable[[], None], stream: Stream) -> None:
        """Queue the kernels that `work` launches."""

    def register(self, address: int, size: int) -> bool:
        """Pin pages of the host, which may take long. False if refused: see `clear_error`."""

    def unregister(self, address: int) -> None:
        """Unpin what was registered at this address."""

    def clear_error(self) -> None:
        """Forget the error of a call that was refused; the thread's next launch would raise it."""

    def call(self, work: Callable[[], bytes]) -> "Result":
        """Run `work` on a thread for hashing."""

    def start(self, name: str, lane: Lane) -> None:
        """Run a lane in a thread of its own."""

    def enter_thread(self) -> None:
        """Choose this device for the thread of a lane, which calls this before all else."""

    def wait(self, waitable: Waitable) -> None:
        """Block the caller, who is no lane, until the wait is over. Any thread may call it."""


class Result(Waitable, Protocol):
    """What `Device.call` will have computed."""

    def result(self) -> bytes:
        """The value, once it is ready; raises what the work raised."""


class Jobs(Generic[Item]):
    """A queue from the engine's thread to a lane."""

    def __init__(self) -> None:
        self._items: deque[Item] = deque()
        self._filled = Condition()

    def put(self, *items: Item) -> None:
        """Add to the end."""
        with self._filled:
            self._items.extend(items)
            self._filled.notify()

    def take(self) -> Item | None:
        """The first one; None if there is none."""
        return self._items.popleft() if self._items else None

    def ready(self) -> bool:
        """See Waitable."""
        return bool(self._items)

    def wait(self) -> None:
        """See Waitable."""
        with self._filled:
            self._filled.wait_for(self.ready)


def over(waitable: Waitable) -> Lane:
    """Wait in a lane; raises DeviceError where the wait ends in an error."""
    while not waitable.ready():
        yield waitable
