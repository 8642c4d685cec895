"""The table of the daemon's settings: where each may be given, and which place wins."""

from dataclasses import fields
from typing import Any, NamedTuple

import pytest

from hybridkv.core.daemon_settings import DAEMON_SETTINGS, DaemonSettings, resolve
from hybridkv.core.errors import ConfigError
from hybridkv.core.settings import parse_settings


class GivenValues(NamedTuple):
    """One setting, as it is given in each place."""

    word: str  # Of the command line.
    variable: str
    in_file: Any


GIVEN: dict[str, GivenValues] = {
    "socket": GivenValues("/a/d.sock", "/b/d.sock", "/c/d.sock"),
    "ram": GivenValues("1GiB", "2GiB", "3GiB"),
    "shm_dir": GivenValues("/a", "/b", "/c"),
    "arena_ttl": GivenValues("1min", "2h", 30),
    "salt_quota": GivenValues("1MiB", "2MiB", 4096),
    "user_quota": GivenValues("1MiB", "2MiB", 4096),
    "metrics_port": GivenValues("1", "2", 3),
    "metrics_host": GivenValues("127.0.0.2", "::1", "127.0.0.3"),
    "metrics_token": GivenValues("file:/a", "file:/b", "file:/c"),
    "fresh": GivenValues("true", "1", True),
    "disk": GivenValues("/a", "/b", "/c"),
    "disk_bytes": GivenValues("1MiB", "2MiB", "3MiB"),
    "tiers": GivenValues("disk:///a", "disk:///b s3://c/d", ["disk:///c"]),
    "node": GivenValues("a", "b", "c"),
    "traces": GivenValues("http://a", "http://b", "https://c"),
    "log_level": GivenValues("debug", "warning", "error"),
    "log_format": GivenValues("json", "json", "json"),
    "group": GivenValues("a", "b", "c"),
    "log_file": GivenValues("/a", "/b", "auto"),
}


@pytest.mark.parametrize("without", ["salt_quota", "user_quota"])
def test_every_setting_may_be_given_in_each_place(without: str) -> None:
    """But for the two quotas, of which there is one."""
    assert GIVEN.keys() == DAEMON_SETTINGS.keys()
    all_given = {key: given for key, given in GIVEN.items() if key != without}
    words = {
        key: [given.word] if DAEMON_SETTINGS[key].is_list else given.word
        for key, given in all_given.items()
    }
    variables = {DAEMON_SETTINGS[key].variable: given.variable for key, given in all_given.items()}
    file = {key: given.in_file for key, given in all_given.items()}
    default = DaemonSettings()
    places = [
        resolve(words, {}, {}, ""),
        resolve({}, variables, {}, ""),
        resolve({}, {}, file, "f.toml"),
    ]
    for settings in places:
        for field in fields(settings):
            is_given = field.name != DAEMON_SETTINGS[without].field
            is_changed = getattr(settings, field.name) != getattr(default, field.name)
            assert is_changed == is_given, field.name
    assert resolve(words, variables, file, "f.toml") == places[0]
    assert resolve({}, variables, file, "f.toml") == places[1]
    assert resolve({}, {}, {}, "") == default


def test_each_setting_is_of_the_place_that_has_it() -> None:
    """A variable without a text is none."""
    variables = {"HYBRIDKV_NODE": "variable", "HYBRIDKV_RAM": "", "HYBRIDKV_WIDEN": "1:2"}
    settings = resolve({"disk": "/word"}, variables, {"ram": 4096, "node": "file"}, "f.toml")
    assert settings == DaemonSettings(disk="/word", node="variable", ram_bytes=4096)
    off = resolve({"fresh": False}, {"HYBRIDKV_FRESH": "true"}, {}, "")
    assert not off.fresh


