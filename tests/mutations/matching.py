"""Writes a fault into the source of a package, at the place that its anchor and old text name.

Within the anchor the old text is searched by its tokens. White space, line breaks, comments,
parentheses that only group and a comma before a closing bracket do not count. Where the exact
tokens are not there, identifiers may have other names, one for one. Where that fits several
places, the place with the fewest other names is meant, if at least half of the names are the same.
"""

import ast
import builtins
import io
import keyword
import textwrap
import tokenize
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tests.mutations.anchors import NoMatch, Place, find, first_line

FIXED = {*dir(builtins), *keyword.kwlist, "self", "cls"}
"""Names that stand for themselves when identifiers may have other names."""
_LAYOUT = {tokenize.NL, tokenize.NEWLINE, tokenize.COMMENT, tokenize.INDENT, tokenize.DEDENT}


@dataclass(frozen=True, slots=True)
class _Token:
    text: str
    start: int
    end: int

    @property
    def is_identifier(self) -> bool:
        return self.text.isidentifier() and self.text not in FIXED

    @property
    def ends_a_value(self) -> bool:
        """Whether a parenthesis after it calls, and does not only group."""
        name = self.text.isidentifier() and not keyword.iskeyword(self.text)
        return name or self.text in {")", "]", "}"}


class Match(NamedTuple):
    """Characters [start, end) of a region that fit the old text."""

    start: int
    end: int
    names: dict[str, str]
    """The name in the region of each identifier in the old text."""


class Span(NamedTuple):
    """Characters [start, end) of a text."""

    start: int
    end: int


class MutatedFile(NamedTuple):
    """A file of the package with a fault in it."""

    path: Path
    """The path below the package."""
    text: str


def mutated(package: Path, anchor: str, old: str, new: str) -> MutatedFile:
    """Returns the file with the anchor's place, and the fault in its text.

    `old` must match at one place within the anchor. "" stands for the beginning of the body,
    after the docstring. `new` replaces it. Its further lines are indented relative to its first.
    An anchor with a "/" is the path of a file that is not Python. There `old` is matched exactly.
    Raises NoMatch.
    """
    if "/" in anchor:
        text = (package / anchor).read_text() if (package / anchor).is_file() else ""
        if (count := text.count(old)) != 1:
            raise NoMatch(f"the old text occurs {count} times in {anchor}")
        return MutatedFile(Path(anchor), text.replace(old, new))
    place = find(package, anchor)
    text = (package / place.path).read_text()
    new = textwrap.dedent(new).strip("\n")
    if old.strip():
        return MutatedFile(place.path, _replace(text, place, old, new))
    return MutatedFile(place.path, _insert_first(text, place, new))


def identifiers(text: str) -> set[str]:
    """Returns every name in a run of Python that is not a builtin."""
    return {token.text for token in _tokens(text) if token.is_identifier}


def _insert_first(text: str, place: Place, new: str) -> str:
    """Returns the text with `new` before the first statement of the place that is no docstring."""
    node = place.node
    if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        raise NoMatch(f"{place.name!r} has no body that a fault can begin")
    first = node.body[0]
    line = first_line(first) - 1 if ast.get_docstring(node) is None else first.end_lineno or 0
    lines = text.split("\n")
    lines[line:line] = textwrap.indent(new, " " * first.col_offset).split("\n")
    return "\n".join(lines)


def _replace(text: str, place: Place, old: str, new: str) -> str:
    """Returns the text with `new` instead of `old` at the one place that fits."""
    lines = text.split("\n")
    first = place.first_line - 1
    region = "\n".join(lines[first : getattr(place.node, "end_lineno", None)])
    before = sum(len(line) + 1 for line in lines[:first])
    matches = _matches(old, region)
    if len(closest := _closest(matches)) != 1:
        where = repr(place.name) if place.name else f"module {place.module!r}"
        raise NoMatch(f"the old text {old.strip()!r} fits {len(matches)} places in {where}")
    match = closest[0]
    line_start = region.rfind("\n", 0, match.start) + 1
    written = _indented(_renamed(new, match.names), _indentation(region[line_start:]))
    return text[: before + match.start] + written + text[before + match.end :]


def _indentation(line: str) -> int:
    return len(line) - len(line.lstrip(" "))


