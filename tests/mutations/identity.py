"""Faults in what vLLM's configuration, layers and weights say of the bytes."""

from tests.mutations.changes import body, never, swap, value, without
from tests.mutations.mutation import Mutation

ENGINE_WEIGHTS = "tests/unit/vllm/test_engine_weights.py"
FIELDS = "tests/engine/test_fields.py"
IDENTITY = "tests/engine/test_identity.py"
LOADED_ADAPTERS = "tests/unit/vllm/test_loaded_adapters.py"
WEIGHTS = "tests/unit/connector/test_weights.py"
WEIGHTS_DIGEST = "tests/unit/vllm/test_weights_digest.py"

FAULTS: tuple[Mutation, ...] = (
    Mutation(
        "any-vllm",
        "every version of vLLM is served",
        "_version",
        body("return original(max(PROVEN) + '.0')"),
        "A38",
        ("tests/engine/test_doctor.py::test_a_vllm_that_nobody_ran_it_on_is_refused",),
    ),
    Mutation(
        "prefix-lm",
        "a model whose prefixes depend on what follows them is served",
        "_reads_later_tokens",
        body("return False"),
        "A38",
        ("tests/unit/vllm/test_reasons.py::test_a_layer_that_reads_later_tokens_is_refused",),
    ),
    Mutation(
        "scratch-is-a-group",
        "groups that vLLM cannot cache are served",
        "build_geometry",
        swap("config.prefix_cacheable_group_ids", "range(len(config.kv_cache_groups))"),
        "A9 A26 D7",
        ("tests.simulation --seeds 26:27 --layout glm53_small",),
    ),
    Mutation(
        "state-without-boundaries",
        "recurrent groups are served whatever the engine keeps of them",
        "group_geometry",
        never("mamba_cache_mode"),
        "B4",
        ("tests/engine/test_layout.py::test_mamba_modes_that_keep_no_boundary_state",),
    ),
    Mutation(
        "seed-unseen",
        "engines whose block hashes have other seeds share",
        "hash_facts",
        body("return [algorithm]"),
        "B18 D15",
        (f"{IDENTITY}::test_engines_that_hash_differently_do_not_share",),
    ),
    Mutation(
        "weights-unseen",
        "weights are no part of the identity",
        "weights_fact",
        body("return []"),
        "D16",
        (f"{IDENTITY}::test_every_single_change_is_a_miss_and_no_change_is_a_hit[some]",),
    ),
    Mutation(
        "forgets-the-draft-model",
        "two configurations of a drafter are one identity",
        "identity_facts",
        body("return {**original(**arguments), 'draft_config': None}"),
        "D16",
        (f"{FIELDS}::test_a_drafters_configuration_is_a_fact",),
    ),
    Mutation(
        "field-unseen",
        "a setting that changes KV is no part of the identity",
        "_settings",
        body("""
            facts = original(config)
            facts.pop("lora_dtype", None)
            return facts
        """),
        "D16",
        (f"{FIELDS}::test_every_fact_changes_the_identity_and_nothing_else_does",),
    ),
    Mutation(
        "variable-unseen",
        "an environment variable that chooses arithmetic is no part of the identity",
        "_environment",
        body("return {}"),
        "D16",
        (f"{FIELDS}::test_every_variable_that_is_a_fact_changes_the_identity_and_no_other",),
    ),
    Mutation(
        "code-unseen",
        "code that comes with the weights may change under one identity",
        "_model_files",
        body("return {}"),
        "D16",
        (f"{FIELDS}::test_code_and_processors_beside_the_weights_are_facts",),
    ),
    Mutation(
        "weights-without-buffers",
        "the digest of the weights skips buffers",
        "_own_tensors",
        swap("module._buffers", "{}"),
        "D16",
        (f"{WEIGHTS_DIGEST}::test_each_change_is_another_digest",),
    ),
    Mutation(
        "most-of-a-model-unread",
        "nobody compares what was read with what the model occupies",
        "READ_SHARE_MIN",
        value("0.0"),
        "D16",
        (f"{WEIGHTS_DIGEST}::test_most_of_the_memory_that_the_model_occupies_was_read",),
    ),
    Mutation(
        "weights-read-once",
        "the weights are not read again after a reset",
        "EngineWeights.begin_step",
        without("self.question"),
        "D16",
        (f"{ENGINE_WEIGHTS}::test_each_question_is_answered_by_a_new_reading",),
    ),
    Mutation(
        "read-in-its-sleep",
        "weights are read while the engine sleeps, and their memory is gone",
        "EngineWeights.look_at_step",
        never("_asleep"),
        "D16",
        (f"{ENGINE_WEIGHTS}::test_nothing_is_read_while_the_engine_sleeps",),
    ),
    Mutation(
        "resets-unseen",
        "a reset of which vLLM tells no connector asks nobody for their weights",
        "HybridKVConnector.bind_kv_cache_manager",
        without("_on_reset"),
        "D16",
        (
            "tests/unit/connector/test_scheduler.py::"
            "test_a_reset_that_says_nothing_to_connectors_is_seen",
        ),
    ),
    Mutation(
        "plans-of-other-weights",
        "a worker carries out what was planned for other weights",
        "WorkerRole._has_weights_of",
        body("return True"),
        "D16",
        (f"{WEIGHTS}::test_a_worker_does_nothing_for_other_weights",),
    ),
    Mutation(
        "loads-over-a-change",
        "a load that began with the old weights ends well with the new ones",
        "WorkerRole.take_finished",
        never("era"),
        "D16",
        (f"{WEIGHTS}::test_a_load_that_began_before_the_weights_changed_fails",),
    ),
    Mutation(
        "loads-for-any-adapter",
        "a worker loads what another adapter computed than the one that the engine has",
        "WorkerRole._has_adapter",
        body("return True"),
        "D16",
        (
            "tests/unit/connector/test_worker.py::"
            "test_a_load_of_an_adapter_begins_only_while_the_engine_has_it",
        ),
    ),
    Mutation(
        "adapters-by-name",
        "an adapter's weights are no part of its identity",
        "digest_adapter",
        body("return bytes(HASH_BYTES)"),
        "D16",
        (f"{LOADED_ADAPTERS}::test_each_change_is_another_digest",),
    ),
    Mutation(
        "nodes-share-an-identity",
        "a daemon that serves another node than before gives it the other's parts",
        "node_identity",
        body("return namespace"),
        "C5",
        (
            "tests/unit/connector/test_nodes.py::test_every_node_has_the_session_with_its_own_ranks_and_identity",
        ),
    ),
    Mutation(
        "any-answer-is-right",
        "the proof compares no log-probability",
        "answer_deviation",
        body("return 0.0"),
        "A34",
        ("tests/unit/lab/test_deviation.py::test_deviation",),
    ),
)
