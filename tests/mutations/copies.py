"""Faults in the workers' side: copies between the engine's blocks and the arena."""

from tests.mutations.changes import body, never, swap, value, without
from tests.mutations.mutation import Mutation

AUDITOR = "tests/unit/connector/test_auditor.py"
COPIER = "tests/unit/connector/test_copier.py"
CUDA_DEVICE = "tests/unit/connector/test_cuda_device.py"
DEVICES = "tests.devicesim --seeds 0:60"
HOOKS = "tests/unit/connector/test_hooks.py"
PIPELINE = "tests/unit/connector/test_pipeline.py"
WORKER = "tests/unit/connector/test_worker.py"

FAULTS: tuple[Mutation, ...] = (
    Mutation(
        "stores-the-null-block",
        "an object with a hole is stored",
        "WorkerRole.start_stores",
        never("NULL_BLOCK"),
        "D12",
        (f"{WORKER}::test_of_a_run_with_a_null_block_only_the_objects_without_it_are_stored",),
    ),
    Mutation(
        "worker-locks-nothing",
        "a worker maps the arena without the lock by which a daemon elsewhere knows that it lives",
        "WorkerRole._map_arena",
        swap("self.link.lock", "None"),
        "B38",
        (f"{HOOKS}::test_a_worker_locks_the_arena_while_it_maps_it",),
    ),
    Mutation(
        "retired-and-running",
        "the engine's memory goes away while copies of a retired copier run",
        "WorkerRole.detach_arena",
        without("drain_copiers"),
        "B38",
        (
            f"{WORKER}::"
            "test_before_the_engine_sleeps_no_copy_runs_of_copiers_that_were_retired_either",
        ),
    ),
    Mutation(
        "slot-of-somebody-else",
        "nobody looks whether a slot has changed hands",
        "PartLayout.check_generation",
        body("pass"),
        "D6",
        (f"{COPIER}::test_a_slot_that_changed_hands_is_refused",),
    ),
    Mutation(
        "bytes-unproven",
        "bytes are loaded whatever their checksum is",
        "PartLayout.check_signature",
        body("pass"),
        "B36",
        (f"{COPIER}::test_every_flipped_byte_is_found",),
    ),
    Mutation(
        "any-block-id",
        "block ids are not compared with the engine's memory",
        "HostCopier._copy",
        swap("max(op.blocks)", "0"),
        "A33",
        (f"{COPIER}::test_a_block_id_outside_the_engines_memory_is_refused",),
    ),
    Mutation(
        "all-ranks-write",
        "every rank writes what all of them share",
        "PartLayout.writes",
        body("return True"),
        "C5",
        (f"{COPIER}::test_ranks_take_turns_with_what_they_share",),
    ),
    # Live audits
    Mutation(
        "compares-damaged-slots",
        "a slot that lost its bytes is taken for what an engine computed",
        "_proven_bytes",
        without("check_part"),
        "C29 D16",
        (f"{AUDITOR}::test_a_slot_that_lost_its_bytes_is_no_difference",),
    ),
    # The copies of a device
    Mutation(
        "lane-ends-with-its-first-error",
        "a lane ends with an error, and whoever waits for it waits for ever",
        "CopyLane.run_jobs",
        body("""
            self._is_entered = self._context.enter_thread()
            while not (yield from self._turn()):
                pass
        """),
        "B38 C11",
        (f"{PIPELINE}::test_a_device_that_fails_ends_the_copier_and_hangs_nobody",),
    ),
    Mutation(
        "told-before-it-is-over",
        "after an error stores and loads are told failed while the device still copies",
        "CopyLane._fail_all",
        swap("self.staging.drain_pieces()", "()"),
        "D6",
        (f"{PIPELINE}::test_nothing_is_told_failed_while_the_device_still_copies",),
    ),
    Mutation(
        "slot-before-gather",
        "a slot is filled from the staging before the gather has filled that",
        "StoreLane._send",
        without("copy_stream"),
        "D6",
        (DEVICES,),
    ),
    Mutation(
        "proof-without-generation",
        "a slot that changes hands while it is copied is not noticed",
        "LoadLane._prove",
        without("check_generation"),
        "D6",
        (f"{PIPELINE}::test_a_slot_that_changes_hands_while_it_is_copied_is_refused",),
    ),
    Mutation(
        "batch-out-of-order",
        "CUDA may read what it copies before the stream's earlier work has written it",
        "_IN_ORDER",
        value("(ctypes.c_int * 6)(3)"),
        "D6",
        (f"{CUDA_DEVICE}::test_copies_go_in_one_call_in_the_order_of_the_stream",),
    ),
    Mutation(
        "status-unread",
        "a call of the CUDA runtime fails, and nobody hears of it",
        "CudaDevice._run",
        body("getattr(self._runtime, name)(*arguments)"),
        "C11",
        (f"{CUDA_DEVICE}::test_a_call_that_fails_is_an_error_and_the_next_launch_is_none",),
    ),
)
