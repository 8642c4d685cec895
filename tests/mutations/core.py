"""Faults in geometry, coverage, plans and the states of a request."""

from tests.mutations.files import (
    COPIES,
    COVERAGE,
    DEEPSEEK,
    GEOMETRY,
    PLAIN,
    RECURRENT,
    REQUEST_STATES,
    SCHEDULER,
    STORES,
    WORKER,
)
from tests.mutations.mutation import Mutation

FAULTS: tuple[Mutation, ...] = (
    # Geometry
    Mutation(
        "naive-ratio",
        "blocks per chunk by the smallest block over the group's, which is 0 for the larger ones",
        "Geometry.blocks_per_chunk",
        "return self.chunk_tokens // group.tokens_per_block",
        """
        smallest = min(each.tokens_per_block for each in self.groups)
        return smallest // group.tokens_per_block * (self.chunk_tokens // smallest)
        """,
        ("A2", "A3", "A18", "A19", "A20", "A21", "A22", "A23", "A31"),
        (f"{GEOMETRY}::test_deepseek_v4_blocks_of_4096_tokens", DEEPSEEK),
    ),
    Mutation(
        "chunk-unchecked",
        "a chunk need not be a multiple of anything",
        "Geometry.__post_init__",
        "if unit <= 0 or chunk <= 0 or chunk % unit:",
        "if unit <= 0 or chunk <= 0:",
        ("A20", "B6", "B7", "B11", "C19", "D8"),
        (f"{GEOMETRY}::test_a_chunk_that_is_no_common_multiple_is_refused_with_one_that_works",),
    ),
    Mutation(
        "block-of-nothing",
        "a group's block may have no tokens",
        "Group.__post_init__",
        "if self.tokens_per_block <= 0:",
        "if self.tokens_per_block < 0:",
        ("B5",),
        (f"{GEOMETRY}::test_a_group_that_cannot_be_is_refused",),
    ),
    Mutation(
        "no-group-at-all",
        "an engine without a cacheable group is served",
        "Geometry.__post_init__",
        "0 < len(self.groups) <= GROUPS_MAX",
        "0 <= len(self.groups) <= GROUPS_MAX",
        ("A25",),
        (f"{GEOMETRY}::test_a_group_that_cannot_be_is_refused",),
    ),
    Mutation(
        "largest-block-for-all",
        "the derived chunk is the largest block, and no common multiple",
        "common_block_tokens",
        "return math.lcm",
        "return max",
        ("A3", "B1", "D8"),
        (f"{GEOMETRY}::test_a_derived_chunk_is_a_common_multiple_of_unlike_blocks",),
    ),
    Mutation(
        "window-too-small",
        "a window's oldest block is not needed",
        "Group.skipped_tokens",
        "self.window_tokens + 1",
        "self.window_tokens + self.tokens_per_block",
        ("B3", "D12"),
        (f"{COVERAGE}::test_needed_blocks_are_those_that_hold_a_token_that_is_read",),
    ),
    Mutation(
        "full-needs-half",
        "full attention does not need the first half of a prompt",
        "Group.skipped_tokens",
        "if kind is _FULL: return 0",
        "if kind is _FULL: return boundary // 2",
        ("A10", "A36"),
        (f"{COVERAGE}::test_needed_blocks_are_those_that_hold_a_token_that_is_read", PLAIN),
    ),
    Mutation(
        "state-not-needed",
        "a hit needs no recurrent state",
        "Group.skipped_tokens",
        "return max(0, boundary - 1)",
        "return boundary",
        ("B34", "D12"),
        (f"{COVERAGE}::test_needed_blocks_are_those_that_hold_a_token_that_is_read", RECURRENT),
    ),
    Mutation(
        "half-a-chunk",
        "a chunk counts as whole as soon as it has begun",
        "Geometry.whole_chunks",
        "return max(0, tokens) // self.chunk_tokens",
        "return -(-max(0, tokens) // self.chunk_tokens)",
        ("C31", "C32"),
        (f"{STORES}::test_only_whole_chunks_that_this_step_has_computed_are_stored",),
    ),
    # Which blocks a hit needs
    Mutation(
        "the-luckiest-group",
        "a hit is what the group with most of it has",
        "largest_hit",
        "below = min",
        "below = max",
        ("A26", "B3", "B13", "B35"),
        (
            f"{COVERAGE}::test_largest_hit_is_the_definition",
            f"{COVERAGE}::test_one_group_missing_everything_is_a_miss",
        ),
    ),
    Mutation(
        "lacks-the-wrong-chunk",
        "the explanation names the first chunk of the need and not the missing one",
        "lacking",
        "return [(group, missing) for group, missing in firsts if missing < chunks]",
        """
        return [
            (group, needed_chunks(geometry, group, chunks).start)
            for group, missing in firsts
            if missing < chunks
        ]
        """,
        ("B35",),
        (f"{COVERAGE}::test_what_a_larger_hit_lacks_is_named",),
    ),
    Mutation(
        "stores-what-nobody-reads",
        "an object holds every block of its chunk",
        "stored_blocks",
        "range(max(inside.start, needed.start) if needed else inside.stop, inside.stop)",
        "inside",
        ("B3",),
        (f"{COVERAGE}::test_stored_blocks_are_exactly_those_that_some_hit_reads",),
    ),
    # Plans of loads and stores
    Mutation(
        "writes-shared-blocks",
        "a load writes the blocks of the engine's own hit as well",
        "plan_load",
        "start = max(needed.start, local_tokens // group.tokens_per_block)",
        "start = needed.start",
        ("C33", "C34"),
        (f"{COPIES}::test_a_load_covers_what_the_hit_needs_and_the_local_hit_lacks",),
    ),
    Mutation(
        "skips-nothing",
        "a load that begins inside an object takes the object's first bytes",
        "plan_load",
        "skipped = max(0, start - (end - span.count))",
        "skipped = 0",
        ("B17", "C33"),
        (f"{COPIES}::test_a_load_covers_what_the_hit_needs_and_the_local_hit_lacks",),
    ),
    Mutation(
        "slots-uncounted",
        "a load is planned with fewer slots than it has objects",
        "plan_load",
        "if len(offsets) != slots * U64 or len(generations) != slots * U64:",
        "if not slots:",
        ("C33",),
        (f"{COPIES}::test_slots_must_match_what_the_hit_needs",),
    ),
    Mutation(
        "stores-the-null-block",
        "an object with a hole is stored",
        "WorkerRole.start_stores",
        "if NULL_BLOCK in op.blocks:",
        "if not op.blocks:",
        ("D12",),
        (f"{WORKER}::test_of_a_run_with_a_null_block_only_the_objects_without_it_are_stored",),
    ),
    Mutation(
        "what-is-let-go-of-is-planned",
        "a step takes slots for blocks that the engine let go of",
        "storable_spans",
        "if NULL_BLOCK not in (span.blocks[0], span.blocks[-1]):",
        "if span.blocks:",
        ("D12",),
        (
            f"{COPIES}::test_a_null_block_is_never_stored_and_never_loaded_into",
            f"{COPIES}::test_what_the_engine_let_go_of_is_not_even_planned",
        ),
    ),
    Mutation(
        "stores-it-again",
        "what the lookup found is stored once more",
        "storable_spans",
        "if mask.find(1, chunks.start) >= 0:",
        "if not chunks:",
        ("C20", "D3"),
        (
            f"{COPIES}::test_a_store_takes_all_that_is_whole_and_absent",
            f"{STORES}::test_what_a_lookup_found_is_not_stored_again",
        ),
    ),
    Mutation(
        "null-blocks-are-taken-apart",
        "a load's null blocks that are not at an end of its run are written into",
        "CopyRun.ops",
        "if NULL_BLOCK in self.span.blocks:",
        "if not self.span.blocks:",
        ("D12",),
        (f"{COPIES}::test_a_null_block_among_others_is_found_before_anything_is_copied",),
    ),
    Mutation(
        "a-plan-read-once",
        "a plan can be gone through a single time",
        "plan_load",
        "return tuple(runs)",
        "return iter(runs)  # type: ignore[return-value]",
        ("B16",),
        (f"{SCHEDULER}::test_what_was_loaded_is_not_stored_again_and_counted_by_its_plan",),
    ),
    Mutation(
        "skips-in-every-object",
        "what is skipped of a run's first object is skipped of all",
        "CopyRun.copies",
        "at, first = stop, 0",
        "at = stop",
        ("C35",),
        (f"{COPIES}::test_a_load_covers_what_the_hit_needs_and_the_local_hit_lacks",),
    ),
    # The states of a request and its lookup
    Mutation(
        "miss-keeps-lease",
        "a request that loads nothing keeps its lease",
        "request_states:TRANSITIONS",
        """
        (RequestState.PREFETCHING, RequestEvent.SETTLED):
            Transition(RequestState.READY, _RELEASE)
        """,
        "(RequestState.PREFETCHING, RequestEvent.SETTLED): Transition(RequestState.READY)",
        ("C24", "C25"),
        (
            f"{REQUEST_STATES}::test_a_lease_is_always_let_go",
            f"{SCHEDULER}::test_a_lease_that_nothing_is_loaded_under_is_let_go_at_once",
        ),
    ),
    Mutation(
        "abort-keeps-lease",
        "a request that is aborted before it has blocks keeps its lease",
        "request_states:TRANSITIONS",
        "(RequestState.PREFETCHING, RequestEvent.FINISHED): Transition(RequestState.DONE, _END)",
        """
        (RequestState.PREFETCHING, RequestEvent.FINISHED):
            Transition(RequestState.DONE, (RequestAction.FORGET,))
        """,
        ("D9",),
        (
            f"{REQUEST_STATES}::test_a_lease_is_always_let_go",
            f"{SCHEDULER}::test_a_lease_that_nothing_is_loaded_under_is_let_go_at_once",
        ),
    ),
    Mutation(
        "lease-ends-too-early",
        "the lease ends when the plan leaves, and not when the bytes were read",
        "request_states:TRANSITIONS",
        "(RequestState.WAITING_FOR_LOAD, RequestEvent.PLANNED): Transition(RequestState.LOADING)",
        """
        (RequestState.WAITING_FOR_LOAD, RequestEvent.PLANNED):
            Transition(RequestState.LOADING, _RELEASE)
        """,
        ("C25", "C26", "C28"),
        (f"{SCHEDULER}::test_a_lease_is_held_until_the_load_has_ended",),
    ),
    Mutation(
        "asked-for-when-it-is-their-turn",
        "what a plan has to say stays until a later hook",
        "SchedulerRole.planned",
        """
        self._flush(now)
        return plan
        """,
        "return plan",
        ("C18",),
        (f"{SCHEDULER}::test_the_lookup_of_a_waiting_request_leaves_with_the_plan",),
    ),
    Mutation(
        "pauses-are-the-daemons",
        "the time to answer begins before a lookup leaves",
        "Lookups.flushed",
        "tracked.lookup.deadline += now - tracked.lookup.sent_at",
        "",
        ("C18",),
        (f"{SCHEDULER}::test_the_daemon_is_not_blamed_for_the_engines_pause",),
    ),
    Mutation(
        "offers-it-again",
        "a request whose load failed is offered the same hit again",
        "request_states:TRANSITIONS",
        "(RequestState.LOADING, RequestEvent.FAILED): Transition(RequestState.BYPASS, _RELEASE)",
        "(RequestState.LOADING, RequestEvent.FAILED): Transition(RequestState.READY, _RELEASE)",
        ("B37", "B38", "D4"),
        (
            f"{REQUEST_STATES}::test_a_failed_request_is_never_offered_again",
            f"{SCHEDULER}::test_a_failed_load_is_never_offered_again_and_stored_anew",
        ),
    ),
    Mutation(
        "never-resumed",
        "a preempted request is not looked up again",
        "request_states:TRANSITIONS",
        "(RequestState.READY, RequestEvent.RESUMED): Transition(RequestState.PREFETCHING)",
        "(RequestState.READY, RequestEvent.RESUMED): Transition(RequestState.READY)",
        ("C17",),
        (f"{SCHEDULER}::test_a_resumed_request_is_looked_up_with_what_it_has_generated",),
    ),
    Mutation(
        "straight-to-loading",
        "a request counts as loading before the workers were told",
        "request_states:TRANSITIONS",
        """
        (RequestState.PREFETCHING, RequestEvent.ALLOCATED):
            Transition(RequestState.WAITING_FOR_LOAD)
        """,
        "(RequestState.PREFETCHING, RequestEvent.ALLOCATED): Transition(RequestState.LOADING)",
        ("C23", "C28", "C40"),
        (f"{SCHEDULER}::test_a_plan_is_handed_over_once_and_leaves_the_engines_own_alone",),
    ),
    Mutation(
        "any-event-does-something",
        "an event that the table does not name ends the wait",
        "advance",
        "return TRANSITIONS.get((state, event), Transition(state))",
        "return TRANSITIONS.get((state, event), Transition(RequestState.READY))",
        ("C23",),
        (f"{REQUEST_STATES}::test_an_event_that_the_table_does_not_name_changes_nothing",),
    ),
)
