"""Faults in what names the KV of a LoRA adapter."""

from tests.mutations.files import HOOKS, STORES
from tests.mutations.mutation import Mutation

NAMES = "tests/unit/vllm/test_adapters.py"
LOADED = "tests/unit/vllm/test_loaded_adapters.py"
ROLE = "tests/unit/connector/test_adapters.py"
WORKER = "tests/unit/connector/test_worker.py"
ENGINES = "tests/engine/test_lora.py::test_other_weights_under_the_same_name"
ANY_ORDER = f"{NAMES}::test_no_order_of_events_names_blocks_after_other_weights"

FAULTS: tuple[Mutation, ...] = (
    Mutation(
        "adapter-of-the-plan",
        "what a step computed is committed though it had another adapter than its plan says",
        "StorePlanner.on_report",
        "adapter and not adapter.has_computed(storing.adapter_hash, storing.step)",
        "adapter and adapter.weights is None",
        ("D16",),
        (
            f"{STORES}::test_what_was_planned_with_another_adapter_than_the_present_one"
            "_is_not_committed",
        ),
    ),
    Mutation(
        "adapters-over-old-blocks",
        "other weights go on where the engine's own blocks are of the old ones",
        "AdapterBlocks.note_blocks",
        'self.computed_by in (b"", weights.content_hash)',
        "True",
        ("D16",),
        (
            f"{NAMES}::test_other_weights_over_blocks_of_the_old_ones_are_refused_until_the_cache"
            "_is_empty",
            ANY_ORDER,
        ),
    ),
    Mutation(
        "loads-unseen-by-adapters",
        "what was loaded into the engine's blocks may be followed by another adapter's",
        "LoadPlanner.on_load_end",
        "tracked.adapter.blocks.note_blocks(load.plan.adapter)",
        "pass",
        ("D16",),
        (f"{ROLE}::test_what_was_loaded_is_of_the_adapters_old_weights",),
    ),
    Mutation(
        "adapters-of-lost-reports",
        "a step whose report is lost is taken for one with the adapter of the next report",
        "Adapters.on_report",
        "is_reported=step.number == number",
        "is_reported=True",
        ("D16",),
        (f"{NAMES}::test_a_step_whose_adapter_nobody_knows_computed_with_any", ANY_ORDER),
    ),
    Mutation(
        "adapters-of-steps-before-the-reset",
        "a step whose blocks are gone names those that come after it",
        "Adapters.on_cache_emptied",
        "self.unreported_steps.clear()",
        "pass",
        ("D16",),
        (f"{NAMES}::test_a_step_from_before_the_reset_tells_nothing_of_what_is_computed_after_it",),
    ),
    Mutation(
        "loads-for-any-adapter",
        "a worker loads what another adapter computed than the one that the engine has",
        "WorkerRole._has_adapter",
        "adapters.get(adapter.number) == adapter.digests[rank]",
        "adapter.number in adapters",
        ("D16",),
        (f"{WORKER}::test_a_load_of_an_adapter_begins_only_while_the_engine_has_it",),
    ),
    Mutation(
        "hits-of-replaced-adapters",
        "a hit is offered though other weights are loaded since its lookup",
        "Lookups.tokens_to_load",
        "tracked.adapter.weights != tracked.lookup.adapter",
        "tracked.adapter.weights is None",
        ("D16",),
        (f"{ROLE}::test_a_hit_of_weights_that_are_replaced_is_not_offered",),
    ),
    Mutation(
        "hits-before-a-reload",
        "a request that has the engine load its adapter anew is loaded what the old one computed",
        "Lookups._send",
        "adapter.is_reloaded or not tracked.has_hashes()",
        "not tracked.has_hashes()",
        ("D16",),
        (f"{ROLE}::test_a_request_that_loads_its_adapter_anew_is_not_looked_up",),
    ),
    Mutation(
        "adapters-by-number",
        "an adapter that is loaded in place of another is taken for it",
        "LoadedAdapters.digests_now",
        "known is None or known.model() is not model",
        "known is None",
        ("D16",),
        (f"{LOADED}::test_each_adapter_is_read_once_and_again_when_it_is_another_object",),
    ),
    Mutation(
        "adapters-by-name",
        "an adapter's weights are no part of its identity",
        "digest_adapter",
        "return whole.digest()",
        "return bytes(HASH_BYTES)",
        ("D16",),
        (f"{LOADED}::test_each_change_is_another_digest", ENGINES),
    ),
    Mutation(
        "adapters-without-packed-tensors",
        "lists of tensors, as of packed layers, are no part of an adapter",
        "_leaves",
        "children = {str(place): child for place, child in enumerate(value)}",
        "children = {}",
        ("D16",),
        (f"{LOADED}::test_each_change_is_another_digest",),
    ),
    Mutation(
        "adapters-unseen-while-off",
        "what runs with an adapter while a role is switched off is not followed",
        "RoleFallback.on_report",
        "life.adapters.on_report(report.number, report.adapters)",
        "pass",
        ("D16",),
        (f"{HOOKS}::test_adapters_are_followed_while_a_role_is_off",),
    ),
)
