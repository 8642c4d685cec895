"""The syntax of the package, which several tests look at: each file is read once."""

import ast
from functools import cache
from pathlib import Path

SOURCES = Path(__file__).parents[1] / "src" / "hybridkv"


@cache
def texts() -> dict[str, str]:
    """Returns the text of each module of the package, by the path of its file."""
    paths = sorted(SOURCES.rglob("*.py"))
    return {path.relative_to(SOURCES).as_posix(): path.read_text() for path in paths}


@cache
def trees() -> dict[str, ast.Module]:
    """Returns the syntax tree of each module of the package, by the path of its file."""
    return {path: ast.parse(text) for path, text in texts().items()}


@cache
def nodes(tree: ast.Module) -> tuple[ast.AST, ...]:
    """Returns every node of a module."""
    return tuple(ast.walk(tree))
