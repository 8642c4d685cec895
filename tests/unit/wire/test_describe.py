"""docs/PROTOCOL.md is what the code does."""

import re
from pathlib import Path
from types import ModuleType
from typing import get_args

from hybridkv.wire.messages import Error, Hello, Removed, Reply, Request
from hybridkv.wire.protocol import RULES, ConnectionState, ErrorCode, refused
from tests.unit.wire.describe import DOCUMENT, LIMITS, TABLES, document


def test_the_document_is_what_the_code_gives() -> None:
    text = DOCUMENT.read_text()
    assert text == document(text), "run: python -m tests.unit.wire.describe --write"
    assert set(re.findall(r"<!-- table: (\w+) -->", text)) == set(TABLES)


def test_the_tables_are_whole() -> None:
    assert set(RULES) == set(get_args(Request))
    answers = {reply for rule in RULES.values() for reply in (rule.reply, rule.first)} - {None}
    assert Removed not in answers, "it is sent unasked"
    assert answers | {Removed, Error} == set(get_args(Reply)), (
        "every other reply but Error answers something"
    )
    assert Hello.__struct_fields__[:2] == ("id", "version"), "what daemons of every version read"


def test_a_connection_is_greeted_once_and_first() -> None:
    for message in RULES:
        assert (refused(ConnectionState.NEW, message) is None) == (message is Hello)
        for state in set(ConnectionState) - {ConnectionState.NEW}:
            assert (refused(state, message) is ErrorCode.HELLO_TWICE) == (message is Hello)


def test_every_limit_of_the_daemon_is_in_the_document() -> None:
    for module, named in LIMITS.items():
        defined = re.findall(
            r"^(\w+_MAX|\w+_SECONDS|RECEIVE_BYTES|SESSION_SHARE)\b", source(module), re.MULTILINE
        )
        assert set(defined) - {"VALUES_TIMEOUT_SECONDS"} <= set(named), module.__name__


def source(module: ModuleType) -> str:
    assert module.__file__ is not None
    return Path(module.__file__).read_text()
