"""The documents: links lead somewhere, lines end, and the messages of the help pages exist."""

import ast
import re
import shlex
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from itertools import chain
from pathlib import Path
from urllib.parse import unquote

import pytest

import hybridkv_fault_injection as fault_injection
from hybridkv.cli.main import options_of
from hybridkv.connector.metrics import FAMILIES, Shed, declined
from hybridkv.core.copies import PAYLOAD_VERSION
from hybridkv.core.metrics import Metric
from hybridkv.core.settings import Settings
from hybridkv.core.tier_urls import TierSpec, parse_tier
from hybridkv.multi import metrics as multi_metrics
from hybridkv.multi.children import OWN_KEYS
from hybridkv.observe.status import DECLINES
from hybridkv.shm.slots import SLOT_VERSION
from hybridkv.shm.trailer import ARENA_VERSION
from hybridkv.tiers.disk.writers import LAYOUT
from hybridkv.tiers.factory import make_tier
from hybridkv.tiers.metrics import TIER
from hybridkv.tiers.promotion import ShortfallKind
from hybridkv.tiers.record import ENCODED_VERSION, RECORD_VERSION
from hybridkv.vllm import hook_guard
from hybridkv.wire.messages import PROTOCOL_VERSION
from tests.describe_configuration import PAGES, TABLES, TIER_OPTIONS, documented
from tests.documents import COLUMNS, DOCS, filled
from tests.sources import SOURCES, nodes, trees
from tests.unit.observe.metric_names import OF_THE_DAEMON, find_metric

ROOT = DOCS.parent
OF_THE_ROOT = (
    *("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"),
    "tests/REQUIREMENTS.md",
)
DOCUMENTS = sorted([*DOCS.rglob("*.md"), *(ROOT / name for name in OF_THE_ROOT)])
README_LINES = 150
_PLACE = re.compile(r"%[\d.]*[sdg]")
"""A place of a log line that varies."""
_LINK = re.compile(r"\]\(([^)\s]+)\)")
METRIC = re.compile(r"((?:vllm:hybridkv|hybridkv_daemon)_\w*[a-z](?![\w*]))(?:\{(\w+)=)?")
_FENCE = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)


def prose(path: Path) -> str:
    """Returns a document without its code."""
    return _FENCE.sub("", path.read_text())


