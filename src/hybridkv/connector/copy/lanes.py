"""The threads that store and load, as lanes (device). Neither waits for the other.

Both keep some objects on their way at once and finish them in order. An error that is not one
object's ends the copier: what is queued fails, once the device does no work of it any more.
"""

import logging
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

from hybridkv.connector.copy.device import DeviceError, Jobs, Lane, Waitable, over
from hybridkv.connector.copy.part import BadSlotError, load_error
from hybridkv.connector.copy.ring import Ring
from hybridkv.connector.copy.staging import Descriptors, Flight, Shared, Slots, Staging
from hybridkv.connector.copy.tables import encoded_bytes
from hybridkv.core.copies import CopyOp
from hybridkv.core.errors import HybridKVError
from hybridkv.shm.slots import PIECE_BYTES, piece_digests

logger = logging.getLogger("vllm.hybridkv")

HASH_BYTES_MIN = 1 << 20  # The least that a hashing thread is given.
HASH_SHARES = 4  # Threads that hash one part, where the device does not.
Job = TypeVar("Job")
Turn = Generator[Waitable, None, bool]


@dataclass(slots=True)
class StoreJob(Flight):
    """An object whose gather is queued, or was not taken (None)."""

    gathered: Waitable | None = None
    descriptors: int = 0  # Bytes that are given back with this object.
    done: Callable[[CopyOp, bool], None] = lambda op, stored: None


@dataclass(slots=True)
class LoadJob:
    """A request's load."""

    slots: Slots
    ops: deque[CopyOp]  # Those that are not on their way.
    ready: Waitable  # From then on the blocks may be written.
    done: Callable[[HybridKVError | None], None]
    errors: list[HybridKVError] = field(default_factory=list)
    flying: int = 0


@dataclass(slots=True)
class LoadFlight(Flight):
    """An object that is being loaded."""

    load: LoadJob | None = None


@dataclass(frozen=True, slots=True)
class Barrier:
    """Calls `reached` when everything that was queued before it is over; ends the lane if None."""

    reached: Callable[[], None] | None