@pytest.mark.parametrize("without", ["salt_quota", "user_quota"])
def test_a_daemon_that_auto_starts_takes_every_setting(without: str) -> None:
    """The words that `serve` is given say what the keys say."""
    left_out = ("socket", without)
    extra = {key: value for key, (_, _, value) in GIVEN.items() if key not in left_out}
    settings = parse_settings({**extra, "config": "/etc/hybridkv.toml"})
    assert settings.daemon == resolve({}, {}, extra, "f.toml")
    expected = ["--config", "/etc/hybridkv.toml"]
    for key, row in DAEMON_SETTINGS.items():
        if key not in left_out:
            expected += row.words(getattr(settings.daemon, row.field))
    assert list(settings.daemon_options) == expected
    assert "--fresh" in parse_settings({"fresh": True}).daemon_options
    assert "--no-fresh" in parse_settings({"fresh": False}).daemon_options
    with pytest.raises(ConfigError, match="unknown key 'socket'"):
        parse_settings({"socket": "/a/d.sock"})


@pytest.mark.parametrize(
    ("words", "variables", "file", "says"),
    [
        ({"ram": "lots"}, {}, {}, r"^ram='lots' is not a size; write it like"),
        ({}, {"HYBRIDKV_RAM": "lots"}, {}, r"^HYBRIDKV_RAM='lots' is not a size; write it like"),
        ({}, {}, {"ram": "lots"}, r"^f.toml: ram='lots' is not a size; write it like"),
        ({}, {}, {"xyzzy": 1}, "^f.toml: unknown key 'xyzzy'; .hybridkv serve --help. lists all$"),
        ({}, {}, {"rma": "1GiB"}, r"^f.toml: unknown key 'rma'; did you mean 'ram'\?$"),
        ({}, {"HYBRIDKV_FRESH": "perhaps"}, {}, r"^HYBRIDKV_FRESH='perhaps' .*; true works$"),
        (
            {},
            {"HYBRIDKV_METRICS_PORT": "tcp://10.0.0.1:80"},
            {},
            "^HYBRIDKV_METRICS_PORT=tcp://10.0.0.1:80 must be from 0 to 65535, .*; 9477 works$",
        ),
        ({}, {}, {"tiers": "disk:///a"}, r"^f.toml: tiers='disk:///a' must be a list of URLs; "),
        ({}, {}, {"log_file": 5}, r"^f.toml: log_file=5 must be a non-empty text; "),
        ({}, {}, {"traces": "ftp://x"}, r"^f.toml: traces: 'ftp://x' is no URL of a collector; "),
        ({}, {}, {"metrics_host": "gpu7"}, "^f.toml: metrics_host='gpu7' must be the address .*"),
        ({"metrics_token": "/my/secret"}, {}, {}, "^metrics-token: what is given names .* works$"),
        (
            {"salt_quota": "1MiB"},
            {},
            {"user_quota": 4096},
            "^user-quota: it .* one of the two works$",
        ),
        ({}, {"HYBRIDKV_DISK_BYTES": "1GiB"}, {}, "^disk-bytes: it needs a directory; .* works$"),
    ],
)
def test_an_error_names_the_place_and_what_works(
    words: dict[str, object], variables: dict[str, str], file: dict[str, object], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        resolve(words, variables, file, "f.toml")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "169.254.1.1", "fe80::1"])
def test_another_address_than_the_loopbacks_needs_a_token(host: str) -> None:
    says = f"^metrics-host={host} is not on the loopback .*; --metrics-token file:.* works$"
    with pytest.raises(ConfigError, match=says):
        resolve({"metrics_host": host}, {}, {}, "")
    assert (
        resolve({"metrics_host": host}, {}, {"metrics_token": "file:/t"}, "").metrics_host == host
    )


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1"])
def test_the_loopback_needs_no_token(host: str) -> None:
    assert resolve({"metrics_host": host}, {}, {}, "").metrics_token_file is None


def test_a_token_that_is_given_is_not_shown() -> None:
    with pytest.raises(ConfigError) as refused:
        resolve({"metrics_token": "0123456789abcdef"}, {}, {}, "")
    assert "0123456789abcdef" not in str(refused.value)
