"""The threads that store and load, as lanes (device). Neither waits for the other.

Both keep some batches of objects in flight and finish them in order. A batch is queued by a few
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
from typing import ClassVar, Generic, TypeVar

from hybridkv.connector import metrics
from hybridkv.connector.copy.device import (
    CopyList,
    DeviceError,
    JobQueue,
    Lane,
    Waitable,
    wait_in_lane,
)
from hybridkv.connector.copy.part import BadSlotError, load_error
from hybridkv.connector.copy.ring import Ring
from hybridkv.connector.copy.staging import (
    AttachedArena,
    Batch,
    Descriptors,
    DeviceContext,
    ObjectTransfer,
    Staging,
    Transfer,
)
from hybridkv.connector.copy.tables import encoded_bytes
from hybridkv.core.copies import CopyOp
from hybridkv.core.errors import HybridKVError
from hybridkv.core.metrics import Metric
from hybridkv.shm.slots import PIECE_BYTES, piece_digests

logger = logging.getLogger("vllm.hybridkv")

HASH_BYTES_MIN = 1 << 20  # The least that a hashing thread is given.
HASH_SHARES = 4  # Threads that hash one part, where the device does not.
Job = TypeVar("Job")
Turn = Generator[Waitable, None, bool]
"""One turn of a lane. It returns True where the lane ends with it."""
Fault = HybridKVError | None
"""The error of one object or of one load. None where it went well."""


@dataclass(slots=True, kw_only=True)
class StoreTransfer(ObjectTransfer):
    """An object that is being stored."""

    done: Callable[[CopyOp, bool], None]
    gathered: Waitable | None = None
    """Over when the ring has the part. None where the gather could not be queued."""
    descriptor_bytes: int = 0  # Bytes of the descriptors' ring that are released with this object.


@dataclass(slots=True)
class LoadJob:
    """The load of one request, until all its objects are in its blocks."""

    attached: AttachedArena
    ops: deque[CopyOp]  # Objects that are not in a batch yet.
    engine_event: Waitable  # When it is over, the blocks may be written.
    done: Callable[[Fault], None]
    errors: list[HybridKVError] = field(default_factory=list)
    in_flight: int = 0  # Objects that are in a batch.


@dataclass(slots=True, kw_only=True)
class LoadTransfer(ObjectTransfer):
    """An object that is being loaded."""

    load: LoadJob


@dataclass(frozen=True, slots=True)
class Barrier:
    """A job that waits until every job before it is over.

    The lane calls `on_reached` then, or ends where that is None.
    """

    on_reached: Callable[[], None] | None


class CopyLane(ABC, Generic[Job, Transfer]):
    """The part that both lanes share: jobs, batches in flight, and how they end."""

    seconds_counter: ClassVar[Metric]  # Counts the time in which batches were in flight.
    bytes_counter: ClassVar[Metric]  # Counts the bytes of objects that are over.

    def __init__(self, context: DeviceContext, staging: Staging) -> None:
        self.jobs: JobQueue[Job | Barrier] = JobQueue()
        self.staging = staging
        self._context = context
        self._job: Job | None = None  # The next job, of which some objects are in no batch yet.
        self._barrier: Barrier | None = None  # The next barrier; batches in flight come before it.
        self._batches: deque[Batch[Transfer]] = deque()  # Those in flight, the oldest first.
        self._busy_since = 0.0
        self._is_entered = False  # Whether the lane's thread may call the device.

    def run_jobs(self) -> Lane:
        """Return the lane. After any error it goes on, and fails whatever is queued."""
        self._is_entered = self._context.enter_thread()
        turn = self._turn()
        while True:
            try:
                if (yield from turn):
                    return
                turn = self._turn()
            except Exception as error:  # noqa: BLE001  # `_fail_all` logs it, once
                turn = self._fail_all(error)

    def _turn(self) -> Turn:
        """Send the batches that have room, then finish one batch, a barrier, or a wait."""
        yield from self._send_batches()
        if self._batches:
            yield from self._finish_oldest()
            if not self._batches:
                seconds = time.perf_counter() - self._busy_since
                self._context.count_event(self.seconds_counter, seconds)
        elif self._barrier is not None:
            barrier, self._barrier = self._barrier, None
            if barrier.on_reached is None:
                return True
            barrier.on_reached()
        else:
            assert self._job is None, "an object has no room, and nothing is on its way"
            yield from wait_in_lane(self.jobs)
        return False

    def _send_batches(self) -> Lane:
        while len(self._batches) < self._context.sizes.depth:
            batch: Batch[Transfer] = Batch()
            if not self._batches:
                self._busy_since = time.perf_counter()
            self._batches.append(batch)
            self._fill(batch)
            if not batch.transfers:
                self._batches.pop()
                return
            if self._context.fatal_error:
                raise DeviceError(self._context.fatal_error)
            self.staging.assign_indices(batch)
            yield from self._send(batch)

    def _current_job(self) -> Job | None:
        """Return the job that is not wholly in batches, or the next one. None before a barrier."""
        if self._job is None and self._barrier is None:
            job = self.jobs.pop()
            if isinstance(job, Barrier):
                self._barrier = job
            else:
                self._job = job
        return self._job

    def _finish_oldest(self) -> Lane:
        batch = self._batches[0]
        yield from self.staging.finish_batch(batch)
        while batch.transfers:
            transfer = batch.transfers[0]
            is_equal, digests = True, None
            if batch.checksum == "paranoid":
                is_equal = yield from self.staging.is_in_slot(transfer)
            if batch.checksum != "off":
                # After the copy: a slot that is damaged before its bytes are read stays damaged.
                digests = yield from self._digests(batch, transfer)
            error = self._prove(transfer, digests, is_equal)
            self._finish_object(batch.transfers.popleft(), error)
        self._batches.popleft()

    def _digests(
        self, batch: Batch[Transfer], transfer: Transfer
    ) -> Generator[Waitable, None, bytes]:
        """Return the digests of a part: the device's, or those that threads compute."""
        if self._context.digests_on_device:
            return self.staging.read_digests(batch, transfer)
        part_bytes = transfer.part_bytes
        size = max(HASH_BYTES_MIN, part_bytes // HASH_SHARES) // PIECE_BYTES * PIECE_BYTES
        memory = transfer.memory
        shares = [memory[start : start + size] for start in range(0, part_bytes, size)]
        submit = self._context.device.submit
        results = [submit(partial(piece_digests, share)) for share in shares]
        for result in results:
            yield from wait_in_lane(result)
        return b"".join(result.result() for result in results)

    def _fail_all(self, error: Exception) -> Turn:
        """End the copier, wait until the device does no work of ours, then fail all batches."""
        self._context.on_fatal_error(error)
        try:
            if self._is_entered:
                yield from self.staging.drain_pieces()
        except Exception:  # `end` logged what came first
            # A device that has failed for good runs nothing any more.
            logger.debug("hybridkv: the device does not answer", exc_info=True)
        self._fail_job()
        while self._batches:
            transfers = self._batches[0].transfers
            while transfers:
                self._finish_object(transfers.popleft(), DeviceError(self._context.fatal_error))
            self._batches.popleft()
        return False

    def _finish_object(self, transfer: Transfer, error: Fault) -> None:
        """Release an object's staging and report its end. What that raises ends the copier."""
        self.staging.ring.free_oldest(transfer.part_bytes)
        self._context.count_event(self.bytes_counter, transfer.part_bytes)
        self._report(transfer, error)

    @abstractmethod
    def _fill(self, batch: Batch[Transfer]) -> None:
        """Take objects into the batch, as long as there are any and they have room."""

    @abstractmethod
    def _send(self, batch: Batch[Transfer]) -> Lane:
        """Queue all work of a batch on the device."""

    @abstractmethod
    def _prove(self, transfer: Transfer, digests: bytes | None, is_equal: bool) -> Fault:
        """Sign what was stored, or prove what was loaded. Returns what is wrong with it.

        `digests` is None without checksums. `is_equal` is False where a comparison found the slot
        or the blocks to have other bytes.
        """

    @abstractmethod
    def _report(self, transfer: Transfer, error: Fault) -> None:
        """Tell whoever asked for the object that it is over."""

    def _fail_job(self) -> None:
        """Fail the job of which objects are in no batch yet, where it would only fail again."""


class StoreLane(CopyLane[StoreTransfer, StoreTransfer]):
    """Copies parts from the ring to their slots and signs them."""

    seconds_counter = metrics.DEVICE_STORE_SECONDS
    bytes_counter = metrics.DEVICE_STORE_BYTES

    def __init__(self, context: DeviceContext, staging: Staging, descriptor_ring: Ring) -> None:
        super().__init__(context, staging)
        self._descriptor_ring = descriptor_ring

    def _fill(self, batch: Batch[StoreTransfer]) -> None:
        """Take objects of one gather alone, because the entries of a batch follow each other."""
        while (transfer := self._current_job()) is not None:
            first = batch.transfers[0] if batch.transfers else transfer
            is_of_next_gather = transfer.gathered is not first.gathered
            if is_of_next_gather or not self.staging.has_room_for(batch, transfer.part_bytes):
                return
            batch.transfers.append(transfer)
            self._job = None

    def _send(self, batch: Batch[StoreTransfer]) -> Lane:
        device, staging = self._context.device, self.staging
        gathered = batch.transfers[0].gathered
        if gathered is None:
            raise DeviceError("a gather was not launched")
        device.wait_event(staging.copy_stream, gathered)
        yield from staging.copy_parts(batch, CopyList(), into_slot=True)
        if self._context.digests_on_device and batch.checksum != "off":
            device.wait_event(staging.kernel_stream, gathered)
            staging.queue_digests(batch)
            batch.events.append(device.record(staging.kernel_stream))

    def _prove(self, transfer: StoreTransfer, digests: bytes | None, is_equal: bool) -> Fault:
        if digests is not None:
            attached = transfer.attached
            attached.part.write_signature(attached.arena, transfer.op, digests)
        if is_equal:
            return None
        self._context.count_event(metrics.stores_shed(metrics.Shed.NOT_EQUAL))
        return HybridKVError("the slot's bytes are not those of the blocks")

    def _report(self, transfer: StoreTransfer, error: Fault) -> None:
        if transfer.descriptor_bytes:
            self._descriptor_ring.free_oldest(transfer.descriptor_bytes)
        is_device_error = isinstance(error, DeviceError)
        self._context.count_event(metrics.stores_shed(metrics.Shed.DEVICE_FAILED), is_device_error)
        transfer.done(transfer.op, error is None)


class LoadLane(CopyLane[LoadJob, LoadTransfer]):
    """Copies slots into the ring, scatters them into the engine's blocks, and proves them."""

    seconds_counter = metrics.DEVICE_LOAD_SECONDS
    bytes_counter = metrics.DEVICE_LOAD_BYTES

    def __init__(
        self, context: DeviceContext, staging: Staging, descriptors: Descriptors, entry_bytes: int
    ) -> None:
        super().__init__(context, staging)
        self._descriptors = descriptors
        self._entry_bytes = entry_bytes  # The most of one object: its entry and block numbers.

    def _fill(self, batch: Batch[LoadTransfer]) -> None:
        while (load := self._current_job()) is not None:
            try:
                if not self._take_object(batch, load, load.ops[0]):
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
                self._report_load(load)

    def _take_object(self, batch: Batch[LoadTransfer], load: LoadJob, op: CopyOp) -> bool:
        """Take an object into the batch. Returns False where it has to wait for others to end."""
        part_bytes = self._context.tables.part_bytes(op)
        if not self._context.tables.has_blocks(op):
            raise HybridKVError("a block id is outside the engine's blocks")
        if part_bytes > self.staging.ring.largest or encoded_bytes([op]) > self._entry_bytes:
            raise HybridKVError(f"an object of {part_bytes} bytes does not fit the device staging")
        load.attached.part.check_generation(load.attached.arena, op)
        ring_offset = None
        if self.staging.has_room_for(batch, part_bytes):
            ring_offset = self.staging.ring.reserve(part_bytes)
        if ring_offset is None:
            return False
        transfer = LoadTransfer(load.attached, op, part_bytes, ring_offset, load=load)
        batch.transfers.append(transfer)
        load.in_flight += 1
        return True

    def _send(self, batch: Batch[LoadTransfer]) -> Lane:
        device, staging, copies = self._context.device, self.staging, CopyList()
        batch_bytes = self._entry_bytes * self._context.sizes.batch_objects
        launch = self._descriptors.write(
            batch.index * batch_bytes, batch.transfers, staging.memory, copies
        )
        yield from staging.copy_parts(batch, copies, into_slot=False)
        device.wait_event(staging.kernel_stream, batch.events[-1])
        if self._context.digests_on_device and batch.checksum != "off":
            staging.queue_digests(batch)
        events = (transfer.load.engine_event for transfer in batch.transfers)
        for event in {id(event): event for event in events}.values():
            device.wait_event(staging.kernel_stream, event)
        # "paranoid" gathers the blocks again into the same place, to compare them with the slot.
        for is_gather in (False, True) if batch.checksum == "paranoid" else (False,):
            copy_blocks = partial(self._context.kernels.copy_blocks, launch, is_gather)
            device.launch(copy_blocks, staging.kernel_stream)
        batch.events.append(device.record(staging.kernel_stream))

    def _prove(self, transfer: LoadTransfer, digests: bytes | None, is_equal: bool) -> Fault:
        part, arena = transfer.attached.part, transfer.attached.arena
        try:
            if digests is not None:
                part.check_signature(arena, transfer.op, digests)
            if not is_equal:
                raise BadSlotError(transfer.op, "the engine's blocks are not what was copied")
            part.check_generation(arena, transfer.op)
        except BadSlotError as error:
            return error
        return None

    def _report(self, transfer: LoadTransfer, error: Fault) -> None:
        load = transfer.load
        load.in_flight -= 1
        if error is not None:
            load.errors.append(error)
        self._report_load(load)

    def _fail_job(self) -> None:
        load, self._job = self._job, None
        if load is not None:
            load.ops.clear()
            load.errors.append(DeviceError(self._context.fatal_error))
            self._report_load(load)

    def _report_load(self, load: LoadJob) -> None:
        """Call `done` if no object of the load is left."""
        if not load.ops and not load.in_flight:
            load.done(load_error(load.errors))