class CopyLane(ABC, Generic[Job]):
    """What both lanes have in common."""

    def __init__(self, shared: Shared, staging: Staging, way: str) -> None:
        self.jobs: Jobs[Job | Barrier] = Jobs()
        self.staging = staging
        self._shared = shared
        self._way = way  # "store" or "load", in the counters' names.
        self._barrier: Barrier | None = None  # It waits for what is flying.
        self._busy_since = 0.0
        self._is_entered = False  # Whether the lane's thread may call the device.

    def run(self) -> Lane:
        """The lane. After any error it goes on, and fails whatever is queued."""
        self._is_entered = self._shared.enter_thread()
        turn = self._turn()
        while True:
            try:
                if (yield from turn):
                    return
                turn = self._turn()
            except Exception as error:  # noqa: BLE001  # `_fail` logs it, once
                turn = self._fail(error)

    def _turn(self) -> Turn:
        """Begin what can begin, then end one object, a barrier, or a wait; True ends the lane."""
        if self._barrier is None:
            yield from self._begin()
        if self._is_flying():
            yield from self._end_oldest()
            if not self._is_flying():
                seconds = time.perf_counter() - self._busy_since
                self._shared.count(f"device_{self._way}_seconds", seconds)
        elif self._barrier is not None:
            barrier, self._barrier = self._barrier, None
            if barrier.reached is None:
                return True
            barrier.reached()
        else:
            yield from over(self.jobs)
        return False

    def _fail(self, error: Exception) -> Turn:
        """End the copier, wait until the device does no work of ours, then fail what is flying."""
        self._shared.die(error)
        try:
            if self._is_entered:
                yield from self.staging.drain()
        except Exception:  # `die` logged what came first
            # A device that has failed for good runs nothing any more.
            logger.debug("hybridkv: the device does not answer", exc_info=True)
        self._fail_flying()
        return False

    def _digests(self, flight: Flight, digests: list[bytes]) -> Lane:
        """Append the digests of a part that is copied: the device's, or those that threads make."""
        if self._shared.digests_on_device:
            digests.append(self.staging.digests(flight))
            return
        size = max(HASH_BYTES_MIN, flight.size // HASH_SHARES) // PIECE_BYTES * PIECE_BYTES
        memory = flight.memory
        shares = [memory[at : at + size] for at in range(0, flight.size, size)]
        call = self._shared.device.call
        for result in [call(partial(piece_digests, share)) for share in shares]:
            yield from over(result)
            digests.append(result.result())

    def _enter(self, flight: Flight) -> None:
        if not self._is_flying():
            self._busy_since = time.perf_counter()
        self.staging.enter(flight)

    def _ended(self, flight: Flight) -> None:
        self.staging.ring.give_back(flight.size)
        self._shared.count(f"device_{self._way}_bytes", flight.size)

    @abstractmethod
    def _begin(self) -> Lane: ...

    @abstractmethod
    def _end_oldest(self) -> Lane: ...

    @abstractmethod
    def _is_flying(self) -> bool: ...

    @abstractmethod
    def _fail_flying(self) -> None: ...


class StoreLane(CopyLane[StoreJob]):
    """Copies parts from the ring to their slots and signs them."""

    def __init__(self, shared: Shared, staging: Staging, descriptors: Ring) -> None:
        super().__init__(shared, staging, "store")
        self._descriptors = descriptors
        self._flying: deque[StoreJob] = deque()

    def _begin(self) -> Lane:
        while len(self._flying) < self._shared.sizes.depth:
            job = self.jobs.take()
            if job is None or isinstance(job, Barrier):
                self._barrier = job
                return
            self._enter(job)
            self._flying.append(job)
            if self._shared.dead or job.gathered is None:
                raise DeviceError(self._shared.dead or "a gather was not launched")
            device, staging = self._shared.device, self.staging
            device.wait_event(staging.copies, job.gathered)
            yield from staging.copy(job, into_slot=True)
            if job.slots.part.checksum != "off" and self._shared.digests_on_device:
                device.wait_event(staging.programs, job.gathered)
                staging.digest(job)
                job.events.append(device.record(staging.programs))

    def _end_oldest(self) -> Lane:
        job = self._flying[0]
        part = job.slots.part
        yield from self.staging.settle(job)
        compared: list[bool] = []
        if part.checksum == "paranoid":
            yield from self.staging.matches(job, compared)
        if part.checksum != "off":
            digests: list[bytes] = []
            yield from self._digests(job, digests)
            part.write_signature(job.slots.arena, job.op, b"".join(digests))
        self._flying.popleft()
        self._give_back(job)
        if False in compared:
            self._shared.count("stores_not_equal")
        job.done(job.op, False not in compared)

    def _give_back(self, job: StoreJob) -> None:
        self._ended(job)
        if job.descriptors:
            self._descriptors.give_back(job.descriptors)

    def _is_flying(self) -> bool:
        return bool(self._flying)

    def _fail_flying(self) -> None:
        while self._flying:
            job = self._flying.popleft()
            self._give_back(job)
            self._shared.count("stores_device_failed")
            job.done(job.op, False)


class LoadLane(CopyLane[LoadJob]):
    """Copies slots into the ring, scatters them into the engine's blocks, and proves them."""

    def __init__(
        self, shared: Shared, staging: Staging, descriptors: Descriptors, entry_bytes: int
    ) -> None:
        super().__init__(shared, staging, "load")
        self._descriptors = descriptors
        self._entry_bytes = entry_bytes  # Of one object of `CopySizes.depth`.
        self._load: LoadJob | None = None  # It has ops that are not on their way.
        self._flying: deque[LoadFlight] = deque()

    def _begin(self) -> Lane:
        while len(self._flying) < self._shared.sizes.depth:
            if self._load is None:
                job = self.jobs.take()
                if job is None or isinstance(job, Barrier):
                    self._barrier = job
                    return
                self._load = job
            load = self._load
            try:
                if self._shared.dead:
                    raise DeviceError(self._shared.dead)
                flight = self._place(load, load.ops[0])
                if flight is None:
                    return
                load.ops.popleft()
                yield from self._send(load, flight)
            except DeviceError:
                raise
            except BadSlotError as error:
                # The load has failed, and goes on to find every other bad slot.
                load.errors.append(error)
                load.ops.popleft()
            except HybridKVError as error:
                load.errors.append(error)
                load.ops.clear()
            if not load.ops:
                self._load = None
                self._report(load)

    def _place(self, load: LoadJob, op: CopyOp) -> LoadFlight | None:
        """Room for an object; None until one that is flying has ended."""
        size = self._shared.tables.part_bytes(op)
        if not self._shared.tables.holds(op):
            raise HybridKVError("a block id is outside the engine's blocks")
        if size > self.staging.ring.largest or encoded_bytes([op]) > self._entry_bytes:
            raise HybridKVError(f"an object of {size} bytes does not fit the device staging")
        load.slots.part.recheck(load.slots.arena, op)
        place = self.staging.ring.take(size)
        if place is None:
            return None
        return LoadFlight(load.slots, op, size, place, load=load)

    def _send(self, load: LoadJob, flight: LoadFlight) -> Lane:
        device, staging, checksum = self._shared.device, self.staging, flight.slots.part.checksum
        self._enter(flight)
        self._flying.append(flight)
        load.flying += 1
        yield from staging.copy(flight, into_slot=False)
        device.wait_event(staging.programs, flight.events[-1])
        if checksum != "off" and self._shared.digests_on_device:
            staging.digest(flight)
        device.wait_event(staging.programs, load.ready)
        # "paranoid" gathers the blocks again into the same place, to compare them with the slot.
        directions = (False, True) if checksum == "paranoid" else (False,)
        at, ops, places = flight.number * self._entry_bytes, [flight.op], [flight.place]
        self._descriptors.move(at, ops, places, staging.memory, staging.programs, directions)
        flight.events.append(device.record(staging.programs))

    def _end_oldest(self) -> Lane:
        flight = self._flying[0]
        load, part, arena = flight.load, flight.slots.part, flight.slots.arena
        assert load is not None
        yield from self.staging.settle(flight)
        compared: list[bool] = []
        if part.checksum == "paranoid":
            yield from self.staging.matches(flight, compared)
        digests: list[bytes] = []
        if part.checksum != "off":
            # After the copy: a slot that is damaged before its bytes are read stays damaged.
            yield from self._digests(flight, digests)
        try:
            if part.checksum != "off":
                part.check_signature(arena, flight.op, b"".join(digests))
            if False in compared:
                raise BadSlotError(flight.op, "the engine's blocks are not what was copied")
            part.recheck(arena, flight.op)
        except BadSlotError as error:
            load.errors.append(error)
        self._flying.popleft()
        self._ended(flight)
        load.flying -= 1
        self._report(load)

    def _report(self, load: LoadJob) -> None:
        """Call `done` if nothing of the load is left."""
        if not load.ops and not load.flying:
            load.done(load_error(load.errors))

    def _is_flying(self) -> bool:
        return bool(self._flying)

    def _fail_flying(self) -> None:
        while self._flying or self._load is not None:
            load = self._flying[0].load if self._flying else self._load
            assert load is not None
            while self._flying and self._flying[0].load is load:
                self._ended(self._flying.popleft())
            if self._load is load:
                self._load = None
            load.ops.clear()
            load.flying = 0
            load.errors.append(DeviceError(self._shared.dead))
            load.done(load_error(load.errors))
