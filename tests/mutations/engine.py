"""Faults in the rules of hits and in the engine's side."""

from tests.mutations.changes import always, body, never, swap, value, without
from tests.mutations.mutation import Mutation

COPIES = "tests/unit/core/test_copies.py"
COVERAGE = "tests/unit/core/test_coverage.py"
GEOMETRY = "tests/unit/core/test_geometry.py"
KEYS = "tests/unit/core/test_keys_and_breaker.py"
SETTINGS = "tests/unit/core/test_settings.py"
AUDITS = "tests/unit/connector/test_audits.py"
DRAFTED = "tests/unit/connector/test_drafted.py"
HOOKS = "tests/unit/connector/test_hooks.py"
REQUEST_STATES = "tests/unit/connector/test_request_states.py"
SCHEDULER = "tests/unit/connector/test_scheduler.py"
STORES = "tests/unit/connector/test_stores.py"
FULL = "tests.simulation --seeds 0:5 --layout full"
GEMMA = "tests.simulation --seeds 0:5 --layout gemma3_small"
RECURRENT = "tests.simulation --seeds 0:5 --layout qwen3next_1056_small"

FAULTS: tuple[Mutation, ...] = (
    # Geometry and coverage
    Mutation(
        "announced-of-another-identity",
        "a router hears of chunks that other weights had",
        "KVEventPublisher.on_announced",
        never("_number"),
        "C13",
        (
            "tests/unit/connector/test_kv_events.py::"
            "test_after_a_reset_or_too_many_removals_all_is_announced_anew",
        ),
    ),
    Mutation(
        "naive-ratio",
        "blocks per chunk by the smallest block over the group's, which is 0 for the larger ones",
        "Geometry.blocks_per_chunk",
        body("""
            smallest = min(each.tokens_per_block for each in self.groups)
            return smallest // group.tokens_per_block * (self.chunk_tokens // smallest)
        """),
        "A2 A3 A18 A19 A20 A21 A22 A23 A31",
        (f"{GEOMETRY}::test_deepseek_v4_blocks_of_4096_tokens",),
    ),
    Mutation(
        "chunk-unchecked",
        "a chunk need not be a multiple of anything",
        "Geometry.__post_init__",
        body("pass"),
        "A20 A25 B6 B7 B11 C19 D8",
        (
            f"{GEOMETRY}::test_a_chunk_that_is_no_common_multiple_is_refused_with_one_that_works",
            f"{GEOMETRY}::test_a_group_that_cannot_be_is_refused",
        ),
    ),
    Mutation(
        "largest-block-for-all",
        "the derived chunk is the largest block, and no common multiple",
        "common_block_tokens",
        swap("math.lcm", "max"),
        "A3 B1 D8",
        (f"{GEOMETRY}::test_a_derived_chunk_is_a_common_multiple_of_unlike_blocks",),
    ),
    Mutation(
        "window-too-small",
        "a window's oldest block is not needed",
        "Group.skipped_tokens",
        body("""
            skipped = original(self, boundary)
            return min(boundary, skipped + self.tokens_per_block * (self.window_tokens > 0))
        """),
        "B3 D12",
        (f"{COVERAGE}::test_needed_blocks_are_those_that_hold_a_token_that_is_read", GEMMA),
    ),
    Mutation(
        "full-needs-half",
        "full attention does not need the first half of a prompt",
        "Group.skipped_tokens",
        body("return boundary // 2 if self.kind is _FULL else original(self, boundary)"),
        "A10 A36",
        (f"{COVERAGE}::test_needed_blocks_are_those_that_hold_a_token_that_is_read", FULL),
    ),
    Mutation(
        "state-not-needed",
        "a hit needs no recurrent state",
        "Group.skipped_tokens",
        body("""
            is_state = self.kind not in (_FULL, _SLIDING, _CHUNKED_LOCAL)
            return boundary if is_state else original(self, boundary)
        """),
        "B34 D12",
        (f"{COVERAGE}::test_needed_blocks_are_those_that_hold_a_token_that_is_read", RECURRENT),
    ),
    Mutation(
        "half-a-chunk",
        "a chunk counts as whole as soon as it has begun",
        "Geometry.whole_chunks",
        body("return -(-max(0, tokens) // self.chunk_tokens)"),
        "C31 C32 D1 D2",
        (f"{STORES}::test_only_whole_chunks_that_this_step_has_computed_are_stored",),
    ),
    Mutation(
        "the-luckiest-group",
        "a hit is what the group with most of it has",
        "largest_hit",
        body("""
            every = zip(geometry.groups, masks, strict=True)
            return max(original(geometry, [mask] * len(masks), chunks_max) for _, mask in every)
        """),
        "A26 A27 B3 B13 B35",
        (f"{COVERAGE}::test_one_group_missing_everything_is_a_miss",),
    ),
    Mutation(
        "writes-shared-blocks",
        "a load writes the blocks of the engine's own hit as well",
        "plan_load",
        body("return original(**{**arguments, 'local_tokens': 0})"),
        "B17 C33 C34",
        (f"{COPIES}::test_a_load_covers_what_the_hit_needs_and_the_local_hit_lacks",),
    ),
    Mutation(
        "stores-it-again",
        "what the lookup found is stored once more",
        "storable_spans",
        body("return original(**{**arguments, 'mask': b''})"),
        "C20 D3",
        (f"{COPIES}::test_a_store_takes_all_that_is_whole_and_absent",),
    ),
    Mutation(
        "too-long-for-the-model",
        "a chunk longer than any prompt is not refused",
        "length_finding",
        body("return original(geometry, 1 << 40)"),
        "B8",
        ("tests/unit/core/test_capacity.py::test_the_length_that_is_said_to_work_works",),
    ),
    Mutation(
        "larger-than-ram-planned-whole",
        "a hit is planned as if RAM could hold any",
        "HitSizes.largest_fit",
        body("return chunks"),
        "D18",
        ("tests/unit/core/test_hit_sizes.py::test_no_larger_hit_has_room",),
    ),
    # Settings and start-up
    Mutation(
        "any-server-goes",
        "a server need not be a socket",
        "_server",
        body("return str(value)"),
        "C1 D21",
        (f"{SETTINGS}::test_bad_settings",),
    ),
    Mutation(
        "anybodys-directory",
        "the socket is in whatever directory the environment names",
        "runtime_directory",
        always("st_uid"),
        "D21",
        ("tests/unit/client/test_runtime_directory.py::test_only_a_directory_of_ones_own_is_used",),
    ),
    Mutation(
        "order-of-facts",
        "an identity depends on the order of its facts",
        "fingerprint",
        swap("True", "False"),
        "B18 D16",
        (f"{KEYS}::test_every_fact_counts_and_their_order_does_not",),
    ),
    Mutation(
        "never-gives-up",
        "the breaker never opens",
        "Breaker.is_open",
        body("return False"),
        "B40",
        (f"{KEYS}::test_the_breaker_opens_probes_and_closes",),
    ),
    Mutation(
        "refusal-is-a-shrug",
        "a configuration that cannot be served is served",
        "raise_first",
        body("return [*findings]"),
        "B46",
        ("tests/unit/core/test_findings.py::test_the_first_failure_is_raised_and_warnings_pass",),
    ),
    # Hooks
    Mutation(
        "hooks-raise",
        "a fault in a hook reaches the engine",
        "HookGuard.run_hook",
        body("return work()"),
        "B35 B38",
        (f"{HOOKS}::test_no_hit_is_never_asynchronous_and_no_hook_raises",),
    ),
    Mutation(
        "off-for-good",
        "a role that was switched off stays off",
        "HookGuard.resume",
        body("return"),
        "C15",
        (f"{HOOKS}::test_a_scheduler_role_that_is_switched_off_begins_anew",),
    ),
    Mutation(
        "off-role-misses-a-reset",
        "weights that change while a role is off have the old identity afterwards",
        "RoleFallback.on_reset",
        body("return False"),
        "C15",
        (f"{HOOKS}::test_weights_that_change_while_a_role_is_off_are_those_of_the_next",),
    ),
    Mutation(
        "waits-for-nobody",
        "after a fault in planning nobody tells the engine that its load failed",
        "RoleFallback.on_allocated",
        body("pass"),
        "B38 C11",
        (f"{HOOKS}::test_what_the_engine_waits_for_fails_where_planning_does",),
    ),
    Mutation(
        "failure-passed-off-as-good",
        "a failed load is reported as a good one",
        "HybridKVConnector.get_transfer_results",
        body("""
            results = original(self, finished_req_ids)
            done = results.finished_recving
            return base.KVConnectorTransferResults(finished_recving=done, failed_recving=set())
        """),
        "C11 D4",
        (f"{HOOKS}::test_what_the_engine_waits_for_fails_where_planning_does",),
    ),
    Mutation(
        "no-hit-but-asynchronous",
        "(0, True) is answered",
        "HybridKVConnector.get_num_new_matched_tokens",
        body("""
            tokens, _ = original(self, request, num_computed_tokens)
            return tokens, True
        """),
        "B37 C15 C18",
        (f"{HOOKS}::test_no_hit_is_never_asynchronous_and_no_hook_raises",),
    ),
    Mutation(
        "finish-forgets-nothing",
        "a finished request is tracked for ever",
        "HybridKVConnector.request_finished_all_groups",
        body("return False, None"),
        "A5 A6 A8 B15 C37",
        (f"{HOOKS}::test_a_finished_request_is_forgotten_and_holds_no_block",),
    ),
    Mutation(
        "tables-of-the-past",
        "a request's block tables are read once",
        "HybridKVConnector.tables_of",
        body("""
            kept = vars(self).setdefault("_kept", {})
            return kept.setdefault(request_id, [[*table] for table in original(self, request_id)])
        """),
        "A12 C30 D11",
        (f"{HOOKS}::test_tables_are_those_of_the_moment",),
    ),
    Mutation(
        "roles-swapped",
        "each role makes the other's side",
        "HybridKVConnector.__init__",
        swap("base.KVConnectorRole.SCHEDULER", "base.KVConnectorRole.WORKER"),
        "C2",
        (FULL,),
    ),
    Mutation(
        "nothing-is-saved",
        "what a step completes is not copied out",
        "HybridKVConnector.wait_for_save",
        body("pass"),
        "C8",
        (FULL,),
    ),
    Mutation(
        "nothing-is-loaded",
        "what a plan names is not copied in",
        "HybridKVConnector.start_load_kv",
        body("pass"),
        "C7",
        (FULL,),
    ),
    # Requests, hits and stores
    Mutation(
        "miss-keeps-lease",
        "a request that loads nothing, or is aborted, keeps its lease",
        "requests:STATES_WITHOUT_LEASE",
        value("()"),
        "C24 C25 D9",
        (f"{REQUEST_STATES}::test_a_lease_is_always_let_go",),
    ),
    Mutation(
        "lease-ends-too-early",
        "the lease ends when the plan leaves, and not when the bytes were read",
        "requests:STATES_WITHOUT_LEASE",
        value("(*original, RequestState.LOADING)"),
        "C25 C26 C28",
        (f"{SCHEDULER}::test_a_lease_is_held_until_the_load_has_ended",),
    ),
    Mutation(
        "offers-it-again",
        "a request whose load failed is offered the same hit again",
        "requests:TRANSITIONS",
        value("{**original, (RequestState.LOADING, RequestEvent.FAILED): RequestState.READY}"),
        "B37 B38 C23 D4",
        (f"{REQUEST_STATES}::test_a_failed_request_is_never_offered_again",),
    ),
    Mutation(
        "never-resumed",
        "a preempted request is not looked up again",
        "requests:TRANSITIONS",
        value("{**original, (RequestState.READY, RequestEvent.RESUMED): RequestState.READY}"),
        "C17 C39",
        (f"{SCHEDULER}::test_a_resumed_request_is_looked_up_with_what_it_has_generated",),
    ),
    Mutation(
        "counts-the-local-hit-too",
        "the engine's own hit is counted as external",
        "Lookups.tokens_to_load",
        body("""
            tokens = original(self, tracked, local_tokens, now)
            return tokens + local_tokens if tokens else tokens
        """),
        "A35 C16 C21 C40",
        (f"{SCHEDULER}::test_a_hit_is_what_is_beyond_the_engines_own",),
    ),
    Mutation(
        "offers-while-weights-are-read",
        "a hit is offered while nobody knows which weights the engine has",
        "Lookups.tokens_to_load",
        never("is_current"),
        "D16",
        (f"{SCHEDULER}::test_a_reset_that_says_nothing_to_connectors_is_seen",),
    ),
    Mutation(
        "waits-without-end",
        "a lookup has no deadline",
        "Lookups._wait",
        body("return None"),
        "B39 D6",
        (f"{SCHEDULER}::test_the_deadline_is_the_lookups_own",),
    ),
    Mutation(
        "waits-longer-than-computing",
        "the time to wait does not depend on the speed of prefill",
        "PrefillSpeed.prefill_seconds",
        body("return float('inf')"),
        "D18",
        (f"{SCHEDULER}::test_patience_is_what_computing_takes_and_has_a_cap",),
    ),
    Mutation(
        "nobody-says-release",
        "the daemon is never told that a lease has ended",
        "RequestRegistry._take_event",
        never("STATES_WITHOUT_LEASE"),
        "C18 C25 D9",
        (f"{SCHEDULER}::test_a_lease_that_nothing_is_loaded_under_is_let_go_at_once",),
    ),
    Mutation(
        "unknown-waits-for-ever",
        "nobody fails the load of a request that is not tracked",
        "SchedulerRole.on_allocated",
        without("fail_load"),
        "C38",
        (f"{SCHEDULER}::test_a_request_that_nobody_knows_is_a_miss",),
    ),
    Mutation(
        "a-hanging-load-is-nobodys",
        "a load that does not end is not seen",
        "LoadPlanner.count_overdue",
        body("return 0"),
        "B39 D6",
        (f"{SCHEDULER}::test_a_load_that_does_not_end_is_named_once_and_shown",),
    ),
    Mutation(
        "table-of-any-length",
        "a group whose table is short counts as if it were long",
        "StorePlanner._attention",
        body("""
            long = [[*table, *[1] * 999] for table in tables]
            return original(**{**arguments, "tables": long})
        """),
        "A11 A24 A26",
        (f"{STORES}::test_a_group_without_blocks_stores_less_and_never_something_else",),
    ),
    Mutation(
        "state-of-the-null-block",
        "the null block's bytes are stored as a state",
        "StorePlanner._state",
        never("NULL_BLOCK"),
        "B34 D12",
        (f"{STORES}::test_a_state_is_taken_where_it_stands_and_nowhere_else",),
    ),
    Mutation(
        "commits-while-weights-are-read",
        "what is stored after a reset is committed before the weights are known",
        "StorePlanner.on_report",
        never("is_proven"),
        "D16",
        (
            f"{SCHEDULER}::"
            "test_what_is_stored_after_a_reset_is_committed_once_the_weights_are_known",
        ),
    ),
    Mutation(
        "adapter-of-the-plan",
        "what a step computed is committed though it had another adapter than its plan says",
        "StorePlanner.on_report",
        never("has_computed"),
        "D16",
        (
            f"{STORES}::"
            "test_what_was_planned_with_another_adapter_than_the_present_one_is_not_committed",
        ),
    ),
    Mutation(
        "forgets-undrafted-steps",
        "a step in which vLLM ran no drafter counts as any other",
        "DraftedBlocks._after_step",
        body("return original(**{**arguments, 'is_proven': True})"),
        "C31",
        (f"{DRAFTED}::test_a_step_without_the_drafter_leaves_gaps_in_all_of_its_requests",),
    ),
    Mutation(
        "plain-names-for-drafters",
        "a chunk's name says nothing of the token that the drafter's KV depends on",
        "TrackedRequest.chunk_hashes",
        without("lookahead_hashes"),
        "C31 D16",
        ("tests.simulation --seeds 100:104 --layout eagle_full",),
    ),
    Mutation(
        "tail-without-its-prefix",
        "a tail is hit although attention before it is gone",
        "longest_tail",
        always("is_tail_hit"),
        "B2 B17 B35",
        ("tests/unit/daemon/test_tails.py::test_the_longest_tail_that_is_whole_is_hit",),
    ),
    # Audits and events
    Mutation(
        "commits-before-the-verdict",
        "what the engine computed is committed while it is compared",
        "Audits.must_wait",
        body("return False"),
        "D16",
        (f"{AUDITS}::test_what_differs_is_dropped_and_its_identity_is_used_no_more",),
    ),
    Mutation(
        "a-difference-has-no-end",
        "an engine that computes other bytes looks up and loads as before",
        "AuditBudget.on_outcome",
        never("DIFFERED"),
        "D16",
        (f"{AUDITS}::test_what_differs_is_dropped_and_its_identity_is_used_no_more",),
    ),
    Mutation(
        "announced-for-ever",
        "a chunk that lost an object is still announced",
        "AnnouncedChunks.lose",
        body("return []"),
        "C13",
        (
            "tests/unit/connector/test_announced.py::"
            "test_what_is_shown_is_of_use_and_what_is_of_use_is_shown",
        ),
    ),
)
