"""What the sources violate, by check and item, before any exception is granted."""

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path

from tests.structure.handlers import HANDLERS, OWED
from tests.structure.measures import (
    COLUMNS_MAX,
    Module,
    circles,
    measure_tree,
    near_names,
    repeated_classes,
    siblings,
    wide_lines,
)
from tests.structure.rooms import ROOT, SOURCES, arrows_up, present_imports, present_levels

ATTRIBUTES_MAX = 20
COMPLEXITY_MAX = 15
LINES_MAX = 500
_LINK = re.compile(r"\]\([^)]*\)|<?https?://\S+")
_NOT_OURS = {"build", "dist", "node_modules"}

Found = Mapping[str, str]
"""By item: its value, for people."""


@cache
def sources() -> list[Module]:
    """Every module of the package."""
    return measure_tree(SOURCES)


@cache
def imports() -> dict[str, set[str]]:
    """The package's import graph."""
    return present_imports()


def attributes() -> Found:
    """Classes with too many instance attributes."""
    return {
        one.name: f"{one.attributes} attributes in {module.path}"
        for module in sources()
        for one in module.classes
        if one.attributes > ATTRIBUTES_MAX
    }


def complexity() -> Found:
    """Functions with too many branches."""
    return {
        one.qualname: f"complexity {one.complexity} in {module.path}"
        for module in sources()
        for one in module.functions
        if one.complexity > COMPLEXITY_MAX
    }


def module_lines() -> Found:
    """Modules that are too long."""
    long = [one for one in sources() if one.lines > LINES_MAX]
    return {Path(one.path).name: f"{one.lines} lines in {one.path}" for one in long}


def columns() -> Found:
    """Folders of Python files, and Markdown files, with lines that are too wide."""
    found = {}
    for folder in ("src", "tests"):
        wide = [f"{one.path}:{line}" for one in measure_tree(ROOT / folder) for line in one.wide]
        if wide:
            found[folder] = _wide(wide)
    for path in _markdown_files():
        if wide := [str(line) for line in wide_prose(path.read_text(encoding="utf-8"))]:
            found[path.relative_to(ROOT).as_posix()] = _wide(wide)
    return found


def class_names() -> Found:
    """Names that more than one class has."""
    return {name: ", ".join(paths) for name, paths in repeated_classes(sources()).items()}


def module_names() -> Found:
    """Pairs of names in one package that are easily confused."""
    return {f"{one}, {other}": "differ by one letter" for one, other in near_names(sources())}


def module_circles() -> Found:
    """Modules that import each other, directly or not."""
    return {", ".join(circle): "import each other" for circle in circles(imports())}


def package_circles() -> Found:
    """Packages that import each other through different modules, or a module beside them."""
    found = [circle for between in siblings(imports()).values() for circle in circles(between)]
    names = {", ".join(circle) for circle in found} - module_circles().keys()
    return dict.fromkeys(sorted(names), "import each other")


def imports_up() -> Found:
    """Packages that import one of a higher level."""
    up = arrows_up(present_levels(), imports())
    return {f"{one} -> {other}": "points up" for one, other in up}


def uncounted() -> Found:
    """Handlers that go on and are not counted yet."""
    return {one.anchor: one.counted for one in HANDLERS if one.counted.startswith(OWED)}


CHECKS: Mapping[str, Callable[[], Found]] = {
    check.__name__: check
    for check in (
        *(attributes, complexity, module_lines, columns, class_names, module_names),
        *(module_circles, package_circles, imports_up, uncounted),
    )
}


def handler_differences() -> list[str]:
    """Where the list of handlers and the code differ."""
    ours = Counter((one.anchor, one.what) for one in HANDLERS)
    code = Counter((one.anchor, one.what) for module in sources() for one in module.handlers)
    missing, stale = (code - ours).elements(), (ours - code).elements()
    return [
        *(f"not listed: {what} in {anchor}" for anchor, what in missing),
        *(f"listed, and not in the code: {what} in {anchor}" for anchor, what in stale),
    ]


def wide_prose(text: str) -> Iterator[int]:
    """Numbers of Markdown lines, from 1 on, that are too wide outside tables, code and links."""
    fence = ""
    for number, line in enumerate(text.splitlines(), 1):
        mark = re.match(r"\s*(```+|~~~+)", line)
        if mark and not fence:
            fence = mark[1]
        elif fence:
            fence = "" if line.strip().startswith(fence) else fence
        elif not line.lstrip().startswith("|") and wide_lines(_LINK.sub("]", line)):
            yield number


def _wide(places: list[str]) -> str:
    return f"{len(places)} lines over {COLUMNS_MAX} columns: {', '.join(places[:20])}"


def _markdown_files() -> list[Path]:
    files = []
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [one for one in folders if not one.startswith(".") and one not in _NOT_OURS]
        files += [Path(folder, name) for name in names if name.endswith(".md")]
    return sorted(files)
