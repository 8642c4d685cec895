"""`hybridkv tier-check`: the conformance suite of tiers, over a URL."""

import argparse
import importlib
import os
from typing import Any

from hybridkv.cli.arguments import Argument, command, option, switch
from hybridkv.core.errors import ConfigError
from hybridkv.core.tier_urls import parse_tier
from hybridkv.tiers.contract import TierError

SUITE = "hybridkv.tiers.conformance.url_suite"
CLAIMS = {
    "persistence": "its records end with the process",
    "sharing": "its storage takes one daemon at a time",
    "prompt-discards": "what one daemon discards is missing for others only later",
}
HANG_SECONDS = 300


@command(
    Argument("url", {"help": "the tier, as of hybridkv serve; its storage must be empty"}),
    option("--away URL", "a tier of the same kind whose storage is not there"),
    option("--stop COMMAND", "a shell command that stops the storage, which --start starts"),
    option("--start COMMAND", "a shell command that starts the storage again"),
    option(
        "--without PROMISE",
        "leave out the tests of a promise that it does not make; may be given several times: "
        + "; ".join(f"{name}: {meaning}" for name, meaning in CLAIMS.items()),
        action="append",
        choices=list(CLAIMS),
        default=[],
    ),
    option("--only EXPRESSION", "run the tests whose names match, as pytest's -k"),
    switch("--empty", "remove what the storage holds now"),
)
def run_tier_check(arguments: argparse.Namespace) -> int:
    """Run the suite. Returns 1 where a test failed."""
    try:
        pytest = importlib.import_module("pytest")
    except ImportError as error:
        raise ConfigError(
            "tier-check needs pytest", "pip install 'hybridkv[check]' works"
        ) from error
    suite = importlib.import_module(SUITE)
    if bool(arguments.stop) != bool(arguments.start):
        what = "tier-check: --stop and --start need each other"
        raise ConfigError(what, '--stop "kill -STOP PID" --start "kill -CONT PID" works')
    checked = suite.CheckedUrl(
        url=arguments.url,
        away_url=arguments.away or "",
        stop=arguments.stop or "",
        start=arguments.start or "",
        persistent="persistence" not in arguments.without,
        shared="sharing" not in arguments.without,
        discards_for_all="prompt-discards" not in arguments.without,
    )
    shown = parse_tier(arguments.url, "tier").shown
    _check_empty(arguments, suite, shown)
    place = str(suite.__file__)
    options = [
        # Nothing is read of the directory in which the command runs, and nothing is written.
        *("-c", os.devnull, "--rootdir", os.path.dirname(place), "-p", "no:cacheprovider"),
        *("--import-mode=importlib", "-o", f"faulthandler_timeout={HANG_SECONDS}"),
        *("-o", "faulthandler_exit_on_timeout=true", "-rs", "-v", "--no-header"),
        *(["-k", arguments.only] if arguments.only else []),
    ]
    plugin = suite.CheckedUrlPlugin(checked)
    status = int(pytest.main([place, *options], plugins=[plugin]))
    verdict = "keeps" if status == 0 else "does not keep"
    print(f"{shown} {verdict} the contract of tiers, as far as it was tested")
    return int(status != 0)


def _check_empty(arguments: argparse.Namespace, suite: Any, shown: str) -> None:
    """Raise ConfigError unless the storage is empty or may be emptied, and can be used."""
    try:
        if arguments.empty:
            suite.empty_storage(arguments.url)
        if count := suite.count_records(arguments.url):
            what = f"tier-check: {shown} has {count} records, which the tests would remove"
            raise ConfigError(what, "an empty one works, and --empty removes them")
    except TierError as error:
        what = f"tier-check: {shown} cannot be used ({error})"
        raise ConfigError(what, "a tier whose storage is there works") from error
