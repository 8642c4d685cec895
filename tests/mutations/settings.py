"""Faults in settings, keys, the breaker and what is said at the start."""

from tests.mutations.files import CAPACITY, DOCTOR, FINDINGS, KEYS, LOAD_OR_COMPUTE, SETTINGS, TIERS
from tests.mutations.mutation import Mutation

FAULTS: tuple[Mutation, ...] = (
    # Settings, worth, the breaker, keys and findings
    Mutation(
        "any-key-goes",
        "a setting that nobody knows is passed over",
        "parse_settings",
        "if key not in names:",
        "if not key:",
        ("C1",),
        (f"{SETTINGS}::test_bad_settings",),
    ),
    Mutation(
        "any-server-goes",
        "a server need not be a socket",
        "_server",
        'value.startswith("unix:///")',
        "bool(value)",
        ("C1", "D21"),
        (f"{SETTINGS}::test_bad_settings",),
    ),
    Mutation(
        "chunk-is-no-int",
        "hybrid_chunk_size is a number with a fraction",
        "Settings.hybrid_chunk_size",
        'options.number(1, 1 << 24, "1024", kind=int)',
        'options.number(1, 1 << 24, "1024")',
        ("B12",),
        (f"{SETTINGS}::test_every_key_is_read",),
    ),
    Mutation(
        "reads-at-any-price",
        "a tier is read also where computing is faster",
        "best_load",
        "saved = compute - read if chunk_seconds else float(chunks)",
        "saved = float(chunks)",
        ("D18",),
        (
            f"{LOAD_OR_COMPUTE}::test_the_best_cut_is_when_the_prompt_is_ready_first",
            f"{TIERS}::test_what_is_slower_than_computing_is_computed",
        ),
    ),
    Mutation(
        "never-gives-up",
        "the breaker never opens",
        "Breaker.is_open",
        "return self.failures >= FAILURES_TO_OPEN",
        "return False",
        ("B40",),
        (f"{KEYS}::test_the_breaker_opens_probes_and_closes",),
    ),
    Mutation(
        "impure-core",
        "a module of the core imports the operating system, and does not use it",
        "breaker:",
        "",
        "import os",
        ("B47",),
        ("ruff", "importlinter.cli"),
    ),
    Mutation(
        "order-of-facts",
        "an identity depends on the order of its facts",
        "fingerprint",
        "sort_keys=True,",
        "",
        ("B18", "D16"),
        (f"{KEYS}::test_every_fact_counts_and_their_order_does_not",),
    ),
    Mutation(
        "refusal-is-a-shrug",
        "a configuration that cannot be served is served",
        "raise_first",
        "raise ConfigError(finding.what, finding.remedy)",
        "continue",
        ("B46",),
        (
            f"{FINDINGS}::test_the_first_failure_is_raised_and_warnings_pass",
            f"{DOCTOR}::test_the_connector_raises_what_doctor_shows",
        ),
    ),
    Mutation(
        "too-long-for-the-model",
        "a chunk longer than any prompt is not refused",
        "length_finding",
        "if chunk + 1 >= max_model_len:",
        "if chunk > 2 * max_model_len:",
        ("B8",),
        (f"{CAPACITY}::test_the_length_that_is_said_to_work_works",),
    ),
    Mutation(
        "blames-the-wrong-group",
        "the sentence about the first hit names the group with the smallest block",
        "length_finding",
        "largest = max",
        "largest = min",
        ("B9",),
        (f"{CAPACITY}::test_the_group_that_makes_the_chunk_is_named",),
    ),
)
