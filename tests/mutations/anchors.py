"""Finds a function or constant in the package by its name, wherever it stands.

`Geometry.chunks` is a method, `largest_hit` a function, `RULES` a name that is assigned.
`settings:parse` is the `parse` of a module `settings`.
"""

import ast
import difflib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple


class NoMatch(Exception):
    """A fault does not fit the source. The text is a sentence that says why."""


class NamedNode(NamedTuple):
    """A node of a module's tree, and its qualified name in that module."""

    name: str
    node: ast.AST


def find(package: Path, anchor: str) -> Path:
    """Returns the file of the only place in `package` that has this name. Raises NoMatch."""
    module, _, name = anchor.rpartition(":")
    files = {file: _names(file) for file in sorted(package.rglob("*.py"))}
    paths = {file: ".".join(file.relative_to(package).with_suffix("").parts) for file in files}
    found = [
        file
        for file, names in files.items()
        if name in names and f".{paths[file]}".endswith(module and f".{module}")
    ]
    if not found:
        close = difflib.get_close_matches(name, frozenset().union(*files.values()), 1)
        raise NoMatch(
            f"no function or constant {anchor!r} in the package; it was probably renamed"
            + "".join(f", perhaps to {close_name!r}" for close_name in close)
        )
    if len(found) > 1:
        modules = ", ".join(paths[file] for file in found)
        raise NoMatch(f"{anchor!r} is in {modules}; the anchor must name one module before a colon")
    return found[0]


@cache
def _names(file: Path) -> frozenset[str]:
    return frozenset(named.name for named in named_nodes(ast.parse(file.read_text())))


def named_nodes(parent: ast.AST, prefix: str = "") -> Iterator[NamedNode]:
    """Yields the functions and assigned names below a node."""
    for node in ast.iter_child_nodes(parent):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield NamedNode(f"{prefix}{node.name}", node)
            case ast.Assign(targets=[ast.Name(name)]) | ast.AnnAssign(target=ast.Name(name)):
                yield NamedNode(f"{prefix}{name}", node)
        inner = f"{prefix}{node.name}." if hasattr(node, "name") else prefix
        if isinstance(node, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield from named_nodes(node, prefix if isinstance(node, ast.ExceptHandler) else inner)
