"""The measures, on sources whose values can be counted by hand."""

import pytest

from tests.structure.checks import wide_prose
from tests.structure.measures import (
    Handler,
    circles,
    measure,
    near_names,
    repeated_classes,
    siblings,
)
from tests.structure.rooms import Level, arrows_up, read_levels

BRANCHES = """
def branches(a, b):
    assert a
    if a and b or b:
        return [x for x in a if x]
    for _ in a:
        while b:
            b = 1 if a else 0
    try:
        match a:
            case 1: pass
            case _: pass
    except OSError: pass
"""
CLASSES = """
class Outer:
    first: int
    kinds: ClassVar[int] = 0
    constant = 1

    def __init__(self):
        self.first = 1
        self._second: int = 2
        self.third, other.fourth = 3, 4

    def read(self):
        return self.never_assigned
"""
HANDLERS = """
def narrow():
    try: pass
    except OSError: pass

class Room:
    def leaves(self):
        try: pass
        except (OSError, Exception):
            if self.bad:
                raise
        try: pass
        except BaseException: os._exit(1)

    def goes_on(self):
        with lock, contextlib.suppress(OSError, ValueError): pass
        def inner():
            try: pass
            except: pass
"""
DOCSTRINGS = '''
def told():
    """It is."""

def untold():
    def nested(): ...

def _private(): ...

class Public:
    def untold(self): ...

class _Private:
    def untold(self): ...
'''


def test_complexity_counts_every_branch() -> None:
    # assert, if, and, or, comprehension with if, for, while, conditional, two cases, except
    assert measure(BRANCHES).functions[0].complexity == 1 + 12
    assert measure("def straight(a):\n    return a\n").functions[0].complexity == 1


def test_attributes_are_fields_and_what_methods_assign_to_self() -> None:
    (outer,) = measure(CLASSES).classes
    assert (outer.attributes, outer.methods) == (3, 2)


def test_handlers_are_found_with_their_function_and_whether_they_go_on() -> None:
    module = measure(HANDLERS)
    assert module.handlers == (
        Handler("Room.leaves", "except (OSError, Exception)", False),
        Handler("Room.leaves", "except BaseException", False),
        Handler("Room.goes_on", "suppress(OSError, ValueError)", True),
        Handler("Room.goes_on.inner", "except", True),
    )
    assert module.excepts == 4


def test_docstrings_are_wanted_of_public_functions_only() -> None:
    functions = measure(DOCSTRINGS).functions
    wanted = {one.qualname: one.has_docstring for one in functions if one.needs_docstring}
    assert wanted == {"told": True, "untold": False, "Public.untold": False}


def test_lines_are_counted_of_modules_and_functions() -> None:
    module = measure(f"x = 1\n\ndef two():\n    return 2\n# {'x' * 98}\n# {'x' * 99}\n")
    assert (module.lines, module.functions[0].lines, module.wide) == (6, 2, (6,))


def test_class_names_that_stand_twice() -> None:
    modules = [measure("class A: ...\nclass B: ...", "a.py"), measure("class A: ...", "b.py")]
    assert repeated_classes(modules) == {"A": ["a.py", "b.py"]}


@pytest.mark.parametrize(
    ("one", "other", "near"),
    [
        ("plan", "plans", True),
        ("load", "road", True),
        ("slots", "lots", True),
        ("plan", "plan2b", False),
        ("abc", "acb", False),
        ("plan", "plan", False),
    ],
)
def test_names_that_differ_by_one_letter(one: str, other: str, near: bool) -> None:
    same_package = [measure("", f"core/{one}.py"), measure("", f"core/{other}/inner.py")]
    assert bool(near_names(same_package)) is near
    assert not near_names([measure("", f"core/{one}.py"), measure("", f"wire/{other}.py")])


def test_circles_are_found_whole() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [("b", "c")]
    assert circles({"a": {"b", "c"}, "b": {"c"}}) == []


def test_imports_between_siblings_stand_for_all_that_is_below_them() -> None:
    imports = {"p.a.x": {"p.b.y", "p.a.z", "p.a"}, "p.b.y": {"p.a.z"}, "p.a": {"p.a.x"}}
    between = siblings(imports)
    assert between == {"p": {"p.a": {"p.b"}, "p.b": {"p.a"}}, "p.a": {"p.a.x": {"p.a.z"}}}
    assert circles(between["p"]) == [("p.a", "p.b")]


def test_arrows_up_and_between_packages_that_may_not_know_each_other() -> None:
    layers = ["cli : testing", "client | (store)", "core"]
    contract = {"type": "layers", "containers": ["hybridkv"], "layers": layers}
    contracts = [{"type": "forbidden"}, contract]
    levels = read_levels({"tool": {"importlinter": {"contracts": contracts}}})
    assert levels[1] == Level(("hybridkv.client", "hybridkv.store"), closed=True)
    imports = {
        "hybridkv.cli.a": {"hybridkv.testing.b", "hybridkv.core.c"},
        "hybridkv.client.a": {"hybridkv.store.b"},
        "hybridkv.core.a": {"hybridkv.store.b"},
    }
    up = [("hybridkv.client", "hybridkv.store"), ("hybridkv.core", "hybridkv.store")]
    assert arrows_up(levels, imports) == up


def test_markdown_may_be_wide_in_tables_code_and_links_only() -> None:
    wide = "x" * 101
    link = f"see [here](https://example.org/{wide})"
    text = f"{wide}\n| {wide} |\n```\n{wide}\n```\n{link}\nhttps://example.org/{wide}\n- {wide}\n"
    assert list(wide_prose(text)) == [1, 8]
