"""Faults in the digest of a model's weights where kernels keep them in places of their own."""

from tests.mutations.files import CHECKPOINTS, IN_MEMORY
from tests.mutations.mutation import Mutation

BYTES = f"{CHECKPOINTS}::test_each_byte_of_a_checkpoint_is_in_its_digest"

FAULTS: tuple[Mutation, ...] = (
    Mutation(
        "weights-elsewhere-unread",
        "weights are not looked for where kernels keep them",
        "_content",
        "is_whole = _search(name, module, found)",
        "pass",
        ("D16",),
        (f"{IN_MEMORY}::test_a_weight_is_found_where_a_kernel_keeps_it", BYTES),
    ),
    Mutation(
        "missing-weights-unnamed",
        "a module without its weights is like any other one",
        "_content",
        "is_unread = not (is_whole and found.suffices(sizes))",
        "is_unread = False",
        ("D16",),
        (
            f"{IN_MEMORY}::test_a_weight_that_nobody_can_read_is_no_other_engines",
            f"{IN_MEMORY}::test_each_of_the_experts_matrices_must_be_there",
            f"{CHECKPOINTS}::test_experts_without_their_weights_are_named",
        ),
    ),
    Mutation(
        "empty-is-missing",
        "an empty parameter is taken for weights that nobody can read",
        "_content",
        "is_unread = not (is_whole and found.suffices(sizes))",
        "is_unread = not found.suffices(sizes) or emptied is not None",
        ("D16",),
        (f"{IN_MEMORY}::test_an_empty_parameter_by_itself_is_nothing", BYTES),
    ),
    Mutation(
        "unread-is-new-each-time",
        "unread weights are others at each reading",
        "PackedWeights.unread_content",
        "self._unread_token + name.encode()",
        "secrets.token_bytes(DIGEST_BYTES)",
        ("D16",),
        (f"{IN_MEMORY}::test_a_weight_that_nobody_can_read_is_no_other_engines",),
    ),
    Mutation(
        "unread-never-changes",
        "an update leaves unread weights what they were",
        "PackedWeights.renew",
        "self._unread_token = secrets.token_bytes(DIGEST_BYTES)",
        "pass",
        ("D16",),
        (f"{IN_MEMORY}::test_a_weight_that_nobody_can_read_is_no_other_engines",),
    ),
    Mutation(
        "workspaces-are-weights",
        "what a kernel writes in every step is read as weights",
        "_can_have_weights",
        "_CHANGING.search(place.key.lower())",
        "not place.key",
        ("D16",),
        (f"{IN_MEMORY}::test_what_changes_in_every_step_is_no_weight",),
    ),
    Mutation(
        "integers-in-onednn-unseen",
        "oneDNN's integers are asked for by inputs of zero",
        "int8_probe",
        "subset_rows(handler.k)[start : start + count]",
        "subset_rows(handler.k)[start : start + count].zero_()",
        ("D16",),
        (BYTES,),
    ),
    Mutation(
        "most-of-a-model-unread",
        "nobody compares what was read with what the model occupies",
        "READ_SHARE_MIN",
        "0.75",
        "0.0",
        ("D16",),
        (f"{IN_MEMORY}::test_most_of_the_memory_that_the_model_occupies_was_read",),
    ),
)
