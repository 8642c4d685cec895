"""The packages as levels, from the import-linter layers of pyproject.toml, and the imports."""

import importlib.util
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grimp

from tests.structure.measures import siblings

ROOT = Path(__file__).parents[2]
PACKAGE = "hybridkv"
SOURCES = ROOT / "src" / PACKAGE

_Imports = Mapping[str, Iterable[str]]


@dataclass(frozen=True, slots=True)
class Level:
    """Packages of one layer. Those of a `closed` level may not import each other."""

    packages: tuple[str, ...]
    closed: bool


def read_levels(config: Mapping[str, Any]) -> list[Level]:
    """The highest level first, from the first contract of layers in pyproject.toml."""
    contracts = config["tool"]["importlinter"]["contracts"]
    contract = next(one for one in contracts if one["type"] == "layers")
    (container,) = contract.get("containers", [""])
    levels = []
    for layer in contract["layers"]:
        names = [name.strip(" ()") for name in layer.replace("|", ":").split(":")]
        whole = tuple(f"{container}.{name}" if container else name for name in names)
        levels.append(Level(whole, ":" not in layer))
    return levels


def present_levels() -> list[Level]:
    """Of this checkout."""
    return read_levels(tomllib.loads((ROOT / "pyproject.toml").read_text()))


def present_imports() -> dict[str, set[str]]:
    """By module: those it imports, also within functions and for the type checker only."""
    spec = importlib.util.find_spec(PACKAGE)
    assert getattr(spec, "origin", "") == str(SOURCES / "__init__.py"), "another checkout is found"
    graph = grimp.build_graph(PACKAGE, cache_dir=None)
    return {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}


def arrows_up(levels: Iterable[Level], imports: _Imports) -> list[tuple[str, str]]:
    """Pairs of packages whose first imports the second, which the levels forbid."""
    place = {name: (at, level.closed) for at, level in enumerate(levels) for name in level.packages}
    up = []
    for one, targets in sorted(siblings(imports).get(PACKAGE, {}).items()):
        for other in sorted(targets & place.keys()):
            at, closed = place.get(one, (0, False))
            if at > place[other][0] or (at == place[other][0] and closed):
                up.append((one, other))
    return up


def rooms(levels: Iterable[Level], imports: _Imports, circles: Iterable[str]) -> str:
    """The levels as text, the highest first, each package with what it imports."""
    between = siblings(imports).get(PACKAGE, {})
    levels, lines = list(levels), []
    for at, level in enumerate(levels, 1):
        for name in level.packages:
            lines.append(f"{at:2}  {_arrows(name, between)}")
    named = {name for level in levels for name in level.packages}
    outside = sorted({one for one in imports if one.count(".") == 1} - named)
    lines += [f" -  {_arrows(name, between)}" for name in outside]
    up = [f"{_short(one)} -> {_short(other)}" for one, other in arrows_up(levels, imports)]
    lines += [
        "",
        f"circles: {'; '.join(circles) or 'none'}",
        f"arrows up: {', '.join(up) or 'none'}",
    ]
    return "\n".join(lines)


def _arrows(name: str, between: Mapping[str, set[str]]) -> str:
    targets = ", ".join(sorted(map(_short, between.get(name, ()))))
    return f"{_short(name):12} -> {targets}" if targets else _short(name)


def _short(name: str) -> str:
    return name.removeprefix(f"{PACKAGE}.")
