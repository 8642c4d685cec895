"""Measures of a tree of Python sources, taken from the syntax alone; nothing is imported."""

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

COLUMNS_MAX = 100
_CATCH_ALL = {"Exception", "BaseException"}
_EXITS = {"os._exit", "os.abort", "sys.exit"}
_Function = ast.FunctionDef | ast.AsyncFunctionDef
_Named = _Function | ast.ClassDef
_Path = tuple[_Named, ...]


@dataclass(frozen=True, slots=True)
class Function:
    """One function or method; it needs a docstring where its name and its class's are public."""

    qualname: str
    lines: int
    complexity: int
    needs_docstring: bool
    has_docstring: bool


@dataclass(frozen=True, slots=True)
class Class:
    """One class with the number of its methods and of its own instance attributes."""

    name: str
    methods: int
    attributes: int


@dataclass(frozen=True, slots=True)
class Handler:
    """A `contextlib.suppress` or a handler that catches everything.

    `what` is as in `suppress(OSError)` or `except Exception`. `anchor` is the qualname of the
    function around it. `goes_on`: the handler has no `raise` and does not leave the process.
    """

    anchor: str
    what: str
    goes_on: bool


@dataclass(frozen=True, slots=True)
class Module:
    """One file. `wide` has the numbers of lines of more than COLUMNS_MAX columns, from 1 on.

    `handlers` has those that Handler describes; `excepts` counts the `except` clauses of any type.
    `words` has every string and every name of an attribute.
    """

    path: str
    lines: int
    wide: tuple[int, ...]
    functions: tuple[Function, ...]
    classes: tuple[Class, ...]
    handlers: tuple[Handler, ...]
    excepts: int
    words: frozenset[str]


def measure_tree(root: Path, without: Iterable[str] = ()) -> list[Module]:
    """Every `*.py` file below `root`, or `root` itself if it is one; `without` names folders."""
    skipped = set(without)
    files = [root] if root.is_file() else sorted(root.rglob("*.py"))
    return [
        measure(file.read_text(encoding="utf-8"), file.relative_to(root).as_posix())
        for file in files
        if skipped.isdisjoint(file.relative_to(root).parts)
    ]


def measure(source: str, path: str = "") -> Module:
    """One module's source. Raises SyntaxError."""
    tree = ast.parse(source)
    named = list(_named(tree))
    return Module(
        path,
        len(source.splitlines()),
        wide_lines(source),
        tuple(_function(node, around) for node, around in named if isinstance(node, _Function)),
        tuple(_class(node) for node, _ in named if isinstance(node, ast.ClassDef)),
        tuple(_handlers(tree, ())),
        sum(isinstance(node, ast.ExceptHandler) for node in ast.walk(tree)),
        frozenset(filter(None, map(_word, ast.walk(tree)))),
    )


def wide_lines(text: str) -> tuple[int, ...]:
    """Numbers of the lines, from 1 on, that have more than COLUMNS_MAX columns."""
    numbered = enumerate(text.splitlines(), 1)
    return tuple(number for number, line in numbered if len(line) > COLUMNS_MAX)


def complexity(function: ast.AST) -> int:
    """McCabe's number as radon counts it: a branch is also a boolean operator or an assertion.

    One, and one more for each `if`, `for`, `while`, `except`, `case`, `assert`, conditional
    expression, comprehension, `if` of a comprehension, and operand of a boolean operation after
    the first. Branches of nested functions count too.
    """
    total = 1
    for node in ast.walk(function):
        match node:
            case ast.If() | ast.IfExp() | ast.For() | ast.AsyncFor() | ast.While():
                total += 1
            case ast.ExceptHandler() | ast.Assert() | ast.match_case():
                total += 1
            case ast.BoolOp():
                total += len(node.values) - 1
            case ast.comprehension():
                total += 1 + len(node.ifs)
    return total


def repeated_classes(modules: Iterable[Module]) -> dict[str, list[str]]:
    """Class names that stand more than once: the paths of their modules."""
    where = defaultdict(list)
    for module in modules:
        for one in module.classes:
            where[one.name].append(module.path)
    return {name: paths for name, paths in where.items() if len(paths) > 1}


def near_names(modules: Iterable[Module]) -> list[tuple[str, str]]:
    """Pairs of modules or packages in one package whose names differ by one letter."""
    packages: dict[tuple[str, ...], set[str]] = defaultdict(set)
    for module in modules:
        parts = Path(module.path).with_suffix("").parts
        for depth, name in enumerate(parts):
            packages[parts[:depth]].add(name)
    pairs = (combinations(sorted(names), 2) for _, names in sorted(packages.items()))
    return [(one, other) for of_one in pairs for one, other in of_one if _differ_by_one(one, other)]


