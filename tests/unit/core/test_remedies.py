"""A remedy is tried in the case in which it is given: the setting takes the value that it names."""

from dataclasses import fields
from typing import Any

import pytest

from hybridkv.core.daemon_settings import DAEMON_SETTINGS
from hybridkv.core.errors import ConfigError
from hybridkv.core.option_parsers import Parser
from hybridkv.core.settings import Settings
from hybridkv.core.tier_urls import parse_tier

SETTINGS = {row.name: row.metadata["parse"] for row in fields(Settings) if row.metadata}
WRONG: tuple[Any, ...] = (
    *("", " ", "x" * 300, "\0", "\ud800", "relative/path", "/a?b", "unix://", "-1", "1e99"),
    *("disk://relative", "s3:", "file:", "0", "nan", "1000000d", "8 PiB", "9999999TiB"),
    *(None, True, -1, 0, 2.5, 1 << 70, float("nan"), float("inf"), [], [1], ["/a"], ["x:"], {}),
)
QUERIES = ("write=no", "timeout=0", "bytes=many", "hourly=-1", "codec=zip", "key=/tmp/key")


def refusal(parse: Parser, given: Any) -> ConfigError | None:
    try:
        parse(given, "setting")
    except ConfigError as error:
        return error
    return None


def tried(parse: Parser, is_list: bool = False) -> int:
    """Try the remedy of every wrong value. Returns how many values were wrong.

    In a setting that is a list, the remedy of an item is an item.
    """
    refusals = [error for wrong in WRONG if (error := refusal(parse, wrong)) is not None]
    for error in refusals:
        value = error.value
        assert value is not None, f"{error} names no value"
        items = value if isinstance(value, list) else [value]
        parse(items if is_list else value, "setting")
        shown = f"{items[0]:g}" if isinstance(value, float) else str(items[0])
        assert shown.lower() in error.remedy.lower()
    return len(refusals)


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_an_engine(name: str) -> None:
    assert tried(SETTINGS[name])


@pytest.mark.parametrize("key", DAEMON_SETTINGS)
def test_settings_of_a_daemon(key: str) -> None:
    assert tried(DAEMON_SETTINGS[key].parse, DAEMON_SETTINGS[key].is_list)


@pytest.mark.parametrize("query", QUERIES)
def test_options_of_a_tier(query: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_tier(f"disk:///a?{query}", "tier")
    name = query.partition("=")[0]
    parse_tier(f"disk:///a?{name}={refused.value.value}", "tier")


def test_urls_of_tiers() -> None:
    for wrong in ("\ud800", "nowhere", "disk:", "disk://relative"):
        with pytest.raises(ConfigError) as refused:
            parse_tier(wrong, "tier")
        parse_tier(str(refused.value.value), "tier")
