"""`python -m tests.structure [--anchors] [TREE ...]`: prints what trees of Python sources measure.

`--rooms` prints the packages as levels, and `--write` makes the list of exceptions anew.
"""

import argparse
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tests.structure.checks import CHECKS, imports, module_circles, package_circles
from tests.structure.exceptions import ALLOWED
from tests.structure.measures import COLUMNS_MAX, Module, measure_tree
from tests.structure.rooms import ROOT, SOURCES, present_levels, rooms

CORE_PATH = ("core", "wire", "shm", "client", "store", "daemon", "vllm", "connector")
"""The product's core path, as folders of the package."""
ANCHORS = {
    "h11 0.16.0": ("h11==0.16.0", "h11", ["tests"]),
    "httpcore 1.0.9": ("httpcore==1.0.9", "httpcore", []),
    "zarr 3.1.6 storage": ("zarr==3.1.6", "zarr/storage", []),
}
"""By name: the requirement, the folder of its wheel, and the folders in it that are left out."""
ROWS = (
    "lines / modules",
    "longest function",
    "most attributes in a class",
    "most methods",
    "functions of complexity > 10",
    "catch-all handlers that go on",
    "`contextlib.suppress`",
    f"lines over {COLUMNS_MAX} columns",
    "public functions with a docstring",
)
CONSTANT = {
    "mini-sglang": ("8,081 / 90", "215", "17", "12", "1.8 %", "2 of 9", "0", "15", "-"),
    "nano-vllm": ("1,385 / 19", "55", "15", "15", "0.9 %", "0", "0", "38", "-"),
}
"""No registry has these two; their values were measured on the repositories in autumn 2026."""
FIRST_REASON = "until issue 12 is done"


def cells(modules: Sequence[Module]) -> tuple[str, ...]:
    """One column of the table, without its head."""
    functions = [one for module in modules for one in module.functions]
    classes = [one for module in modules for one in module.classes]
    handlers = [one for module in modules for one in module.handlers]
    excepts = sum(module.excepts for module in modules)
    goes_on = sum(one.goes_on and one.what.startswith("except") for one in handlers)
    public = [one for one in functions if one.needs_docstring]
    return (
        f"{sum(module.lines for module in modules):,} / {len(modules)}",
        str(max((one.lines for one in functions), default=0)),
        str(max((one.attributes for one in classes), default=0)),
        str(max((one.methods for one in classes), default=0)),
        _share(sum(one.complexity > 10 for one in functions), len(functions)),
        f"{goes_on} of {excepts}",
        str(sum(one.what.startswith("suppress") for one in handlers)),
        f"{sum(len(module.wide) for module in modules):,}",
        _share(sum(one.has_docstring for one in public), len(public)),
    )


def table(columns: Mapping[str, Sequence[str]]) -> str:
    """The columns side by side in Markdown, with the names of ROWS before them."""
    lines = [
        ["", *columns],
        ["---"] * (len(columns) + 1),
        *zip(ROWS, *columns.values(), strict=True),
    ]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def anchors() -> dict[str, tuple[str, ...]]:
    """The columns of the anchors, whose wheels pip downloads."""
    columns: dict[str, tuple[str, ...]] = dict(CONSTANT)
    with tempfile.TemporaryDirectory() as name:
        for title, (requirement, folder, without) in ANCHORS.items():
            place = Path(name, folder.replace("/", "-"))
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
            command += ["--only-binary", ":all:", "--dest", str(place), requirement]
            subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
            (wheel,) = place.glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(place)
            columns[title] = cells(measure_tree(place / folder, without))
    return columns


def sizes(modules: Iterable[Module]) -> str:
    """Lines of each package, of all, and of the core path."""
    lines: Counter[str] = Counter()
    core = 0
    for module in modules:
        first, slash, _ = module.path.partition("/")
        lines[first if slash else "(root)"] += module.lines
        if first in CORE_PATH:
            core += module.lines
    missing = [name for name in CORE_PATH if name not in lines]
    note = f"; there is no {', '.join(missing)}" if missing else ""
    rows = [f"{count:7,}  {name}" for name, count in sorted(lines.items())]
    total = f"{lines.total():7,}  all of {SOURCES.relative_to(ROOT)}"
    return "\n".join([*rows, total, f"{core:7,}  the core path ({', '.join(CORE_PATH)}{note})"])


def written_exceptions() -> str:
    """The list of exceptions as Python, with the reasons of those that stand in it now."""
    text = (Path(__file__).parent / "exceptions.py").read_text()
    begin = text.partition("\nALLOWED")[0]
    lines = [begin, "ALLOWED: dict[str, dict[str, str]] = {"]
    for name, check in CHECKS.items():
        if items := sorted(check()):
            reasons = ALLOWED.get(name, {})
            entries = [f'        "{item}": "{reasons.get(item, FIRST_REASON)}",' for item in items]
            lines += [f'    "{name}": {{', *entries, "    },"]
    return "\n".join([*lines, "}", ""]).replace("= {\n}\n", "= {}\n")


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.structure", description=__doc__)
    parser.add_argument("trees", metavar="TREE", nargs="*", type=Path, help="instead of src")
    parser.add_argument("--anchors", action="store_true", help="add the projects we compare with")
    parser.add_argument("--rooms", action="store_true", help="print the packages as levels instead")
    parser.add_argument("--write", action="store_true", help="make exceptions.py anew instead")
    options = parser.parse_args()
    if options.write:
        (Path(__file__).parent / "exceptions.py").write_text(written_exceptions())
    elif options.rooms:
        print(rooms(present_levels(), imports(), [*module_circles(), *package_circles()]))
    else:
        trees = {str(tree): tree for tree in options.trees} or {"hybridkv": SOURCES}
        columns = {name: cells(measure_tree(tree)) for name, tree in trees.items()}
        print(table(columns | (anchors() if options.anchors else {})))
        if not options.trees:
            print(sizes(measure_tree(SOURCES)))
    return 0


def _share(part: int, whole: int) -> str:
    return f"{100 * part / max(whole, 1):.1f} %"


if __name__ == "__main__":
    sys.exit(main())
