"""What the Mooncake tier and its child process say to each other (storage.tiers.mooncake, mooncake_child).

A message is one packet of a socket pair (SOCK_SEQPACKET); each pair is a lane, on which a call follows the answer to
the one before.  Record bytes are in memory that both have; a call says where.
"""

import msgspec

KEYS_MAX = 512
"""In one call, so that a packet stays below what a socket takes."""
PACKET_BYTES_MAX = 128 << 10


class Setup(msgspec.Struct, tag=True, frozen=True):
    """Connect; the first call on the first lane."""

    config: dict[str, str]


class Find(msgspec.Struct, tag=True, frozen=True):
    """Which are there? Codes: 1, 0, or an error's."""

    keys: list[str]


class Put(msgspec.Struct, tag=True, frozen=True):
    """Publish what is in the memory. Codes: 0, or an error's."""

    keys: list[str]
    offsets: list[int]
    sizes: list[int]


class Get(msgspec.Struct, tag=True, frozen=True):
    """Read into the memory. Codes: the object's size, whatever was asked for, or an error's."""

    keys: list[str]
    offsets: list[int]
    sizes: list[int]


class Remove(msgspec.Struct, tag=True, frozen=True):
    """Remove, with `force` also what has a lease. Codes: 0, or an error's."""

    keys: list[str]
    force: bool


class Stop(msgspec.Struct, tag=True, frozen=True):
    """Leave the store in order, and end after the answer."""


class Answer(msgspec.Struct, frozen=True):
    """A code for each item; `error` where the call as a whole failed, in words."""

    codes: list[int] = []
    error: str = ""


Call = Setup | Find | Put | Get | Remove | Stop
