"""The policies between which settings choose."""

from enum import IntEnum, StrEnum


class EvictionClass(IntEnum):
    """The place in its prompt of an object that nobody has read. It is a byte of Commit."""

    PROMPT = 0  # A hit at the prompt's end, or a chunk before it, needs the object.
    INTERIOR = 1  # Only a shorter hit needs it.
    GENERATED = 2  # It has tokens of the answer.
    UNLIKELY = 3  # As INTERIOR, and tiers are not given it before a hit reads it.


class Advice(StrEnum):
    """The wish of an engine about chunks of a prompt. It is a field of `wire.messages.Advise`."""

    RETAIN = "retain"  # Keep them in RAM for a time.
    RELEASE = "release"  # Their session has ended: evict first what only its prompt has.
    DEMOTE = "demote"  # As RELEASE, after tiers below RAM have them.


class LoadPolicy(StrEnum):
    """Whether objects in tiers below RAM are loaded."""

    FASTER = "faster"  # Where loading is measured to be faster than computing.
    ALWAYS = "always"
    NEVER = "never"
