"""Who may say what, what the answer is, and what a refusal means.

The daemon goes by these tables, and docs/PROTOCOL.md shows them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from hybridkv.wire.messages import (
    Abandon,
    Clear,
    Commit,
    Condemn,
    Describe,
    Done,
    Drained,
    Engines,
    Explain,
    Explained,
    Found,
    Granted,
    Hello,
    Identify,
    ListEngines,
    Lookup,
    Pending,
    Release,
    Removed,
    Reply,
    Report,
    Request,
    Stats,
    Tell,
    Want,
    Watch,
    Welcome,
)


class State(StrEnum):
    """Where a connection stands: not greeted yet, or greeted with this role."""

    NEW = "new"
    ENGINE = "engine"
    WORKER = "worker"
    CONTROL = "control"


class ErrorCode(StrEnum):
    """The `code` of an Error."""

    HELLO_FIRST = "hello_first"
    HELLO_TWICE = "hello_twice"
    HELLO_INCOMPLETE = "hello_incomplete"
    VERSION = "version"
    GEOMETRY = "geometry"
    IDENTITY = "identity"
    IDENTIFY = "identify"
    SESSIONS = "sessions"
    ROLE = "role"
    HASHES = "hashes"
    LEASE = "lease"
    PART_BYTES = "part_bytes"
    PACKED = "packed"
    COMMIT = "commit"
    TOO_LARGE = "too_large"
    WIRE = "wire"
    INTERNAL = "internal"
    OTHER_USER = "other_user"
    CONNECTIONS = "connections"


@dataclass(frozen=True, slots=True)
class Refusal:
    """What an error code means."""

    meaning: str
    closes: bool = False
    """Whether the daemon closes the connection after it."""


REFUSALS: Mapping[ErrorCode, Refusal] = {
    ErrorCode.HELLO_FIRST: Refusal("the first message of a connection must be hello"),
    ErrorCode.HELLO_TWICE: Refusal("hello comes once in a connection"),
    ErrorCode.HELLO_INCOMPLETE: Refusal("an engine's hello needs engine_id, namespace and geometry"),
    ErrorCode.VERSION: Refusal("the daemon speaks another version of the protocol"),
    ErrorCode.GEOMETRY: Refusal("the geometry contradicts itself or cannot be served"),
    ErrorCode.IDENTITY: Refusal("this identity is in use with another geometry"),
    ErrorCode.IDENTIFY: Refusal(
        "the session's new identity is in use with another geometry, and what it says next would belong to none",
        closes=True,
    ),
    ErrorCode.SESSIONS: Refusal("there are as many sessions as a daemon keeps"),
    ErrorCode.ROLE: Refusal("a connection of this role may not say this"),
    ErrorCode.HASHES: Refusal("the bytes of `hashes` are no whole number of hashes"),
    ErrorCode.LEASE: Refusal("the lease's number is taken, or too many leases are open"),
    ErrorCode.PART_BYTES: Refusal("no group of this engine has objects of that many parts of that size"),
    ErrorCode.PACKED: Refusal("packed arrays that belong together are broken or differ in length"),
    ErrorCode.COMMIT: Refusal("slots, groups and hashes do not fit together"),
    ErrorCode.TOO_LARGE: Refusal("the reply would be larger than a message may be"),
    ErrorCode.WIRE: Refusal("the bytes are no message of this protocol", closes=True),
    ErrorCode.INTERNAL: Refusal("a fault of the daemon, with a traceback in its log", closes=True),
    ErrorCode.OTHER_USER: Refusal("the daemon belongs to another user", closes=True),
    ErrorCode.CONNECTIONS: Refusal("there are as many connections as a daemon keeps", closes=True),
}


@dataclass(frozen=True, slots=True)
class Rule:
    """In which states a message may be said, and the reply to it; None = it is one-way."""

    states: frozenset[State]
    reply: type[Reply] | None
    first: type[Reply] | None = None
    """What may be said first, where the reply takes longer; others' replies may come between the two."""


_NEW = frozenset((State.NEW,))
_ENGINE = frozenset((State.ENGINE,))
_WORKER = frozenset((State.WORKER,))
_GREETED = frozenset((State.ENGINE, State.WORKER, State.CONTROL))

RULES: Mapping[type[Request], Rule] = {
    Hello: Rule(_NEW, Welcome),
    Drained: Rule(_WORKER, None),
    Identify: Rule(_ENGINE, Done),
    Watch: Rule(_ENGINE, None),
    Lookup: Rule(_ENGINE, Found, Pending),
    Release: Rule(_ENGINE, None),
    Want: Rule(_ENGINE, Granted),
    Commit: Rule(_ENGINE, None),
    Abandon: Rule(_ENGINE, None),
    Condemn: Rule(_ENGINE, None),
    Tell: Rule(_ENGINE, None),
    Describe: Rule(_ENGINE, None),
    Explain: Rule(_GREETED, Explained),
    Stats: Rule(_GREETED, Report),
    ListEngines: Rule(_GREETED, Engines),
    Clear: Rule(_GREETED, Done),
}

UNASKED: frozenset[type[Reply]] = frozenset((Removed,))
"""What the daemon says without being asked, between any two replies."""


def refused(state: State, message: type[Request]) -> ErrorCode | None:
    """Why a message may not be said in this state; None where it may."""
    if state in RULES[message].states:
        return None
    if state is State.NEW:
        return ErrorCode.HELLO_FIRST
    return ErrorCode.HELLO_TWICE if message is Hello else ErrorCode.ROLE
