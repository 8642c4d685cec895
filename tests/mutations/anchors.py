"""Finds a function, class or assignment in the package by its name, wherever it stands.

`Geometry.chunks` is a method, `largest_hit` a function, `RULES` a name that is assigned.
`settings:parse` is the `parse` of a module `settings`, and `settings:` is that module as a whole.
"""

import ast
import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple


class NoMatch(Exception):
    """A fault does not fit the source. The text is a sentence that says why."""


@dataclass(frozen=True, slots=True)
class Place:
    """A function, class or constant that an anchor can name."""

    module: str
    name: str
    """The qualified name within the module, or "" for the module as a whole."""
    path: Path
    """The file of the module, below the package."""
    node: ast.AST

    @property
    def first_line(self) -> int:
        """The line at which the place begins with its decorators, counted from 1."""
        return first_line(self.node)


def find(package: Path, anchor: str) -> Place:
    """Returns the only place in `package` that has this name. Raises NoMatch."""
    module, _, name = anchor.rpartition(":")
    places = _places(package)
    found = [
        place
        for place in places
        if place.name == name and f".{place.module}".endswith(module and f".{module}")
    ]
    if not found:
        close = difflib.get_close_matches(name, {place.name for place in places}, 1)
        raise NoMatch(
            f"no function, class or constant {anchor!r} in the package; it was probably renamed"
            + "".join(f", perhaps to {close_name!r}" for close_name in close)
        )
    if len(found) > 1:
        modules = ", ".join(place.module for place in found)
        raise NoMatch(f"{anchor!r} is in {modules}; the anchor must name one module before a colon")
    return found[0]


def first_line(node: ast.AST) -> int:
    """Returns the line at which a statement begins with its decorators, counted from 1."""
    nodes = [node, *getattr(node, "decorator_list", [])]
    return min(getattr(each, "lineno", 1) for each in nodes)


@lru_cache
def _places(package: Path) -> Sequence[Place]:
    places = []
    for file in sorted(package.rglob("*.py")):
        path = file.relative_to(package)
        module = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
        tree = ast.parse(file.read_text())
        nodes = [NamedNode("", tree), *_named(tree)]
        places += [Place(module, named.name, path, named.node) for named in nodes]
    return places


class NamedNode(NamedTuple):
    """A node of a module's tree, and its qualified name in that module."""

    name: str
    node: ast.AST


def _named(parent: ast.AST, prefix: str = "") -> Iterator[NamedNode]:
    for node in ast.iter_child_nodes(parent):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield NamedNode(f"{prefix}{node.name}", node)
                yield from _named(node, f"{prefix}{node.name}.")
                continue
            case ast.Assign(targets=[ast.Name(name)]) | ast.AnnAssign(target=ast.Name(name)):
                yield NamedNode(f"{prefix}{name}", node)
        if isinstance(node, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield from _named(node, prefix)
