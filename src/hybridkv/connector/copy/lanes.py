"""The threads that store and load, as lanes (device). Neither waits for the other.

Both keep some batches of objects on their way and end them in order. A batch is queued by a few
calls, however many objects it has, because a thread may wait for the interpreter after each call.
An error that is not one object's ends the copier: what is queued fails, once the device does no
work of it any more.
"""

import logging
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

from hybridkv.connector.copy.device import DeviceError, Jobs, Lane, Pieces, Waitable, over
from hybridkv.connector.copy.part import BadSlotError, load_error
from hybridkv.connector.copy.ring import Ring
from hybridkv.connector.copy.staging import Batch, Descriptors, Flight, Shared, Slots, Staging
from hybridkv.connector.copy.tables import encoded_bytes
from hybridkv.core.copies import CopyOp
from hybridkv.core.errors import HybridKVError
from hybridkv.shm.slots import PIECE_BYTES, piece_digests

logger = logging.getLogger("vllm.hybridkv")

HASH_BYTES_MIN = 1 << 20  # The least that a hashing thread is given.
HASH_SHARES = 4  # Threads that hash one part, where the device does not.
Job = TypeVar("Job")
F = TypeVar("F", bound=Flight)
Turn = Generator[Waitable, None, bool]
Fault = HybridKVError | None
"""What is wrong with an object."""


@dataclass(slots=True)
class StoreFlight(Flight):
    """An object whose gather is queued, or was not (`ready` is None)."""

    done: Callable[[CopyOp, bool], None] = lambda op, stored: None
    descriptors: int = 0  # Bytes that are given back with this object.


@dataclass(slots=True)
class LoadJob:
    """A request's load."""

    slots: Slots
    ops: deque[CopyOp]  # Those that are not on their way.
    ready: Waitable  # From then on the blocks may be written.
    done: Callable[[Fault], None]
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