def _indented(new: str, columns: int) -> str:
    """Returns `new` as it stands after the indentation of a line of `columns` columns."""
    first, *others = new.split("\n")
    shift = columns - _indentation(first)
    moved = [" " * (_indentation(line) + shift) + line.lstrip(" ") for line in others]
    return "\n".join([first.lstrip(" "), *moved])


def _renamed(new: str, names: dict[str, str]) -> str:
    for token in reversed(_tokens(new)):
        if token.text in names:
            new = new[: token.start] + names[token.text] + new[token.end :]
    return new


def _closest(matches: Sequence[Match]) -> list[Match]:
    """Returns the matches with the fewest other names.

    Where there are several matches, at least half of the names must be the same.
    """
    renamed = [sum(old != name for old, name in match.names.items()) for match in matches]
    return [
        match
        for match, count in zip(matches, renamed, strict=True)
        if len(matches) == 1 or (count == min(renamed) and 2 * count <= len(match.names))
    ]


def _matches(old: str, region: str) -> list[Match]:
    """Returns every place at which `old` fits, where identifiers may have other names."""
    pattern, _ = _counting(_tokens(old))
    source, groups = _counting(_tokens(region))
    found = []
    for at in range(len(source) - len(pattern) + 1):
        names = _names(pattern, source[at : at + len(pattern)])
        if names is None:
            continue
        last = at + len(pattern) - 1
        start, end = source[at].start, source[last].end
        before = source[at - 1].end if at else 0
        after = source[last + 1].start if last + 1 < len(source) else len(region)
        # A pair of parentheses is replaced as a whole: `return (` with its `)`.
        for opening, closing in groups:
            if start <= opening < end < closing:
                end = closing
            elif opening < start < closing <= end:
                start = opening
        if before <= start and end <= after:
            found.append(Match(start, end, names))
    return found


def _names(pattern: Sequence[_Token], source: Sequence[_Token]) -> dict[str, str] | None:
    """Returns the source's name of each identifier in the pattern, or None where they differ."""
    names: dict[str, str] = {}
    for mine, its in zip(pattern, source, strict=True):
        if mine.is_identifier and its.is_identifier:
            if names.setdefault(mine.text, its.text) != its.text:
                return None
        elif mine.text != its.text:
            return None
    return names if len({*names.values()}) == len(names) else None


class CountingTokens(NamedTuple):
    """The tokens of a text that count for a match."""

    tokens: list[_Token]
    groups: list[Span]
    """The pairs of parentheses that only group."""


def _counting(tokens: Sequence[_Token]) -> CountingTokens:
    """Leaves out parentheses that only group, and commas before closing brackets."""
    left_out: set[int] = set()
    groups = []
    opened: list[int] = []
    for at, token in enumerate(tokens):
        if token.text in {"(", "[", "{"}:
            opened.append(at)
        elif token.text in {")", "]", "}"}:
            if not opened:
                raise NoMatch(f"{token.text!r} closes a bracket that the old text does not open")
            begin = opened.pop()
            if tokens[at - 1].text == ",":
                left_out.add(at - 1)
            called = begin > 0 and tokens[begin - 1].ends_a_value
            if token.text == ")" and at > begin + 1 and not called:
                left_out |= {begin, at}
                groups.append(Span(tokens[begin].start, token.end))
    counting = [token for at, token in enumerate(tokens) if at not in left_out]
    return CountingTokens(counting, groups)


def _tokens(text: str) -> list[_Token]:
    """Returns the tokens of any run of Python with balanced brackets.

    An f-string is one token.
    """
    starts = [0]
    for line in f"{text}\n\n".split("\n"):
        starts.append(starts[-1] + len(line) + 1)
    found: list[_Token] = []
    depth, begin = 0, 0
    try:
        # Within parentheses the tokenizer asks nothing of the indentation.
        for token in tokenize.generate_tokens(io.StringIO(f"(\n{text}\n)").readline):
            start, end = (starts[row - 2] + column for row, column in (token.start, token.end))
            kind = tokenize.tok_name[token.type]
            begin = begin if depth else start
            depth += kind.endswith("STRING_START") - kind.endswith("STRING_END")
            if not depth and token.type not in _LAYOUT:
                found.append(_Token(text[begin:end], begin, end))
    except (tokenize.TokenError, SyntaxError) as error:
        raise NoMatch(f"{text!r} has no balanced brackets") from error
    return found[1:-2]