def anchors(path: Path) -> set[str]:
    """Returns what a link may name after its #: the headings as code hosts write them."""
    heads = re.findall(r"^#+ (.+)$", prose(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_to_files_and_headings(path: Path) -> None:
    for link in _LINK.findall(prose(path)):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = path.parent / unquote(name) if name else path
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_lines_of_prose_end_at_the_column(path: Path) -> None:
    lines = prose(path).splitlines()
    assert [line for line in lines if len(line) > COLUMNS and not line.startswith("|")] == []


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES


def test_every_page_is_in_the_contents() -> None:
    listed = set(_LINK.findall((DOCS / "index.md").read_text()))
    assert {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")} - {"index.md"} <= listed


def test_pages_and_sections_that_the_sources_cite_are_there() -> None:
    sources = "".join(
        path.read_text() for path in [*SOURCES.rglob("*.py"), ROOT / "pyproject.toml"]
    )
    cited = re.findall(r"\bdocs/([\w/-]+)(?:\.md(?:, ([A-Z]\w+))?)?", sources)
    assert any(section for _, section in cited)
    for page, section in cited:
        # A decision is cited by its number.
        found = [*DOCS.glob(f"{page}.md")] or [*DOCS.glob(f"{page}-*.md")]
        assert len(found) == 1, page
        heading = re.compile(rf"^#+ .*\b{section}$", re.MULTILINE)
        assert not section or heading.search(prose(found[0])), f"{page}, {section}"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_tables_are_what_the_code_gives(path: Path) -> None:
    assert path.read_text() == filled(path.read_text(), TABLES), (
        "run: python -m tests.describe_configuration --write"
    )


def test_every_table_is_on_a_page() -> None:
    found = re.findall(r"<!-- table: (\w+) -->", "".join(path.read_text() for path in PAGES))
    assert sorted(found) == sorted(TABLES)


def test_a_setting_without_a_text_is_noticed() -> None:
    of_the_daemon = {"daemon", "daemon_options"}  # They have a table of their own.
    assert {setting.field.name for setting in documented(Settings)} == {
        field.name for field in fields(Settings)
    } - of_the_daemon
    text = (DOCS / "configuration.md").read_text()
    assert all(f"| `{key}` |" in text for key in OWN_KEYS)


@pytest.mark.parametrize(
    ("kind", "urls"),
    [
        ("valkey", ("valkey://127.0.0.1:6379/0", "valkey+unix:///run/valkey.sock")),
        ("bucket", ("s3://bucket/prefix", "gs://bucket/prefix", "az://box/prefix?account=me")),
        ("mooncake", ("mooncake://127.0.0.1:50051",)),
    ],
)
def test_options_of_tiers_are_those_that_they_take(
    kind: str, urls: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    names_taken: set[str] = set()
    real = TierSpec.known_options

    def known(spec: TierSpec, *names: str, bounded_by: str = "") -> object:
        names_taken.update(names)
        return real(spec, *names, bounded_by=bounded_by)

    monkeypatch.setattr(TierSpec, "known_options", known)
    for url in urls:
        make_tier(parse_tier(url, "tier"), "node").close()
    assert names_taken == set(TIER_OPTIONS[kind])


def test_options_of_all_tiers_are_those_that_they_take() -> None:
    assert set(TIER_OPTIONS["inject"]) == set(fault_injection.OPTIONS)
    values = {"bytes": "1GiB", "write": "off", "hourly": "1GiB", "timeout": "1", "codec": "none"}
    values |= {"key": "file:/k", "class": "package.module:Class"}
    query = "&".join(f"{name}={values[name]}" for name in TIER_OPTIONS["any"])
    assert parse_tier(f"disk:///d?{query}", "tier").options == {}
    assert set(TIER_OPTIONS["any"]) == set(values)


def test_versions_of_formats_are_those_of_the_code() -> None:
    rows = re.findall(r"^\| (\w+) \| (\d+) \|", (DOCS / "operations.md").read_text(), re.MULTILINE)
    assert {name: int(version) for name, version in rows} == {
        "protocol": PROTOCOL_VERSION,
        "arena": ARENA_VERSION,
        "slot": SLOT_VERSION,
        "payload": PAYLOAD_VERSION,
        "record": RECORD_VERSION,
        "encoded": ENCODED_VERSION,
        "directory": int(LAYOUT),
    }


# The page of faults


def proofs() -> list[str]:
    """Returns the tests and commands that the page of faults names, row by row."""
    page = (DOCS / "RELIABILITY.md").read_text().partition("\n## Random runs\n")
    rows = [line.strip("| ").split(" | ") for line in page[0].splitlines() if line[:1] == "|"]
    proven = [re.findall(r"`([^`]+)`", row[3]) for row in rows[2:] if len(row) == 4]
    assert len(proven) > 40
    assert all(proven)
    runs = page[2].partition("\n## ")[0]
    return [*chain(*proven), *re.findall(r"^\| `([^`]+)`", runs, re.MULTILINE)]


@pytest.mark.parametrize("proof", sorted(set(proofs())))
def test_what_proves_a_row_is_there(proof: str) -> None:
    first, *rest = shlex.split(proof)
    if first == "hybridkv":
        assert {word for word in rest[1:] if word[:2] == "--"} <= set(options_of()[rest[0]])
    elif first == "python":
        module = ROOT / rest[1].replace(".", "/")
        assert module.with_suffix(".py").is_file() or (module / "__main__.py").is_file()
    else:
        path = ROOT / first
        assert path.exists()
        source = path.read_text() if path.is_file() else ""
        assert not re.search(r"^pytestmark.*soak", source, re.MULTILINE) or "-m soak" in proof
        wanted = rest[rest.index("-k") + 1].split(" or ") if "-k" in rest else []
        tests = re.findall(r"def (test_\w+)", source)
        assert [word for word in wanted if not any(word in test for test in tests)] == []


# The page of metrics


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_metrics_that_a_page_names_exist(path: Path) -> None:
    for name, label in METRIC.findall(path.read_text()):
        family = find_metric(name)
        assert family is not None, name
        assert not label or label in family.labels, f"{name}{{{label}}}"


@pytest.mark.parametrize("name", ["observe/pages/status.js", "cli/top.py"])
def test_values_that_the_page_and_top_show_exist(name: str) -> None:
    read = r"\bvalues(?:\.(?!get)|\[\"|\.get\(\")(\w+)\b(?!\()"
    shown = re.findall(read, (SOURCES / name).read_text())
    assert len(shown) > 5
    assert {*shown} <= {*OF_THE_DAEMON, *TIER}


def test_a_metric_that_nothing_names_is_a_debug_value() -> None:
    """Something is a page, an alert, a panel, the status page or a command."""
    pages = [path for path in DOCUMENTS if path.name != "CHANGELOG.md"]
    ops = [ROOT / "ops" / name for name in ("alerts.yml", "grafana-hybridkv.json")]
    named = "".join(path.read_text() for path in [*pages, *ops])
    shown = [SOURCES / "observe" / name for name in ("status.py", "pages/status.js")]
    shown += [*(SOURCES / "cli").glob("*.py"), SOURCES / "connector" / "stats.py"]
    used = "".join(path.read_text() for path in shown)
    for name, family in OF_THE_DAEMON.items():
        short = name.removeprefix("tier_") if family.labels == ("tier",) else name
        query = rf"hybridkv_daemon_{name}(_total|_bucket|_sum|_count)?(?!\w)"
        single = rf"`[^`\n]*(?<!\w)({name}|tier_\w+_{short})(?!\w)"
        in_code = rf"values\.{short}(?!\w)|\"{short}\""
        is_named = re.search(f"{query}|{single}", named) or re.search(in_code, used)
        assert is_named or family.is_debug, name
        assert not (family.is_debug and re.search(query, named)), name
    for name in FAMILIES:
        assert re.search(rf"vllm:hybridkv_{name}(_total|_bucket|_sum)?(?!\w)", named), name


def test_the_reasons_on_the_page_of_metrics_are_those_of_the_code() -> None:
    page = (DOCS / "METRICS.md").read_text()
    lookups = {
        (metric.labels[-1], why)
        for metric, why in ((declined(reason), why) for reason, why in DECLINES.items())
        if metric.family == "lookups"
    }
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line[:3] == "| `"]
    assert {(reason.strip("`"), why) for reason, why, *more in rows if not more} >= lookups
    named = set(re.findall(r"`(\w+)`", page))
    assert {shed.value for shed in Shed} <= named
    assert {kind.reason for kind in ShortfallKind} - {""} <= named
    section = page.partition("\n## MultiConnector\n")[2].partition("\n## ")[0]
    events = re.findall(r"`(\w+)`(?=[^|]* \| )", section)
    known = [value for module in (multi_metrics, hook_guard) for value in vars(module).values()]
    assert {*events} <= {value.labels[-1] for value in known if isinstance(value, Metric)}


def test_alerts_of_the_page_are_those_that_there_are() -> None:
    rule = r"- alert: (\w+)\n(?:.+\n)*? +labels: \{severity: (\w+)\}"
    alerts = re.findall(rule, (ROOT / "ops" / "alerts.yml").read_text())
    page = (DOCS / "operations.md").read_text()
    assert {*re.findall(r"^\| `(HybridKV\w+)` \| (\w+) \|", page, re.MULTILINE)} == {*alerts}


# The page of messages


def text_of(node: ast.expr) -> str:
    """A text in the code, with … where it varies."""
    match node:
        case ast.Constant(value=str() as text):
            return text
        case ast.JoinedStr(values=values):
            return "".join(text_of(value) for value in values)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return text_of(left) + text_of(right)
        case _:
            return "…"


@cache
def texts() -> str:
    """Returns every text in the code, a line each."""
    kinds = (ast.Constant, ast.JoinedStr, ast.BinOp)
    return "\n".join(
        re.sub(r"%[\d.]*[sdg]", "…", text_of(node))
        for tree in trees().values()
        for node in nodes(tree)
        if isinstance(node, kinds)
    )


def quoted() -> list[str]:
    """Returns the messages that the page quotes."""
    page = (DOCS / "troubleshooting.md").read_text()
    cells = [line.split(" | ")[0] for line in page.splitlines() if line.startswith("| `")]
    return [message for cell in cells for message in re.findall(r"`([^`]+)`", cell)]


def pieces(message: str) -> list[str]:
    """Returns the parts of a message that never change, such as both clauses of an error."""
    found = (piece.strip(" :,") for piece in re.split("…|; | works", message))
    return [piece for piece in found if len(piece) > 3]


def quoted_texts() -> Iterator[str]:
    """Yields the code's warnings and errors of the log, and the text of each decline."""
    yield from DECLINES.values()
    for tree in trees().values():
        for node in nodes(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in (
                "logger.warning",
                "logger.error",
                "logger.exception",
            ):
                yield text_of(node.args[0])


@pytest.mark.parametrize("message", quoted())
def test_a_message_of_the_page_exists(message: str) -> None:
    assert pieces(message)
    assert [piece for piece in pieces(message) if piece not in texts()] == []


def test_every_decline_is_on_the_page() -> None:
    assert set(DECLINES.values()) <= set(quoted())


def test_every_warning_of_the_log_is_on_the_page() -> None:
    page = " ".join(quoted())
    missing = [
        message
        for message in (_PLACE.sub("…", text).removeprefix("hybridkv: ") for text in quoted_texts())
        if not all(piece in page for piece in pieces(message))
    ]
    assert missing == []
