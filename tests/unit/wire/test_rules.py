"""The rules of the protocol are whole, and docs/PROTOCOL.md has them."""

import importlib
import re
from typing import get_args

from hybridkv.wire.messages import Error, Hello, Reply, Request, UnaskedReply
from hybridkv.wire.protocol import RULES, ConnectionState, ErrorCode, refused
from tests.documents import DOCS

GREETED = "engine, worker, control"


def rows(section: str) -> list[list[str]]:
    """Return the cells of the table in a section of the page, without its head."""
    text = (DOCS / "PROTOCOL.md").read_text().partition(f"\n## {section}\n")[2].partition("\n## ")
    return [line.strip("| ").split(" | ") for line in text[0].splitlines() if line[:3] == "| `"]


def named(message: type) -> str:
    """Return the name of a message on the wire, as the page writes it."""
    return f"`{message.__struct_config__.tag}`"  # type: ignore[attr-defined]


def test_the_page_says_who_sends_each_message_and_what_answers_it() -> None:
    shown = {name: (sender, answer) for name, sender, answer, _ in rows("Messages")}
    expected = {}
    for message, rule in RULES.items():
        states = ", ".join(state for state in ConnectionState if state in rule.states)
        answer = "none" if rule.reply is None else named(rule.reply)
        if rule.first is not None:
            answer += f"; {named(rule.first)} first if that takes longer"
        expected[named(message)] = (states.replace(GREETED, "greeted"), answer)
    assert shown == expected


def test_the_page_has_each_error() -> None:
    assert rows("Errors") == [
        [f"`{code}`", code.meaning, "is closed" if code.closes else "stays open"]
        for code in ErrorCode
    ]


def test_the_limits_of_the_page_are_those_of_the_code() -> None:
    for name, value, _ in rows("Limits"):
        module, _, constant = name.strip("`").rpartition(".")
        limit = getattr(importlib.import_module(f"hybridkv.{module}"), constant)
        assert float(value) == limit, name
    listed = {name.strip("`").rpartition(".")[2] for name, *_ in rows("Limits")}
    assert set(re.findall(r"`(\w+_MAX)`", str(rows("Messages")))) <= listed


def test_the_tables_are_whole() -> None:
    assert set(RULES) == set(get_args(Request))
    answers = {reply for rule in RULES.values() for reply in (rule.reply, rule.first)} - {None}
    unasked = set(get_args(UnaskedReply))
    assert not unasked & answers
    assert answers | unasked | {Error} == set(get_args(Reply)), (
        "every other reply but Error answers something"
    )
    assert Hello.__struct_fields__[:2] == ("id", "version"), "what daemons of every version read"


def test_a_connection_is_greeted_once_and_first() -> None:
    for message in RULES:
        assert (refused(ConnectionState.NEW, message) is None) == (message is Hello)
        for state in set(ConnectionState) - {ConnectionState.NEW}:
            assert (refused(state, message) is ErrorCode.HELLO_TWICE) == (message is Hello)
