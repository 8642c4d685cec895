"""The structure of the sources stays within its limits."""

import pytest

from tests.structure.checks import CHECKS, handler_differences, sources
from tests.structure.exceptions import ALLOWED
from tests.structure.handlers import ENDS, HANDLERS, NO, OWED, RAISED


@pytest.mark.parametrize("check", CHECKS)
def test_nothing_violates_the_limits_but_the_listed_exceptions(check: str) -> None:
    found, allowed = CHECKS[check](), ALLOWED.get(check, {})
    wrong = [f"{item}: {value}" for item, value in found.items() if item not in allowed]
    stale = [item for item in allowed if item not in found]
    wrong += [f"{item}: this exception is not needed any more" for item in stale]
    assert not wrong, f"{check}:\n  " + "\n  ".join(wrong)


def test_every_exception_belongs_to_a_check_and_has_a_reason() -> None:
    assert ALLOWED.keys() <= CHECKS.keys()
    assert all(reason for allowed in ALLOWED.values() for reason in allowed.values())


def test_every_handler_that_goes_on_is_listed() -> None:
    wrong = handler_differences()
    assert not wrong, "\n  ".join(["tests/structure/handlers.py:", *wrong])


def test_a_handler_is_listed_as_leaving_exactly_if_it_leaves() -> None:
    leaves = {(one.anchor, one.what) for one in HANDLERS if one.counted in (RAISED, ENDS)}
    handlers = [one for module in sources() for one in module.handlers]
    code = {(one.anchor, one.what) for one in handlers if not one.goes_on}
    assert leaves == code


def test_the_counters_of_the_list_are_names_in_the_code() -> None:
    words = frozenset().union(*(module.words for module in sources()))
    for one in HANDLERS:
        if one.counted not in (RAISED, ENDS) and not one.counted.startswith((NO, OWED)):
            begin, star, _ = one.counted.partition("*")
            assert begin in words or (star and any(word.startswith(begin) for word in words)), one
