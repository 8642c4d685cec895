"""The table of faults fits the code, and tests/REQUIREMENTS.md fits the table."""

import ast
import re
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.mutations.mutation import PACKAGE, ROOT, Mutation, is_command, nodes
from tests.mutations.page import DOCUMENT, document, held, ids, rows
from tests.mutations.report import RESULTS_VARIABLE, pytest_runtest_logreport, results
from tests.mutations.table import MUTATIONS


@lru_cache
def names(path: str) -> set[str]:
    """Returns the functions and methods of a test file, as pytest names them."""
    found = set()
    for node in ast.parse((ROOT / path).read_text()).body:
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            found |= {
                f"{node.name}::{method.name}"
                for method in node.body
                if isinstance(method, ast.FunctionDef)
            }
    return found


def is_there(test: str) -> bool:
    """Whether a node id, without parameters, is that of a test."""
    path, _, name = test.partition("::")
    return (ROOT / path).is_file() and name.partition("[")[0] in names(path)


@pytest.mark.soak
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_fault_can_be_put_in_and_its_tests_are_there(mutation: Mutation) -> None:
    assert not mutation.problem()
    assert mutation.tests
    assert [test for test in mutation.tests if not is_command(test) and not is_there(test)] == []
    assert mutation.requirements
    assert set(mutation.requirements.split()) <= set(ids())
    path, text = mutation.mutated(PACKAGE)
    assert ast.dump(ast.parse(text)) != ast.dump(ast.parse((PACKAGE / path).read_text()))


def test_every_fault_has_a_name_of_its_own() -> None:
    named = [mutation.name for mutation in MUTATIONS]
    assert len(set(named)) == len(named)
    assert not {*named} & {*ids()}


def test_every_requirement_names_a_test_or_says_that_it_is_not_met() -> None:
    text = DOCUMENT.read_text()
    found = rows(text)
    assert [row.id for row in found] == ids()
    assert document(text) == text, "run: python -m tests.mutations.page --write"
    for row in found:
        assert row.asks
        assert row.where
        if not held(row.id):
            assert re.match(r"not met|`tests[/.]", row.held), row.id


def test_what_the_page_names_is_there() -> None:
    for row in rows(DOCUMENT.read_text()):
        cells = f"{row.where} {row.held}"
        for path, words in re.findall(r"`((?:\w+/)*\w+\.py)`([^`]*)", row.where):
            source = (PACKAGE / path).read_text()
            for name in re.findall(r"\b(?:\w+\.)?(_?[A-Z]\w+|\w*_\w+)\b", words):
                assert re.search(rf"\b{name}\b", source), f"{row.id}: {name} is not in {path}"
        for path in re.findall(r"`?(?<![\w/])((?:docs|tests)/[\w/]+\.(?:md|py))", cells):
            assert (ROOT / path).is_file(), f"{row.id}: {path}"
        for test in re.findall(r"`(tests/\S+::\S+)`", cells):
            assert is_there(test), f"{row.id}: {test}"


def test_what_the_requirements_identifiers_are_here_is_there() -> None:
    """Each row names what of the code plays the part, or says that nothing does."""
    text = DOCUMENT.read_text()
    table = text.partition("\n## Words of the requirements\n")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if " | " in line]
    rows = [row for row in rows[1:] if not row[0].startswith("**")]
    identifiers = [name for row in rows for name in re.findall(r"`([^`]+)`", row[0])]
    assert len(identifiers) > 100
    assert len({*identifiers}) == len(identifiers)
    for theirs, _, here, where in rows:
        named = re.findall(r"`((?:\w+/)*\w+\.py)`([^`]*)", where)
        assert named or re.search("none|nothing", here), theirs
        for path, words in named:
            source = (PACKAGE / path).read_text()
            for name in re.findall(r"\w+", words):
                assert re.search(rf"\b{name}\b", source), f"{theirs}: {name} is not in {path}"


def test_a_node_is_found_with_and_without_its_parameters() -> None:
    outcomes = {"t.py::a[1]": True, "t.py::a[2]": False, "t.py::ab": True}
    assert nodes(outcomes, "t.py::a") == [True, False]
    assert nodes(outcomes, "t.py::a[2]") == [False]
    assert nodes(outcomes, "t.py::b") == []


def test_a_test_whose_process_died_is_red_and_one_that_did_not_run_is_nothing() -> None:
    assert results('{"a": true}\n{"a": false}\n{"b": true}\n{"b": null}\n{"c": true}\n') == {
        "a": False,
        "c": True,
    }


@pytest.mark.parametrize(
    ("phases", "red"),
    [
        ({"setup": "failed"}, None),
        ({"call": "skipped"}, None),
        ({"call": "passed", "teardown": "failed"}, None),
        ({"call": "failed", "teardown": "failed"}, True),
        ({"call": "passed", "teardown": "passed"}, False),
    ],
)
def test_a_fixture_that_fails_is_nothing_and_takes_no_finding_back(
    phases: dict[str, str], red: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = f"t.py::a[{phases}]"
    monkeypatch.setenv(RESULTS_VARIABLE, str(tmp_path / "told"))
    for when, outcome in phases.items():
        is_so = {name: name == outcome for name in ("passed", "failed", "skipped")}
        pytest_runtest_logreport(SimpleNamespace(when=when, nodeid=node, **is_so))
    assert results((tmp_path / "told").read_text()).get(node) is red
