"""The rules of the protocol: who may send a message, what answers it, what a refusal means.

The daemon goes by these tables, and a test holds docs/PROTOCOL.md against them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from hybridkv.wire import messages as wire
from hybridkv.wire.messages import Hello, Reply, Request


class ConnectionState(StrEnum):
    """The state of a connection: new until its hello, and then the role that hello named."""

    NEW = "new"
    ENGINE = "engine"
    WORKER = "worker"
    CONTROL = "control"


class ErrorCode(StrEnum):
    """The `code` of an Error, its meaning, and whether the connection is closed after it."""

    meaning: str
    closes: bool

    def __new__(cls, code: str, meaning: str, closes: bool = False) -> Self:
        """Make a member whose value is the code."""
        member = str.__new__(cls, code)
        member._value_, member.meaning, member.closes = code, meaning, closes
        return member

    HELLO_FIRST = "hello_first", "the first message of a connection must be hello"
    HELLO_TWICE = "hello_twice", "hello comes once in a connection"
    INCOMPLETE = "hello_incomplete", "an engine's hello needs engine_id, namespace and geometry"
    VERSION = "version", "the daemon speaks another version of the protocol"
    GEOMETRY = "geometry", "the geometry contradicts itself or cannot be served"
    IDENTITY = "identity", "this identity is in use with another geometry"
    IDENTIFY = "identify", "the new identity is in use with another geometry", True
    SESSIONS = "sessions", "there are as many sessions as a daemon keeps"
    ROLE = "role", "a connection of this role may not say this"
    HASHES = "hashes", "the bytes of `hashes` are no whole number of hashes"
    QUOTAS = "quotas", "there are as many bounds of single tenants as a daemon keeps"
    PLACE = "place", "there is no such tier"
    LEASE = "lease", "the lease's number is taken, or too many leases are open"
    PART_BYTES = "part_bytes", "no group of this engine has objects of that many parts of that size"
    PACKED = "packed", "packed arrays that belong together are broken or differ in length"
    COMMIT = "commit", "slots, groups and hashes do not fit together"
    PIN = "pin", "nothing can be pinned so, or there are as many pins as a daemon keeps"
    DESCRIBE = "describe", "hashes, parents and descriptions do not fit together"
    TOO_LARGE = "too_large", "the reply would be larger than a message may be"
    WIRE = "wire", "the bytes are no message of this protocol", True
    INTERNAL = "internal", "a fault of the daemon, with a traceback in its log", True
    OTHER_USER = "other_user", "the daemon belongs to another user", True
    CONNECTIONS = "connections", "there are as many connections as a daemon keeps", True


CLOSING = frozenset(code for code in ErrorCode if code.closes)
"""The daemon closes the connection after an Error with one of these codes."""


@dataclass(frozen=True, slots=True)
class MessageRule:
    """The rule of a message: the states in which it may be sent, and its reply."""

    states: frozenset[ConnectionState]
    reply: type[Reply] | None  # None for a one-way message.
    first: type[Reply] | None = None
    """A reply that may come first, where `reply` takes longer. Others may come between the two."""


_NEW = frozenset((ConnectionState.NEW,))
_ENGINE = frozenset((ConnectionState.ENGINE,))
_WORKER = frozenset((ConnectionState.WORKER,))
_CONTROL = frozenset((ConnectionState.CONTROL,))
_GREETED = frozenset((ConnectionState.ENGINE, ConnectionState.WORKER, ConnectionState.CONTROL))

RULES: Mapping[type[Request], MessageRule] = {
    Hello: MessageRule(_NEW, wire.Welcome),
    wire.Drained: MessageRule(_WORKER, None),
    wire.ReportMapping: MessageRule(_WORKER, None),
    wire.ReportStale: MessageRule(_ENGINE, None),
    wire.Identify: MessageRule(_ENGINE, wire.Done),
    wire.Subscribe: MessageRule(_ENGINE, None),
    wire.Describe: MessageRule(_ENGINE, None),
    wire.ReadAnnouncements: MessageRule(_ENGINE, None),
    wire.Lookup: MessageRule(_ENGINE, wire.Found, wire.Pending),
    wire.Release: MessageRule(_ENGINE, None),
    wire.Computing: MessageRule(_ENGINE, None),
    wire.Computed: MessageRule(_ENGINE, None),
    wire.Advise: MessageRule(_ENGINE, None),
    wire.Prefetch: MessageRule(_ENGINE, None),
    wire.Reserve: MessageRule(_ENGINE, wire.Reserved),
    wire.Commit: MessageRule(_ENGINE, None),
    wire.Free: MessageRule(_ENGINE, None),
    wire.ReportCorrupt: MessageRule(_ENGINE, None),
    wire.ReportRequest: MessageRule(_ENGINE, None),
    wire.ReportIdentity: MessageRule(_ENGINE, None),
    wire.ReportAudit: MessageRule(_ENGINE, None),
    wire.Explain: MessageRule(_GREETED, wire.Explained),
    wire.StartPrefetch: MessageRule(_GREETED, wire.Prefetching),
    wire.ReadPrefetches: MessageRule(_GREETED, wire.Prefetching),
    wire.Stats: MessageRule(_GREETED, wire.Report),
    wire.ListEngines: MessageRule(_GREETED, wire.Engines),
    wire.Clear: MessageRule(_GREETED, wire.Done),
    wire.Pin: MessageRule(_GREETED, wire.Pinned),
    wire.ListObjects: MessageRule(_CONTROL, wire.ObjectPage),
    wire.Forget: MessageRule(_CONTROL, wire.Forgotten),
    wire.ReadQuotas: MessageRule(_CONTROL, wire.QuotaReport),
    wire.SetQuota: MessageRule(_CONTROL, wire.QuotaReport),
}


def refused(state: ConnectionState, message: type[Request]) -> ErrorCode | None:
    """Return the error with which a message is refused in this state. None where it is allowed."""
    if state in RULES[message].states:
        return None
    if state is ConnectionState.NEW:
        return ErrorCode.HELLO_FIRST
    return ErrorCode.HELLO_TWICE if message is Hello else ErrorCode.ROLE
