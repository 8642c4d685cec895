"""Error handlers say their reason, and a name of a class or method means one thing."""

import ast
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import combinations
from pathlib import PurePath

import pytest

from tests.sources import nodes, texts, trees
from tests.structure.shared_names import SHARED_NAMES

CATCH_ALL = {"Exception", "BaseException"}
# Bases that say how a class is made, and not what its methods mean.
NO_CONTRACT = {"ABC", "Enum", "Exception", "Generic", "NamedTuple", "Protocol", "StrEnum", "Struct"}
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def silent_clauses(tree: ast.Module) -> Iterator[range]:
    """Yield the lines, from 0, of each clause that hides any error, up to what is done then.

    That is `contextlib.suppress`, or an `except` of everything that does not end with `raise`.
    """
    for child in nodes(tree):
        match child:
            case ast.ExceptHandler(type=types, body=body) if catches_all(types):
                if not isinstance(body[-1], ast.Raise):
                    yield range(child.lineno - 1, body[0].lineno - 1)
            case ast.With(items=items, body=body):
                texts = [ast.unparse(item.context_expr) for item in items]
                if any(text.startswith(("suppress(", "contextlib.suppress(")) for text in texts):
                    yield range(child.lineno - 1, body[0].lineno - 1)


def unexplained(source: str, tree: ast.Module) -> list[str]:
    """Return the first line of each silent clause without a comment in it or above it."""
    lines = source.splitlines()
    return [
        lines[clause.start].strip()
        for clause in silent_clauses(tree)
        if not any(" # " in f" {line.strip()}" for line in lines[clause.start : clause.stop])
        and not lines[clause.start - 1].strip().startswith("#")
    ]


def catches_all(types: ast.expr | None) -> bool:
    """Return True for a bare `except`, and where Exception or BaseException is one of the types."""
    if types is None:
        return True
    expressions = types.elts if isinstance(types, ast.Tuple) else [types]
    return not CATCH_ALL.isdisjoint(map(ast.unparse, expressions))


def repeated_classes(modules: Mapping[str, ast.Module]) -> dict[str, list[str]]:
    """Return the names that several classes have, each with the paths of these classes."""
    paths = defaultdict(list)
    for path, tree in modules.items():
        for node in nodes(tree):
            if isinstance(node, ast.ClassDef):
                paths[node.name].append(path)
    return {name: places for name, places in paths.items() if len(places) > 1}


def shared_methods(modules: Iterable[ast.Module]) -> dict[str, set[str]]:
    """Return the public method names of classes without a common base, with these classes."""
    classes = [node for tree in modules for node in nodes(tree) if isinstance(node, ast.ClassDef)]
    bases = {
        owner.name: {ast.unparse(base).partition("[")[0].split(".")[-1] for base in owner.bases}
        for owner in classes
    }
    owners = defaultdict(set)
    for owner in classes:
        for node in owner.body:
            if isinstance(node, _Function) and not node.name.startswith("_"):
                owners[node.name].add(owner.name)
    return {
        method: names
        for method, names in owners.items()
        if any(a.isdisjoint(b) for a, b in combinations([family(name, bases) for name in names], 2))
    }


def family(name: str, bases: Mapping[str, set[str]]) -> set[str]:
    """Return a class and the bases above it that say what its methods mean."""
    above = bases.get(name, set()) - NO_CONTRACT - {name}
    return {name}.union(*(family(base, bases) for base in above))


def similar_names(paths: Iterable[str]) -> list[tuple[str, str]]:
    """Return the pairs of modules or packages in one package that differ by one letter.

    `core/plan.py` and `core/plans/base.py` give `("plan", "plans")`.
    """
    members = defaultdict(set)
    for path in paths:
        parts = PurePath(path).with_suffix("").parts
        for depth, name in enumerate(parts):
            members[parts[:depth]].add(name)
    return [
        (first, second)
        for names in members.values()
        for first, second in combinations(sorted(names), 2)
        if differ_by_one_letter(first, second)
    ]


def differ_by_one_letter(first: str, second: str) -> bool:
    """Return True if one letter put in, left out or replaced makes the second of the first."""
    short, long = sorted((first, second), key=len)
    if len(long) - len(short) > 1 or short == long:
        return False
    pairs = enumerate(zip(short, long, strict=False))
    start = next((index for index, (a, b) in pairs if a != b), len(short))
    return short[start:] == long[start + 1 :] or short[start + 1 :] == long[start + 1 :]


def test_what_hides_an_error_says_why() -> None:
    found = {
        path: lines for path, tree in trees().items() if (lines := unexplained(texts()[path], tree))
    }
    assert found == {}, "say in a comment there why the error may be hidden, and what counts it"


def test_no_two_classes_have_one_name() -> None:
    assert repeated_classes(trees()) == {}


def test_a_public_method_name_means_one_thing() -> None:
    present = shared_methods(trees().values())
    listed = Counter(name for row in SHARED_NAMES for name in row.names.split())
    assert present.keys() - listed == set(), "rename it, or say in shared_names.py what it means"
    assert listed - Counter(present.keys()) == Counter(), "listed twice, or shared no longer"
    for row in SHARED_NAMES:
        classes = set().union(*(present[name] for name in row.names.split()))
        assert not row.classes or classes == set(row.classes.split()), row.meaning


def test_no_two_modules_of_a_package_differ_by_one_letter() -> None:
    assert similar_names(trees()) == []


# The checks themselves

EXAMPLE = """
def narrow():
    try: pass
    except OSError: pass

def hides():
    try: pass
    except (OSError, Exception):
        if failed: raise
    with lock, contextlib.suppress(OSError, ValueError):
        work()
    try: pass
    except: pass

def says_why():
    try: pass
    except Exception:  # It may be gone.
        return
    with suppress(OSError):
        # It may be gone.
        work()

def goes_on():
    try: pass
    except BaseException:
        tidy()
        raise
"""


def test_what_hides_an_error_without_a_reason_is_found() -> None:
    assert sorted(unexplained(EXAMPLE, ast.parse(EXAMPLE))) == [
        "except (OSError, Exception):",
        "except: pass",
        "with lock, contextlib.suppress(OSError, ValueError):",
    ]


def test_class_names_that_are_there_twice_are_found() -> None:
    first, second = ast.parse("class A: ...\nclass B: ..."), ast.parse("class A: ...")
    assert repeated_classes({"a.py": first, "b.py": second}) == {"A": ["a.py", "b.py"]}


RELATED = """
class Shape(Protocol):
    def area(self): ...
class Square(Shape):
    def area(self): ...
class Cube(Square, Generic[T]):
    def area(self): ...
    def _cut(self): ...
"""


@pytest.mark.parametrize(
    ("base", "method", "expected"),
    [("Protocol", "area", ["area"]), ("plane.Shape[T]", "area", []), ("Generic[T]", "_cut", [])],
)
def test_names_of_unrelated_classes_are_found(base: str, method: str, expected: list[str]) -> None:
    park = ast.parse(f"class Park({base}):\n def {method}(self): ...")
    assert [*shared_methods([ast.parse(RELATED), park])] == expected


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ("plan", "plans", True),
        ("load", "road", True),
        ("lots", "slots", True),
        ("plan", "plan2b", False),
        ("abc", "acb", False),
    ],
)
def test_names_that_differ_by_one_letter_are_found(first: str, second: str, expected: bool) -> None:
    paths = [f"core/{first}.py", f"core/{second}/inner.py"]
    assert similar_names(paths) == ([(first, second)] if expected else [])
    assert similar_names([f"core/{first}.py", f"wire/{second}.py"]) == []
