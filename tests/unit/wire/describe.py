"""`python -m tests.unit.wire.describe [--write]` makes the tables of docs/PROTOCOL.md from code.

Prints the document as it should be, or writes it. What is between `<!-- table: NAME -->` and
`<!-- end -->` is made here.
"""

import re
import sys
import textwrap
from collections.abc import Callable, Mapping
from types import ModuleType, NoneType
from typing import get_args

from msgspec import inspect

from hybridkv.client import link
from hybridkv.core import geometry, keys
from hybridkv.daemon import clients, handlers, loop, sessions, view
from hybridkv.observe import history
from hybridkv.wire import messages
from hybridkv.wire import status as page
from hybridkv.wire.messages import Reply, Request
from hybridkv.wire.protocol import RULES, ConnectionState, ErrorCode, refused
from tests.documents import COLUMNS, DOCS, filled, print_or_write, table

DOCUMENT = DOCS / "PROTOCOL.md"
LIMITS: Mapping[ModuleType, Mapping[str, str]] = {
    messages: {
        "MESSAGE_BYTES_MAX": "bytes of one message, either way; "
        "a longer frame is refused before it is read",
        "CHUNKS_MAX": "chunks in one lookup; of those `BATCH_MAX` // groups are looked at",
        "BATCH_MAX": "slots in one `found`, and that one `reserve` may ask for",
        "CHANGES_MAX": "slots that one message grants, or changes",
        "SESSION_SHARE": "the share of the arena, 1 / this, that a session may hold in unwritten "
        "slots; all sessions: 1 / 2",
        "REMOVED_MAX": "objects in one `removed`",
        "WAIT_MS_MAX": "milliseconds that a lookup may wait for tiers below RAM",
        "TEXT_MAX": "characters of a name",
        "FACT_MAX": "characters of a fact",
        "FACTS_MAX": "facts of an identity",
    },
    geometry: {
        "GROUPS_MAX": "groups of a geometry",
        "RANKS_MAX": "ranks of an engine",
        "PERIOD_MAX": "chunks after which a chunked local group's objects begin to repeat",
    },
    keys: {"HASH_BYTES": "bytes of a chunk hash and of an identity, exactly"},
    sessions: {
        "SESSIONS_MAX": "sessions of a daemon",
        "NAMESPACES_MAX": "identities, beyond which those without objects and sessions "
        "are forgotten",
        "QUEUE_MAX": "objects that wait to be told to a session that subscribed; beyond, `removed` "
        "says everything",
        "UNHEARD_MAX": "`removed` to a session since it sent a message; the next ones wait for one",
        "BELOW_MAX": "objects of which a session was told that a tier has them, at most",
        "LOOKS_MAX": "of these, objects that are looked at again in each LOOK_SECONDS",
        "LOOK_SECONDS": "seconds between two looks at what tiers had",
    },
    handlers: {
        "LEASES_MAX": "open leases of a session",
        "LATEST_MAX": "request ids in an `explained`",
    },
    history: {
        "REQUESTS_MAX": "requests that are remembered for `explain`; the oldest is forgotten",
        "IDENTITIES_MAX": "identities whose `report_identity` is remembered; "
        "the oldest is forgotten",
    },
    loop: {
        "OPEN_SECONDS": "seconds that tiers have to open before the first client is served",
        "CLOSE_SECONDS": "seconds that a tier's threads have to finish at the end",
        "FILES_SECONDS": "seconds between two looks whether the socket is still there",
        "RESERVE_RETRY_SECONDS": "seconds after which a daemon asks again for memory for its arena",
        "DESCRIPTORS_MAX": "descriptors that a daemon allows itself, where the system lets it",
        "IDLE_SECONDS": "seconds of arithmetic for the hit-rate ceiling at a time, while nobody "
        "sends anything",
    },
    view: {"STATUS_SECONDS": "seconds that the `status` of a `report` may be old"},
    clients: {
        "CONNECTIONS_MAX": "connections of a daemon",
        "LISTEN_AGAIN_SECONDS": "seconds after which a daemon that had no descriptor left listens "
        "again, at the latest",
        "LAST_WORDS_BYTES_MAX": "bytes that are still read from a connection whose process ended",
        "TURN_SECONDS": "seconds after which a connection's further messages wait for the others'",
        "RECEIVE_BYTES": "bytes that are read from one connection before the others "
        "have their turn",
        "SEND_QUEUE_BYTES_MAX": "bytes of replies that a client leaves unread "
        "before it is disconnected",
    },
    link: {
        "SEND_QUEUE_BYTES_MAX": "bytes that a daemon leaves unread "
        "before the client counts it as gone",
        "RECEIVE_BYTES": "bytes that a client reads at once",
        "HELLO_SECONDS": "seconds that a client waits for `welcome`, "
        "and before it comes back after a refusal",
        "RECONNECT_SECONDS": "seconds before a client comes back after a loss",
    },
}


PARTS = (
    messages.WireGeometry,
    messages.WireGroup,
    messages.WireModel,
    messages.WireEngine,
    messages.RequestExplanation,
    messages.GroupPresence,
    messages.OtherIdentity,
    messages.IdentityDifference,
    messages.AuditOffer,
    page.Status,
    page.TierStatus,
    page.GroupStatus,
    page.SessionStatus,
    page.DecisionStatus,
    page.Problem,
    page.MemoryVerdict,
    page.WindowStatus,
    page.StatusHistory,
)
"""The parts of messages. Those of the status page are maps, and all others are arrays."""


def document(text: str) -> str:
    """Return the text with every table made anew. Raises KeyError for an unknown table."""
    return filled(text, TABLES)


def main() -> int:
    """Print or write the document."""
    return print_or_write(DOCUMENT, document(DOCUMENT.read_text()), __doc__)


