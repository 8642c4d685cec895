"""The policies between which settings choose."""

from enum import StrEnum


class EvictionPolicy(StrEnum):
    """The values of `hybridkv serve --eviction`."""

    TWO_QUEUES = "2q"
    LRU = "lru"


class LoadPolicy(StrEnum):
    """Whether objects in tiers below RAM are loaded."""

    FASTER = "faster"  # Where loading is measured to be faster than computing.
    ALWAYS = "always"
    NEVER = "never"
