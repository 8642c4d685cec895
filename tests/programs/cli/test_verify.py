"""The table of `hybridkv verify`; tests/engine/test_verify.py has the engines."""

import pytest

from hybridkv.cli.verify import print_arms
from hybridkv.lab.judging import VerifyArm


def test_a_difference_that_may_be_is_not_shown_like_one_that_is_wrong(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The engine alone may compute other last bits than its own hit has."""
    arms = [
        VerifyArm("no connector", same_tokens=True, same_logprobs=False, ok=True),
        VerifyArm("warm", same_tokens=True, same_logprobs=False),
    ]
    print_arms("verify", arms)
    rows = {line.split("│")[1].strip(): line for line in capsys.readouterr().out.splitlines()[4:-1]}
    assert "may differ" in rows["no connector"]
    assert "DIFFERENT" not in rows["no connector"]
    assert "DIFFERENT" in rows["warm"]
