"""Faults in the connector's hooks."""

from tests.mutations.files import GEMMA, HOOKS, PLAIN
from tests.mutations.mutation import Mutation

FAULTS: tuple[Mutation, ...] = (
    # The engine's hooks
    Mutation(
        "one-group-only",
        "the connector does not say that it serves several groups",
        "HybridKVConnector",
        "class HybridKVConnector(base.KVConnectorBase_V1, base.SupportsHMA):",
        "class HybridKVConnector(base.KVConnectorBase_V1):",
        ("A1", "D20"),
        (f"{HOOKS}::test_it_serves_engines_with_several_groups", GEMMA),
    ),
    Mutation(
        "finish-forgets-nothing",
        "a finished request is tracked for ever",
        "HybridKVConnector.request_finished_all_groups",
        "lambda role: role.finished(request.request_id)",
        "lambda role: None",
        ("A5", "C37"),
        (f"{HOOKS}::test_a_finished_request_is_forgotten_and_holds_no_block",),
    ),
    Mutation(
        "finish-needs-blocks",
        "only a request that has blocks is forgotten",
        "HybridKVConnector.request_finished_all_groups",
        'self._run("request_finished", lambda role: role.finished(request.request_id), None)',
        """
        if any(block_ids):
            self._run("request_finished", lambda role: role.finished(request.request_id), None)
        """,
        ("A6",),
        (f"{HOOKS}::test_a_finished_request_is_forgotten_and_holds_no_block",),
    ),
    Mutation(
        "plain-finish-is-dead",
        "the hook for engines with one group does nothing",
        "HybridKVConnector.request_finished",
        "return self.request_finished_all_groups(request, (block_ids,))",
        "return False, None",
        ("A8",),
        (f"{HOOKS}::test_a_finished_request_is_forgotten_and_holds_no_block",),
    ),
    Mutation(
        "holds-blocks-at-the-end",
        "every finished request keeps its blocks until somebody reports it",
        "HybridKVConnector.request_finished_all_groups",
        "return False, None",
        "return True, None",
        ("C37", "D10"),
        (f"{HOOKS}::test_a_finished_request_is_forgotten_and_holds_no_block",),
    ),
    Mutation(
        "no-hit-but-asynchronous",
        "(0, True) is answered",
        "HybridKVConnector.get_num_new_matched_tokens",
        "return tokens, bool(tokens)",
        "return tokens, True",
        ("B37", "C15", "C18"),
        (f"{HOOKS}::test_no_hit_is_never_asynchronous_and_no_hook_raises",),
    ),
    Mutation(
        "takes-any-plan",
        "another connector's metadata is taken for a plan",
        "HybridKVConnector.start_load_kv",
        "if worker is not None and isinstance(plan, StepPlan):",
        "if worker is not None:",
        ("B41",),
        (f"{HOOKS}::test_a_plan_that_is_not_ours_is_left_alone",),
    ),
    Mutation(
        "shutdown-of-both-roles",
        "a role shuts down the other one, which it does not have",
        "HybridKVConnector.shutdown",
        "if self._worker is not None: self._worker.close()",
        "self._worker.close()",
        ("C12",),
        (f"{HOOKS}::test_a_role_ends_alone_and_twice",),
    ),
    Mutation(
        "roles-swapped",
        "each role makes the other's side",
        "HybridKVConnector.__init__",
        "if role == base.KVConnectorRole.SCHEDULER:",
        "if role != base.KVConnectorRole.SCHEDULER:",
        ("C2",),
        (PLAIN,),
    ),
    Mutation(
        "tensors-not-taken",
        "the engine's tensors are not registered",
        "HybridKVConnector.register_kv_caches",
        "self._worker.register(kv_caches)",
        "self._worker.layout = None",
        ("C6",),
        (PLAIN,),
    ),
    Mutation(
        "layer-hooks-raise",
        "waiting for a layer is an error",
        "HybridKVConnector.wait_for_layer_load",
        "",
        "raise NotImplementedError",
        ("C9",),
        (f"{HOOKS}::test_hooks_of_single_layers_do_nothing",),
    ),
    Mutation(
        "demands-a-layout",
        "the connector demands one layout of the cache",
        "HybridKVConnector",
        "",
        """
        @classmethod
        def get_required_kvcache_layout(cls, vllm_config: Any) -> str:
            return "HND"
        """,
        ("C14",),
        (f"{HOOKS}::test_it_serves_engines_with_several_groups",),
    ),
    Mutation(
        "preemption-by-plan-only",
        "handle_preemptions takes one of its two signatures only",
        "HybridKVConnector.handle_preemptions",
        "",
        "assert isinstance(kv_connector_metadata, StepPlan)",
        ("D14",),
        (f"{HOOKS}::test_hooks_of_single_layers_do_nothing",),
    ),
    Mutation(
        "failure-passed-off-as-good",
        "a failed load is reported as a good one",
        "HybridKVConnector.get_transfer_results",
        "failed_recving=failed",
        "failed_recving=set()",
        ("C11", "D4"),
        (f"{HOOKS}::test_what_the_engine_waits_for_fails_where_planning_does",),
    ),
    Mutation(
        "waits-for-nobody",
        "after a fault in planning nobody tells the engine that its load failed",
        "HybridKVConnector.update_state_after_alloc",
        "lambda role: role.must_fail(request.request_id, num_external_tokens)",
        "lambda role: None",
        ("B38",),
        (f"{HOOKS}::test_what_the_engine_waits_for_fails_where_planning_does",),
    ),
    Mutation(
        "nothing-is-saved",
        "what a step completes is not copied out",
        "HybridKVConnector.wait_for_save",
        "isinstance(plan, StepPlan) and plan.stores",
        "isinstance(plan, StepPlan) and not plan.stores",
        ("C8",),
        (PLAIN,),
    ),
    Mutation(
        "tables-of-the-past",
        "a request's block tables are read once",
        "HybridKVConnector._tables",
        "return block_tables(self._blocks_of(request_id))",
        """
        kept: dict[str, Any] = vars(self).setdefault("_kept", {})
        tables = block_tables(self._blocks_of(request_id))
        return kept.setdefault(request_id, [[*table] for table in tables])
        """,
        ("A12", "C30", "D11"),
        (f"{HOOKS}::test_tables_are_those_of_the_moment",),
    ),
    Mutation(
        "hooks-raise",
        "a fault in a hook reaches the engine",
        "Supervisor.run",
        "except Exception:",
        "except ZeroDivisionError:",
        ("B35", "B38"),
        (f"{HOOKS}::test_no_hit_is_never_asynchronous_and_no_hook_raises",),
    ),
)
