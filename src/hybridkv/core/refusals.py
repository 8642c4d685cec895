"""The reasons for which storage takes no objects although it answers, and what helps."""

import errno
from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple


class Refusal(StrEnum):
    """The reason for which a tier refuses objects. To open the tier again changes none of them."""

    NO_SPACE = "no_space"  # The file system is full.
    QUOTA = "quota"  # A quota of the user, or the room of the bucket, is used up.
    READ_ONLY = "read_only"  # The file system is read-only, or the server is a replica.
    PERMISSION = "permission"  # The user may not write there.
    BOUND = "bound"  # The object is larger than the tier's `bytes`.
    STUCK = "stuck"  # Files that cannot be removed use up the tier's `bytes`.
    MEMORY = "memory"  # The server has no memory left, and evicts nothing.
    TOO_LARGE = "too_large"  # The object is larger than the server takes.
    RATE = "rate"  # The server takes no more requests in so short a time.
    TAKEN = "taken"  # Another daemon writes under the same name.
    SERVER = "server"  # The server has another reason.


class RefusalText(NamedTuple):
    """A reason in words."""

    cause: str
    cure: str


REFUSALS: Mapping[Refusal, RefusalText] = {
    Refusal.NO_SPACE: RefusalText(
        "its file system is full", "free the file system, or set bytes= below its room"
    ),
    Refusal.QUOTA: RefusalText("the quota or the room of its storage is used up", "raise it"),
    Refusal.READ_ONLY: RefusalText(
        "its storage is read-only", "mount it writable, name the primary server, or set write=off"
    ),
    Refusal.PERMISSION: RefusalText("it is not permitted to write", "permit it, or set write=off"),
    Refusal.BOUND: RefusalText("one object is larger than bytes= admits", "set a larger bytes="),
    Refusal.STUCK: RefusalText(
        "files that cannot be removed use up bytes=", "permit to remove its files"
    ),
    Refusal.MEMORY: RefusalText(
        "the server's memory is used up",
        "raise its memory, or let it evict (maxmemory-policy allkeys-lru)",
    ),
    Refusal.TOO_LARGE: RefusalText(
        "one object is larger than it takes", "raise its limit, or use another kind of tier"
    ),
    Refusal.RATE: RefusalText(
        "its server takes no more requests for now",
        "raise its rate of requests, or set hourly= or write=back",
    ),
    Refusal.TAKEN: RefusalText(
        "another daemon writes to its directory", "give each node its own name (--node)"
    ),
    Refusal.SERVER: RefusalText(
        "the server takes no writes at present", "the server's own log says why"
    ),
}
"""Each reason in words."""

_ERRNOS: Mapping[int | None, Refusal] = {
    errno.ENOSPC: Refusal.NO_SPACE,
    errno.EDQUOT: Refusal.QUOTA,
    errno.EROFS: Refusal.READ_ONLY,
    errno.EACCES: Refusal.PERMISSION,
    errno.EPERM: Refusal.PERMISSION,
}


def describe_refusal(refusal: Refusal) -> str:
    """Returns the cause and the cure in one clause."""
    return f"{REFUSALS[refusal].cause}; {REFUSALS[refusal].cure}"


def refusal_of(error: OSError) -> Refusal | None:
    """Returns the reason for which a file system refused. None = it failed for another reason."""
    return _ERRNOS.get(error.errno)