def circles(imports: Mapping[str, Iterable[str]]) -> list[tuple[str, ...]]:
    """Sets of nodes that all reach each other; empty where the graph has no circle."""
    reached: dict[str, set[str]] = {}
    for start in imports:
        seen: set[str] = set()
        ahead = list(imports[start])
        while ahead:
            node = ahead.pop()
            if node not in seen:
                seen.add(node)
                ahead += imports.get(node, ())
        reached[start] = seen
    found = {
        tuple(sorted({start} | {node for node in seen if start in reached.get(node, ())}))
        for start, seen in reached.items()
    }
    return sorted(circle for circle in found if len(circle) > 1)


def siblings(imports: Mapping[str, Iterable[str]]) -> dict[str, dict[str, set[str]]]:
    """By package: the imports between its members, each member with all that is below it.

    A package's own `__init__` counts as no member of it.
    """
    between: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for importer, imported in imports.items():
        for target in imported:
            one, other = importer.split("."), target.split(".")
            depth = 0
            while depth < min(len(one), len(other)) and one[depth] == other[depth]:
                depth += 1
            if depth < min(len(one), len(other)):
                members = between[".".join(one[:depth])]
                members[".".join(one[: depth + 1])].add(".".join(other[: depth + 1]))
    return {package: dict(members) for package, members in between.items()}


def _word(node: ast.AST) -> str:
    match node:
        case ast.Constant(value=str(word)) | ast.Attribute(attr=word):
            return word
    return ""


def _named(node: ast.AST, around: _Path = ()) -> Iterator[tuple[_Named, _Path]]:
    """Every class and function below `node`, with those around it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _Named):
            yield child, around
            yield from _named(child, (*around, child))
        else:
            yield from _named(child, around)


def _function(node: _Function, around: _Path) -> Function:
    names = [*(one.name for one in around), node.name]
    is_nested = any(isinstance(one, _Function) for one in around)
    return Function(
        ".".join(names),
        (node.end_lineno or node.lineno) - node.lineno + 1,
        complexity(node),
        not is_nested and not any(name.startswith("_") for name in names),
        ast.get_docstring(node) is not None,
    )


def _class(node: ast.ClassDef) -> Class:
    """Attributes are what methods assign to `self`, and annotated names but class variables."""
    methods = [one for one in node.body if isinstance(one, _Function)]
    names = {
        one.target.id
        for one in node.body
        if isinstance(one, ast.AnnAssign)
        and isinstance(one.target, ast.Name)
        and "ClassVar" not in ast.unparse(one.annotation)
    }
    for method in methods:
        names |= {
            one.attr
            for one in ast.walk(method)
            if isinstance(one, ast.Attribute)
            and isinstance(one.ctx, ast.Store)
            and isinstance(one.value, ast.Name)
            and one.value.id == "self"
        }
    return Class(node.name, len(methods), len(names))


def _handlers(node: ast.AST, names: tuple[str, ...]) -> Iterator[Handler]:
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.ExceptHandler() if child.type is None or _CATCH_ALL & _types(child.type):
                what = "except" if child.type is None else f"except {ast.unparse(child.type)}"
                yield Handler(".".join(names), what, not any(map(_leaves, ast.walk(child))))
            case ast.Call() if ast.unparse(child.func) in ("suppress", "contextlib.suppress"):
                types = ", ".join(map(ast.unparse, child.args))
                yield Handler(".".join(names), f"suppress({types})", True)
        yield from _handlers(child, (*names, child.name) if isinstance(child, _Named) else names)


def _types(node: ast.expr) -> set[str]:
    return {ast.unparse(one) for one in (node.elts if isinstance(node, ast.Tuple) else [node])}


def _leaves(node: ast.AST) -> bool:
    is_exit = isinstance(node, ast.Call) and ast.unparse(node.func) in _EXITS
    return is_exit or isinstance(node, ast.Raise)


def _differ_by_one(one: str, other: str) -> bool:
    """Whether one letter put in, left out or replaced makes one name of the other."""
    short, long = sorted((one, other), key=len)
    if len(long) - len(short) > 1 or short == long:
        return False
    at = next((i for i, (a, b) in enumerate(zip(short, long, strict=False)) if a != b), len(short))
    return short[at:] == long[at + 1 :] or short[at + 1 :] == long[at + 1 :]