def _tag(message: type) -> str:
    if message is NoneType:
        return "-"
    return f"`{message.__struct_config__.tag}`"  # type: ignore[attr-defined]


def _sentences(documented: type) -> str:
    return " ".join((documented.__doc__ or "").split())


def _versions() -> str:
    return table(["", "version"], [["the protocol", str(messages.PROTOCOL_VERSION)]])


def _requests() -> str:
    return "\n".join(_message(message, _rule(message)) for message in get_args(Request))


def _rule(message: type[Request]) -> str:
    """Return who sends a message, and what answers it, in sentences."""
    rule = RULES[message]
    states = ", ".join(state for state in ConnectionState if state in rule.states)
    answer = "One-way." if rule.reply is None else f"Answered by {_tag(rule.reply)}."
    if rule.first is not None:
        answer += f" Where that takes longer, {_tag(rule.first)} comes first."
    return (
        f"Said by: {states}. {answer}"
        if message is not messages.Hello
        else f"Said first, once. {answer}"
    )


def _replies() -> str:
    return "\n".join(_message(message, "") for message in get_args(Reply))


def _parts() -> str:
    return "\n".join(_message(part, "") for part in PARTS)


def _message(message: type, rule: str) -> str:
    """Return the section of a message: its docstring, its rule and the table of its fields."""
    about = inspect.type_info(message)
    assert isinstance(about, inspect.StructType)
    first = [["0", f"`{about.tag_field}`", f'"{about.tag}"', ""]] if about.tag_field else []
    title = _tag(message) if about.tag_field else message.__name__
    rows = [
        [
            str(at) if about.array_like else "key",
            f"`{field.encode_name}`",
            _type(field.type),
            "" if field.required else f"`{field.default!r}`",
        ]
        for at, field in enumerate(about.fields, start=len(first))
    ]
    about_it = textwrap.fill(
        f"{_sentences(message)} {rule}", COLUMNS, break_long_words=False, break_on_hyphens=False
    )
    return f"### {title}\n\n{about_it}\n\n" + table(
        ["item", "field", "type", "default"], [*first, *rows]
    )


def _type(shown: inspect.Type) -> str:
    match shown:
        case inspect.IntType() | inspect.FloatType():
            name = "int" if isinstance(shown, inspect.IntType) else "float"
            low = (
                f"{shown.ge} .. "
                if shown.ge is not None
                else f"{shown.gt + 1} .. "
                if shown.gt is not None
                else ""
            )
            return f"{name} {low}{_number(shown.le)}" if shown.le is not None else name
        case inspect.StrType():
            words = re.fullmatch(r"\^\(([a-z|]+)\)\$", shown.pattern or "")
            if words:
                return " or ".join(f'"{word}"' for word in words[1].split("|"))
            return f"text{_length(shown, 'characters')}"
        case inspect.BytesType():
            return f"bytes{_length(shown, '')}"
        case inspect.BoolType():
            return "bool"
        case inspect.NoneType():
            return "nil"
        case inspect.EnumType():
            return " or ".join(f'"{member.value}"' for member in shown.cls)
        case inspect.ListType():
            return f"list{_length(shown, '')} of ({_type(shown.item_type)})"
        case inspect.DictType():
            key, value = _type(shown.key_type), _type(shown.value_type)
            return f"map{_length(shown, '')} of ({key}) to ({value})"
        case inspect.UnionType():
            return " or ".join(_type(alternative) for alternative in shown.types)
        case inspect.StructType():
            return shown.cls.__name__
    raise NotImplementedError(f"a field of type {shown}")


def _length(
    shown: inspect.StrType | inspect.BytesType | inspect.ListType | inspect.DictType, unit: str
) -> str:
    low, high = shown.min_length, shown.max_length
    if high is None:
        return ""
    span = f"exactly {high}" if low == high else f"{low} .. {high}" if low else f"at most {high}"
    return f", {span} {unit}".rstrip()


def _number(value: float) -> str:
    """Return a large power of two as such: 2**40 -> "2^40", 300 -> "300"."""
    power = int(value).bit_length() - 1
    return f"2^{power}" if value > 1 << 20 and value == 1 << power else str(value)


def _states() -> str:
    def cell(state: ConnectionState, message: type[Request]) -> str:
        code = refused(state, message)
        if code is not None:
            return f"error `{code}`"
        reply = RULES[message].reply
        greets = " and the state is the role" if message is messages.Hello else ""
        return "taken, no reply" if reply is None else f"{_tag(reply)}{greets}"

    rows = [
        [_tag(message), *(cell(state, message) for state in ConnectionState)] for message in RULES
    ]
    closing = ", ".join(f"`{code}`" for code in ErrorCode if code.closes)
    anything = ["anything else", *(["error `wire`, closed"] * len(ConnectionState))]
    return (
        table(["message", *ConnectionState], [*rows, anything])
        + f"\nErrors that close the connection: {closing}.\n"
    )


def _errors() -> str:
    rows = [
        [f"`{code}`", code.meaning, "is closed" if code.closes else "goes on"] for code in ErrorCode
    ]
    return table(["code", "meaning", "the connection"], rows)


def _limits() -> str:
    return table(
        ["limit", "value", "of what"],
        [
            [
                f"`{module.__name__.removeprefix('hybridkv.')}.{name}`",
                str(getattr(module, name)),
                what,
            ]
            for module, names in LIMITS.items()
            for name, what in names.items()
        ],
    )


TABLES: Mapping[str, Callable[[], str]] = {
    "versions": _versions,
    "requests": _requests,
    "replies": _replies,
    "parts": _parts,
    "states": _states,
    "errors": _errors,
    "limits": _limits,
}


if __name__ == "__main__":
    sys.exit(main())
