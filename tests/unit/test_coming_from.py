"""docs/COMING-FROM.md: each setting, command, metric, message and state in its tables exists."""

import ast
import re
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from hybridkv.cli.main import options_of
from hybridkv.connector.scheduler.requests import RequestState
from hybridkv.core.daemon_settings import DAEMON_SETTINGS
from hybridkv.core.settings import Settings
from hybridkv.core.tier_urls import parse_tier
from hybridkv.tiers.metrics import PROMOTION
from hybridkv.tiers.promotion import ShortfallKind
from hybridkv.wire import messages as wire
from tests.unit.observe.metric_names import find_metric

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "hybridkv"
DOCUMENT = ROOT / "docs" / "COMING-FROM.md"
KINDS = ("disk", "valkey", "s3", "mooncake")
TIER = re.compile(rf"(?:tier|chunks_hit)_({'|'.join(KINDS)})_?")
OF_ENGINES = {field.name for field in fields(Settings) if field.metadata}
"""Keys of kv_connector_extra_config that are not the daemon's too."""
VERBS = ("read", "written")
METRIC = re.compile(r'((?:vllm:hybridkv|hybridkv_daemon)_\w+)(?:\{(\w+)="(\w+)"\})?')


class Entry(NamedTuple):
    """A text of the page, and the heading above it."""

    heading: str
    text: str


def cells() -> Iterator[Entry]:
    """The cell that is ours of each row of the tables, without their heads."""
    heading, table = "", False
    for line in DOCUMENT.read_text().splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
        if not line.startswith("|"):
            table = False
            continue
        columns = re.split(r" \| ", line.strip("| "))
        if table and not set(line) <= set("|- "):
            yield Entry(heading, columns[1])
        table = True


def names() -> list[Entry]:
    """Everything of ours that the tables name."""
    return [
        Entry(heading, name) for heading, cell in cells() for name in re.findall(r"`([^`]+)`", cell)
    ]


class CodeTexts(NamedTuple):
    """The package's code: every text in it, and the source as a whole."""

    texts: set[str]
    source: str


@cache
def code_texts() -> CodeTexts:
    found: set[str] = set()
    source = ""
    for path in PACKAGE.rglob("*.py"):
        code = path.read_text()
        source += code
        found |= {
            node.value
            for node in ast.walk(ast.parse(code))
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
    # Names that are put together: tiers/health.py, and those that `hybridkv stats` prints.
    found |= {f"{what}_{verb}" for what in ("objects", "bytes") for verb in VERBS}
    start = PROMOTION["promotions_cut"].single_name
    found |= {f"{start}_{kind.reason}" for kind in ShortfallKind} | {""}
    return CodeTexts(found, source)


options = cache(options_of)


def is_setting(name: str) -> bool:
    """Whether it is a key of kv_connector_extra_config."""
    return name in OF_ENGINES or (name in DAEMON_SETTINGS and name != "socket")


def is_command(name: str) -> bool:
    """Whether it is one of our commands, with options that it has."""
    _, command, *given = name.split()
    known = options()[command]
    return all(option in known for option in given if option.startswith("-"))


def is_metric(name: str) -> bool:
    """Whether it is an exported metric, with that label and a value of it that the code has."""
    whole = METRIC.fullmatch(name)
    if whole is None:
        return False
    metric, label, value = whole.groups()
    family = find_metric(metric)
    has_value = (
        value is None
        or value in KINDS
        or any(re.search(rf"(^|_){value}$", text) for text in code_texts().texts)
    )
    return family is not None and (label is None or label in family.labels) and has_value


def exists(name: str) -> bool:
    """Whether the code has what a name of the page stands for."""
    found, source = code_texts()
    if METRIC.match(name):
        return is_metric(name)
    if name.startswith("hybridkv ") and not name.startswith("hybridkv: "):
        return is_command(name)
    if "://" in name:
        return parse_tier(name, "tier").kind in KINDS
    if name.partition("=")[0] == "write":
        return parse_tier(f"disk:///d?{name}", "tier") is not None
    return (
        is_setting(name)
        or name in set(RequestState)
        or TIER.sub("", name) in found
        or _is_said(name, source)
    )


def _is_said(name: str, source: str) -> bool:
    """Whether it is a message, or the name of one of the wire's."""
    return name in dir(wire) or (" " in name and name in source)


def test_the_page_has_tables() -> None:
    assert len(names()) > 100
    assert {name for _, name in names() if is_setting(name)} >= {
        "server",
        "ram",
        "disk",
        "tiers",
        "store_generated",
    }


@pytest.mark.parametrize(("heading", "name"), sorted(set(names())))
def test_what_is_named_exists(heading: str, name: str) -> None:
    assert exists(name), f"{heading}: {name}"


def test_metrics_that_are_named_between_the_tables_exist() -> None:
    named = {found[0] for found in METRIC.finditer(DOCUMENT.read_text())}
    assert len(named) > 8
    assert [name for name in sorted(named) if not exists(name)] == []


@pytest.mark.parametrize(
    "name",
    [
        "load_timeout",
        "hybridkv serve --tiers",
        "hybridkv: lost the server",
        "disk://x?write=all",
        "chunks_hits",
        "vllm:hybridkv_lookups",
        'vllm:hybridkv_lookups_total{tier="disk"}',
        "hybridkv_daemon_tier_disk_objects_read",
        'hybridkv_daemon_promotions_cut_total{reason="mood"}',
    ],
)
def test_what_does_not_exist_is_noticed(name: str) -> None:
    try:
        assert not exists(name)
    except ValueError:
        assert "://" in name


def test_every_setting_is_on_the_page() -> None:
    named = {name for _, name in names()}
    keys = OF_ENGINES | {"ram", "salt_quota", "disk", "disk_bytes", "tiers"}
    assert keys - named <= {"load_policy", "checksum", "audit", "weights_identity", "config"}, (
        "others have nothing like these"
    )
