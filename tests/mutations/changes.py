"""Small changes of a function's syntax tree, which no new format, local name or line disturbs."""

import ast
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tests.mutations.anchors import NoMatch

Definition = ast.FunctionDef | ast.AsyncFunctionDef
Statement = Definition | ast.Assign | ast.AnnAssign


@dataclass(frozen=True, slots=True)
class Change:
    """A change of one function or constant."""

    change: Callable[[Statement], None]
    """Changes the tree in place. Raises NoMatch."""
    old: str = ""
    """The expression or name that it looks for."""
    new: str = ""
    """The code that it writes."""


def body(text: str) -> Change:
    """The function does this instead.

    `original` is the function as it was, and `arguments` is a dict of what it is called with,
    unless a parameter has that name.
    """

    def change(function: Statement) -> None:
        if not isinstance(function, Definition):
            raise NoMatch("a constant has no body")
        before = ast.parse("def original(): ...\narguments = {**locals()}").body
        original = before[0]
        assert isinstance(original, ast.FunctionDef)
        original.args, original.body = function.args, function.body
        names = {node.arg for node in ast.walk(function.args) if isinstance(node, ast.arg)}
        added = before[:1] if "arguments" in names else before[::-1]
        function.body = [*added, *ast.parse(textwrap.dedent(text)).body]

    return Change(change, new=text)


def value(text: str) -> Change:
    """The constant is this instead. `original` is its value as it was."""

    def change(assignment: Statement) -> None:
        if isinstance(assignment, Definition) or assignment.value is None:
            raise NoMatch("it is no constant")
        wrapped = ast.parse(f"(lambda original: {text})(0)", mode="eval").body
        assert isinstance(wrapped, ast.Call)
        wrapped.args, assignment.value = [assignment.value], wrapped

    return Change(change, new=text)


def never(name: str) -> Change:
    """The condition that mentions the name is false."""
    return _condition(name, "False")


def always(name: str) -> Change:
    """The condition that mentions the name is true."""
    return _condition(name, "True")


def without(name: str) -> Change:
    """The statement that mentions the name is left out."""

    def is_meant(node: ast.AST) -> bool:
        simple = isinstance(node, ast.Expr | ast.Assign | ast.AugAssign | ast.AnnAssign)
        return simple and _mentions(node, name)

    return _replacement(name, is_meant, "pass")


def swap(old: str, new: str) -> Change:
    """The expression is another one."""
    wanted = ast.dump(ast.parse(old, mode="eval").body)
    return _replacement(old, lambda node: ast.dump(node) == wanted, new)


def _condition(name: str, new: str) -> Change:
    def is_meant(node: ast.AST) -> bool:
        return _mentions(node, name) and not any(
            _mentions(inner, name) for inner in _conditions(node) if inner is not node
        )

    return _replacement(name, is_meant, new, _conditions)


def _replacement(
    old: str,
    is_meant: Callable[[ast.AST], bool],
    new: str,
    nodes: Callable[[ast.AST], Iterator[ast.AST]] = ast.walk,
) -> Change:
    def change(function: Statement) -> None:
        found = [node for node in nodes(function) if is_meant(node)]
        if len(found) != 1:
            raise NoMatch(f"{old!r} fits {len(found)} places")
        parsed = ast.parse(new).body[0]
        replaced: ast.AST = parsed
        if isinstance(found[0], ast.expr) and isinstance(parsed, ast.Expr):
            replaced = parsed.value
        _Replacing(found[0], replaced).visit(function)

    return Change(change, old, new)


class _Replacing(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self._old, self._new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        return self._new if node is self._old else self.generic_visit(node)


def _mentions(node: ast.AST, name: str) -> bool:
    named = (each for each in ast.walk(node) if isinstance(each, ast.Name | ast.Attribute))
    return any(f".{ast.unparse(each)}".endswith(f".{name}") for each in named)


def _conditions(parent: ast.AST) -> Iterator[ast.AST]:
    """Yields every condition below a node, and the parts of those that `and` and `or` join."""
    for node in ast.walk(parent):
        match node:
            case ast.If(test) | ast.While(test) | ast.IfExp(test):
                yield test
            case ast.BoolOp(values=values) | ast.comprehension(ifs=values):
                yield from values
            case ast.Return(ast.Compare() as test):
                yield test


def local_names(function: ast.AST) -> set[str]:
    """Returns the names that a function gives its own variables."""
    named = (node for node in ast.walk(function) if isinstance(node, ast.Name))
    return {node.id for node in named if isinstance(node.ctx, ast.Store)}
