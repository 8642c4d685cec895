"""Faults in the copies of a device, most of which the first copier had (issue 14, F2 to F12)."""

from tests.mutations.files import DEVICES, PIPELINE
from tests.mutations.mutation import Mutation

REFUSED = "test_a_refused_registration_is_said_once_and_tried_again_after_a_minute"

FAULTS: tuple[Mutation, ...] = (
    Mutation(
        "staging-in-shreds",
        "what is left at the end of the staging is lost, so that planned stores do not fit (F2)",
        "Ring.reserve",
        "if size > self.largest or self._reserved_bytes + size > self.size:",
        "used = max(self._reserved_bytes, self._next % self.size)\n"
        "if size > self.largest or used + size > self.size:",
        ("A33",),
        (f"{PIPELINE}::test_a_ring_has_room_for_what_its_credits_allow", DEVICES),
    ),
    Mutation(
        "staging-of-no-step",
        "the staging holds a part of a step, whatever room the device has (F2)",
        "CopyPipeline.__init__",
        "store_bytes = min(room, STAGING_BYTES_MAX, demand.step_bytes)",
        "store_bytes = min(room, STAGING_BYTES_MAX, demand.step_bytes // 4)",
        ("A33",),
        (f"{PIPELINE}::test_a_long_prefill_is_stored_whole_with_the_staging_of_one_step",),
    ),
    Mutation(
        "engine-waits-for-its-step",
        "the engine's thread waits until the gather is over (F3)",
        "CopyPipeline.queue_store",
        "gathered = device.record(stream)",
        """
        gathered = device.record(stream)
        device.wait_for(gathered)
        """,
        ("D18",),
        (DEVICES,),
    ),
    Mutation(
        "pageable-copies",
        "memory that is not pinned is copied as if it were (F3)",
        "Pins.cut",
        "yield start, end - start, False",
        "yield start, end - start, True",
        ("D18",),
        (DEVICES,),
    ),
    Mutation(
        "loads-behind-pinning",
        "the load lane registers the arena's memory (F4)",
        "CopyPipeline.pin_arena",
        "self._pinning_jobs.push(pin)",
        "self._load_lane.jobs.put(Barrier(lambda: deque(pin(), 0).clear()))",
        ("D18",),
        (f"{PIPELINE}::test_an_arena_that_is_attached_again_delays_no_load", DEVICES),
    ),
    Mutation(
        "one-launch-for-each-object",
        "a step's gather is a launch for each of its objects (F5)",
        "CopyPipeline.queue_store",
        "device.launch(partial(context.kernels.copy_blocks, launch, True), stream)",
        """
        for _ in transfers:
            device.launch(partial(context.kernels.copy_blocks, launch, True), stream)
        """,
        ("D18",),
        (DEVICES,),
    ),
    Mutation(
        "one-object-at-a-time",
        "a batch of a load is copied when the one before it is in the engine's blocks (F6)",
        "CopyLane._send_batches",
        "while len(self._batches) < self._context.sizes.depth:",
        "while not self._batches:",
        ("D18",),
        (f"{PIPELINE}::test_objects_of_a_load_are_on_their_way_together",),
    ),
    Mutation(
        "staging-kept-by-the-dead",
        "a store that fails keeps its staging (F8)",
        "CopyLane._finish_object",
        "self.staging.ring.free_oldest(transfer.part_bytes)",
        """
        if isinstance(self, LoadLane) or not isinstance(error, DeviceError):
            self.staging.ring.free_oldest(transfer.part_bytes)
        """,
        ("B38",),
        (DEVICES,),
    ),
    Mutation(
        "lane-ends-with-its-first-error",
        "a lane ends with an error, and whoever waits for it waits for ever (F8)",
        "CopyLane.run_jobs",
        "turn = self._fail_all(error)",
        "raise",
        ("B38",),
        (f"{PIPELINE}::test_a_device_that_fails_ends_the_copier_and_hangs_nobody", DEVICES),
    ),
    Mutation(
        "told-before-it-is-over",
        "after an error stores and loads are told failed while the device still copies (F8)",
        "CopyLane._fail_all",
        "yield from self.staging.drain_pieces()",
        "yield from ()",
        ("D6",),
        (f"{PIPELINE}::test_nothing_is_told_failed_while_the_device_still_copies",),
    ),
    Mutation(
        "unpinned-by-a-stranger",
        "the thread that closes a copier unpins memory, on whatever device is its own (F9)",
        "CopyPipeline.detach",
        "drained = Latch(2, lambda: self._pinning_jobs.push(unpin))",
        """
        drained = Latch(2)
        for _ in unpin():
            pass
        """,
        ("A33",),
        (DEVICES,),
    ),
    Mutation(
        "old-error-stays",
        "the error of a refused registration is raised by the thread's next launch (F10)",
        "Pins.pin_pages",
        "device.clear_error()",
        "",
        ("C11",),
        (DEVICES,),
    ),
    Mutation(
        "refused-again-and-again",
        "a refused registration is tried again whenever the arena grows (F10)",
        "Pins.pin_pages",
        "self._retry_at = time.monotonic() + RETRY_SECONDS",
        "",
        ("B31",),
        (f"{PIPELINE}::{REFUSED}", DEVICES),
    ),
    Mutation(
        "refused-for-ever",
        "a refused registration is never tried again",
        "Pins.request_pages",
        "is_retry = 0 < self._retry_at <= time.monotonic()",
        "is_retry = False",
        ("B31",),
        (f"{PIPELINE}::{REFUSED}",),
    ),
    Mutation(
        "pinning-in-one-go",
        "registrations run one after another, and CUDA's calls of all threads wait for them",
        "Pins.pin_pages",
        "yield _Pause(time.perf_counter() - began)",
        "yield _Pause(0.0)",
        ("D18",),
        (f"{PIPELINE}::test_a_registration_is_followed_by_a_pause_as_long",),
    ),
    Mutation(
        "thread-without-a-device",
        "a lane whose thread cannot choose the device ends, and whoever waits for it hangs",
        "DeviceContext.enter_thread",
        "return False",
        "raise",
        ("B38",),
        (f"{PIPELINE}::test_a_thread_that_cannot_choose_the_device_hangs_nobody",),
    ),
    Mutation(
        "loads-fail-with-the-first",
        "after an error a load that cannot be told failed keeps all others from it",
        "CopyLane._fail_all",
        """
            while transfers:
                self._finish_object(transfers.popleft(), DeviceError(self._context.fatal_error))
            self._batches.popleft()
        """,
        """
            self._batches.popleft()
            while transfers:
                self._finish_object(transfers.popleft(), DeviceError(self._context.fatal_error))
        """,
        ("B38",),
        (f"{PIPELINE}::test_an_error_of_whoever_is_told_hangs_nobody_else",),
    ),
    Mutation(
        "one-call-for-each-object",
        "each object is a batch, so that a busy interpreter holds up each of them",
        "Staging.has_room_for",
        "return not batch.transfers or (not is_full and together <= self._batch_bytes)",
        "return not batch.transfers",
        ("D18",),
        (f"{PIPELINE}::test_a_batch_is_queued_by_a_few_calls",),
    ),
    Mutation(
        "gathers-in-one-batch",
        "a batch has objects of two gathers, whose entries are not one after another",
        "StoreLane._fill",
        "is_of_next_gather = transfer.gathered is not first.gathered",
        "is_of_next_gather = False",
        ("A33",),
        (DEVICES,),
    ),
    Mutation(
        "digests-of-one-batch",
        "the digests of a batch are overwritten by those of the next one",
        "Staging.queue_digests",
        "self._digests.data_ptr() + batch.index * self._digest_bytes",
        "self._digests.data_ptr()",
        ("A33",),
        (DEVICES,),
    ),
    Mutation(
        "the-same-object-for-ever",
        "an object that cannot begin is tried again, and nothing else goes on",
        "LoadLane._fail_job",
        "load.ops.clear()",
        "return",
        ("B38",),
        (f"{PIPELINE}::test_an_error_of_an_object_that_cannot_begin_hangs_nobody",),
    ),
    Mutation(
        "retired-and-running",
        "the engine's memory goes away while copies of a retired copier run",
        "WorkerRole.detach_arena",
        "self.factory.drain_copiers()",
        "pass",
        ("B38",),
        (
            "tests/unit/connector/test_worker.py::"
            "test_before_the_engine_sleeps_no_copy_runs_of_copiers_that_were_retired_either",
        ),
    ),
    Mutation(
        "memory-that-is-still-written",
        "what is allocated may be written by the engine's earlier work",
        "CopyPipeline.__init__",
        "device.wait_for(device.record(device.current_stream()))",
        "",
        ("A33",),
        (f"{PIPELINE}::test_memory_is_used_once_the_engines_work_with_it_is_over",),
    ),
    Mutation(
        "kernels-behind-the-engines",
        "gathers' digests and scatters wait for all kernels that the engine has queued",
        "Staging.__init__",
        "self.kernel_stream = device.new_stream(is_urgent=True)",
        "self.kernel_stream = device.new_stream()",
        ("D18",),
        (f"{PIPELINE}::test_kernels_do_not_wait_for_the_engines_and_copies_have_no_priority",),
    ),
    Mutation(
        "kernels-tried-on-zeros",
        "kernels are tried on memory in which every block is like the others (L2)",
        "_copies_agree",
        "trial.scatter(reference, blocks, content)",
        "trial.scatter(reference, blocks, torch.zeros_like(content))",
        ("A33",),
        ("tests/unit/connector/test_agreement.py::test_a_fault_is_found_on_memory_of_zeros",),
    ),
    Mutation(
        "trial-leaves-its-bytes",
        "blocks keep the random bytes on which kernels were tried",
        "_copies_agree",
        "trial.scatter(reference, blocks, earlier)",
        "pass",
        ("A33",),
        (
            "tests/unit/connector/test_agreement.py::"
            "test_blocks_are_restored_where_kernels_do_not_run",
        ),
    ),
    Mutation(
        "paranoid-in-name",
        '"paranoid" compares nothing on a device (F12)',
        "LoadLane._send",
        'for is_gather in (False, True) if batch.checksum == "paranoid" else (False,):',
        "for is_gather in (False,):",
        ("B36",),
        (f"{PIPELINE}::test_paranoid_compares_the_engines_blocks",),
    ),
    Mutation(
        "slot-before-gather",
        "a slot is filled from the staging before the gather has filled that",
        "StoreLane._send",
        "device.wait_event(staging.copy_stream, gathered)",
        "",
        ("D6",),
        (DEVICES,),
    ),
    Mutation(
        "scatter-before-copy",
        "blocks are restored from the staging before the slot's bytes are there",
        "LoadLane._send",
        "device.wait_event(staging.kernel_stream, batch.events[-1])",
        "",
        ("D6",),
        (DEVICES,),
    ),
    Mutation(
        "scatter-into-blocks-in-use",
        "blocks are restored before the engine's earlier work with them is over",
        "LoadLane._send",
        "device.wait_event(staging.kernel_stream, event)",
        "pass",
        ("D6",),
        (DEVICES,),
    ),
    Mutation(
        "staging-given-back-early",
        "a load's staging is free before its scatter is over",
        "CopyLane._finish_oldest",
        "yield from self.staging.finish_batch(batch)",
        "yield from wait_in_lane(batch.events[0])",
        ("D6",),
        (DEVICES,),
    ),
    Mutation(
        "descriptors-used-again",
        "what a kernel reads is overwritten before the kernel has run",
        "LoadLane._send",
        "batch.index * batch_bytes",
        "0",
        ("A33",),
        (DEVICES,),
    ),
    Mutation(
        "bounced-and-forgotten",
        "a part of the bounce buffer is used again before its bytes are in the slot",
        "Staging._copy_unpinned",
        "if earlier is not None:",
        "if earlier is not None and not into_slot:",
        ("A33",),
        (DEVICES,),
    ),
    Mutation(
        "proof-without-generation",
        "a slot that changes hands while it is copied is not noticed",
        "LoadLane._prove",
        "part.check_generation(arena, transfer.op)",
        "",
        ("D6",),
        (f"{PIPELINE}::test_a_slot_that_changes_hands_while_it_is_copied_is_refused",),
    ),
    Mutation(
        "dead-but-attached",
        "a worker whose device failed still says that it maps the arena",
        "WorkerRole.take_step_report",
        "if self.boot and (self.factory is None or self.factory.can_copy):",
        "if self.boot:",
        ("C11",),
        ("tests/unit/connector/test_worker.py::test_a_worker_whose_device_failed_offers_nothing",),
    ),
)