class CopyLane(ABC, Generic[Job, F]):
    """What both lanes have in common."""

    def __init__(self, shared: Shared, staging: Staging, way: str) -> None:
        self.jobs: Jobs[Job | Barrier] = Jobs()
        self.staging = staging
        self._shared = shared
        self._way = way  # "store" or "load", in the counters' names.
        self._job: Job | None = None  # It is not on its way, or not all of it.
        self._barrier: Barrier | None = None  # It waits for what is flying.
        self._flying: deque[Batch[F]] = deque()
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
        """Begin what can begin, then end one batch, a barrier, or a wait; True ends the lane."""
        yield from self._begin()
        if self._flying:
            yield from self._end_oldest()
            if not self._flying:
                seconds = time.perf_counter() - self._busy_since
                self._shared.count(f"device_{self._way}_seconds", seconds)
        elif self._barrier is not None:
            barrier, self._barrier = self._barrier, None
            if barrier.reached is None:
                return True
            barrier.reached()
        else:
            assert self._job is None, "an object has no room, and nothing is on its way"
            yield from over(self.jobs)
        return False

    def _begin(self) -> Lane:
        while len(self._flying) < self._shared.sizes.depth:
            batch: Batch[F] = Batch()
            if not self._flying:
                self._busy_since = time.perf_counter()
            self._flying.append(batch)
            self._fill(batch)
            if not batch.flights:
                self._flying.pop()
                return
            if self._shared.dead:
                raise DeviceError(self._shared.dead)
            self.staging.enter(batch)
            yield from self._send(batch)

    def _has_job(self) -> bool:
        """Whether there is a job before the next barrier."""
        if self._job is None and self._barrier is None:
            job = self.jobs.take()
            if isinstance(job, Barrier):
                self._barrier = job
            else:
                self._job = job
        return self._job is not None

    def _end_oldest(self) -> Lane:
        batch = self._flying[0]
        yield from self.staging.settle(batch)
        while batch.flights:
            flight = batch.flights[0]
            is_equal, digests = True, None
            if batch.checksum == "paranoid":
                is_equal = yield from self.staging.matches(flight)
            if batch.checksum != "off":
                # After the copy: a slot that is damaged before its bytes are read stays damaged.
                digests = yield from self._digests(batch, flight)
            error = self._prove(flight, digests, is_equal)
            self._end(batch.flights.popleft(), error)
        self._flying.popleft()

    def _digests(self, batch: Batch[F], flight: F) -> Generator[Waitable, None, bytes]:
        """Return the digests of a part: the device's, or those that threads make."""
        if self._shared.digests_on_device:
            return self.staging.digests(batch, flight)
        size = max(HASH_BYTES_MIN, flight.size // HASH_SHARES) // PIECE_BYTES * PIECE_BYTES
        memory = flight.memory
        shares = [memory[at : at + size] for at in range(0, flight.size, size)]
        call = self._shared.device.call
        results = [call(partial(piece_digests, share)) for share in shares]
        for result in results:
            yield from over(result)
        return b"".join(result.result() for result in results)

    def _fail(self, error: Exception) -> Turn:
        """End the copier, wait until the device does no work of ours, then fail what is flying."""
        self._shared.die(error)
        try:
            if self._is_entered:
                yield from self.staging.drain()
        except Exception:  # `die` logged what came first
            # A device that has failed for good runs nothing any more.
            logger.debug("hybridkv: the device does not answer", exc_info=True)
        self._give_up()
        while self._flying:
            flights = self._flying[0].flights
            while flights:
                self._end(flights.popleft(), DeviceError(self._shared.dead))
            self._flying.popleft()
        return False

    def _end(self, flight: F, error: Fault) -> None:
        """An object is over; an error of whoever is told ends the copier."""
        self.staging.ring.give_back(flight.size)
        self._shared.count(f"device_{self._way}_bytes", flight.size)
        self._tell(flight, error)

    @abstractmethod
    def _fill(self, batch: Batch[F]) -> None:
        """Take objects into the batch as far as there are any, and room."""

    @abstractmethod
    def _send(self, batch: Batch[F]) -> Lane:
        """Queue all work of a batch."""

    @abstractmethod
    def _prove(self, flight: F, digests: bytes | None, is_equal: bool) -> Fault:
        """Sign what was stored, or prove what was loaded."""

    @abstractmethod
    def _tell(self, flight: F, error: Fault) -> None: ...

    def _give_up(self) -> None:
        """End the job of which something is not on its way, where that may fail again."""


class StoreLane(CopyLane[StoreFlight, StoreFlight]):
    """Copies parts from the ring to their slots and signs them."""

    def __init__(self, shared: Shared, staging: Staging, descriptors: Ring) -> None:
        super().__init__(shared, staging, "store")
        self._descriptors = descriptors

    def _fill(self, batch: Batch[StoreFlight]) -> None:
        """All of a batch is of one gather, whose entries are one after another."""
        while self._has_job():
            flight = self._job
            assert flight is not None
            is_other = batch.flights and flight.ready is not batch.flights[0].ready
            if is_other or not self.staging.takes(batch, flight.size):
                return
            batch.flights.append(flight)
            self._job = None

    def _send(self, batch: Batch[StoreFlight]) -> Lane:
        device, staging, first = self._shared.device, self.staging, batch.flights[0]
        if first.ready is None:
            raise DeviceError("a gather was not launched")
        device.wait_event(staging.copies, first.ready)
        yield from staging.copy(batch, Pieces(), into_slot=True)
        if self._shared.digests_on_device and batch.checksum != "off":
            device.wait_event(staging.programs, first.ready)
            staging.digest(batch)
            batch.events.append(device.record(staging.programs))

    def _prove(self, flight: StoreFlight, digests: bytes | None, is_equal: bool) -> Fault:
        if digests is not None:
            flight.slots.part.write_signature(flight.slots.arena, flight.op, digests)
        if is_equal:
            return None
        self._shared.count("stores_not_equal")
        return HybridKVError("the slot's bytes are not those of the blocks")

    def _tell(self, flight: StoreFlight, error: Fault) -> None:
        if flight.descriptors:
            self._descriptors.give_back(flight.descriptors)
        self._shared.count("stores_device_failed", isinstance(error, DeviceError))
        flight.done(flight.op, error is None)


class LoadLane(CopyLane[LoadJob, LoadFlight]):
    """Copies slots into the ring, scatters them into the engine's blocks, and proves them."""

    def __init__(
        self, shared: Shared, staging: Staging, descriptors: Descriptors, entry_bytes: int
    ) -> None:
        super().__init__(shared, staging, "load")
        self._descriptors = descriptors
        self._entry_bytes = entry_bytes  # Of one object.

    def _fill(self, batch: Batch[LoadFlight]) -> None:
        while self._has_job():
            load = self._job
            assert load is not None
            try:
                if not self._place(batch, load, load.ops[0]):
                    return
                load.ops.popleft()
            except BadSlotError as error:
                # The load has failed, and goes on to find every other bad slot.
                load.errors.append(error)
                load.ops.popleft()
            except HybridKVError as error:
                load.errors.append(error)
                load.ops.clear()
            if not load.ops:
                self._job = None
                self._report(load)

    def _place(self, batch: Batch[LoadFlight], load: LoadJob, op: CopyOp) -> bool:
        """Take an object into the batch; False where it has to wait for others to end."""
        size = self._shared.tables.part_bytes(op)
        if not self._shared.tables.holds(op):
            raise HybridKVError("a block id is outside the engine's blocks")
        if size > self.staging.ring.largest or encoded_bytes([op]) > self._entry_bytes:
            raise HybridKVError(f"an object of {size} bytes does not fit the device staging")
        load.slots.part.recheck(load.slots.arena, op)
        place = self.staging.ring.take(size) if self.staging.takes(batch, size) else None
        if place is None:
            return False
        batch.flights.append(LoadFlight(load.slots, op, size, place, load.ready, load=load))
        load.flying += 1
        return True

    def _send(self, batch: Batch[LoadFlight]) -> Lane:
        device, staging, pieces = self._shared.device, self.staging, Pieces()
        at = batch.number * self._entry_bytes * self._shared.sizes.batch_objects
        move = self._descriptors.write(at, batch.flights, staging.memory, pieces)
        yield from staging.copy(batch, pieces, into_slot=False)
        device.wait_event(staging.programs, batch.events[-1])
        if self._shared.digests_on_device and batch.checksum != "off":
            staging.digest(batch)
        for ready in {id(flight.ready): flight.ready for flight in batch.flights}.values():
            assert ready is not None
            device.wait_event(staging.programs, ready)
        # "paranoid" gathers the blocks again into the same place, to compare them with the slot.
        for is_gather in (False, True) if batch.checksum == "paranoid" else (False,):
            device.launch(partial(self._shared.kernels.move, move, is_gather), staging.programs)
        batch.events.append(device.record(staging.programs))

    def _prove(self, flight: LoadFlight, digests: bytes | None, is_equal: bool) -> Fault:
        part, arena = flight.slots.part, flight.slots.arena
        try:
            if digests is not None:
                part.check_signature(arena, flight.op, digests)
            if not is_equal:
                raise BadSlotError(flight.op, "the engine's blocks are not what was copied")
            part.recheck(arena, flight.op)
        except BadSlotError as error:
            return error
        return None

    def _tell(self, flight: LoadFlight, error: Fault) -> None:
        load = flight.load
        assert load is not None
        load.flying -= 1
        if error is not None:
            load.errors.append(error)
        self._report(load)

    def _give_up(self) -> None:
        load, self._job = self._job, None
        if load is not None:
            load.ops.clear()
            load.errors.append(DeviceError(self._shared.dead))
            self._report(load)

    def _report(self, load: LoadJob) -> None:
        """Call `done` if nothing of the load is left."""
        if not load.ops and not load.flying:
            load.done(load_error(load.errors))
