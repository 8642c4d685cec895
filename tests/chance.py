"""What tests draw: the same in every run of the gate, other things in each run of the soak."""

import os
import zlib

SEED_VARIABLE = "HYBRIDKV_TEST_SEED"
"""Set by the soak: everything that tests draw depends on it."""
EXAMPLES_VARIABLE = "HYBRIDKV_TEST_EXAMPLES"
"""Set by the soak: how many times as many examples Hypothesis tries."""


def is_fixed() -> bool:
    """Whether this run draws what every run of the gate draws."""
    return SEED_VARIABLE not in os.environ


def seed_of(name: str) -> int:
    """The seed of what is called `name`, 32 bits."""
    return zlib.crc32(f"{os.environ.get(SEED_VARIABLE, '')}{name}".encode())


def examples(count: int) -> int:
    """The examples of a test that has `count` of them in the gate."""
    return count * int(os.environ.get(EXAMPLES_VARIABLE, "1"))
