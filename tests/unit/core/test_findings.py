"""Findings as sentences."""

import pytest

from hybridkv.core.errors import ConfigError
from hybridkv.core.findings import Verdict, fail, failure, ok, raise_first, warn


def test_an_error_of_ours_is_the_same_sentence_as_a_finding() -> None:
    for text in (
        "a=1 is odd; 2 works",
        "unknown key 'sever'; did you mean 'server'?",
        "a; b; c works",
        "no remedy",
    ):
        found = failure("check", ConfigError(text))
        assert found.verdict is Verdict.FAIL
        assert found.sentence == text


def test_the_first_failure_is_raised_and_warnings_pass() -> None:
    passed = [ok("a", "fine"), warn("b", "slow", "c works")]
    assert raise_first(iter(passed)) == passed
    with pytest.raises(ConfigError, match=r"^first; x works$"):
        raise_first([*passed, fail("d", "first", "x works"), fail("e", "second")])
