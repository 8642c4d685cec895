"""The URL of a tier: what it says, and one sentence for whatever it cannot say."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.core.errors import ConfigError
from hybridkv.core.tier_urls import TIMEOUT_SECONDS, TierSpec, WritePolicy, disk_url, parse_tier


@pytest.mark.parametrize(
    ("url", "spec"),
    [
        ("disk:///var/cache/kv", TierSpec(kind="disk", location="disk:///var/cache/kv")),
        (
            "disk:///var/cache/kv?bytes=200GiB",
            TierSpec(kind="disk", location="disk:///var/cache/kv", max_bytes=200 << 30),
        ),
        (
            "disk:///with space/and#hash?bytes=1KiB",
            TierSpec(kind="disk", location="disk:///with space/and#hash", max_bytes=1024),
        ),
        (
            "valkey://127.0.0.1:6379/0?write=off&timeout=0.5",
            TierSpec(
                kind="valkey",
                location="valkey://127.0.0.1:6379/0",
                write=WritePolicy.OFF,
                timeout_seconds=0.5,
            ),
        ),
        (
            "s3://bucket/prefix?endpoint=http://127.0.0.1:9000&hourly=10GiB&write=back",
            TierSpec(
                kind="s3",
                location="s3://bucket/prefix",
                write=WritePolicy.BACK,
                hourly_bytes=10 << 30,
                options={"endpoint": "http://127.0.0.1:9000"},
            ),
        ),
        (
            "valkey+unix:///run/v.sock",
            TierSpec(kind="valkey+unix", location="valkey+unix:///run/v.sock"),
        ),
    ],
)
def test_what_a_url_says(url: str, spec: TierSpec) -> None:
    assert parse_tier(url, "tier") == spec


@pytest.mark.parametrize(
    ("url", "says"),
    [
        (
            "",
            "tier: that is not the URL of a tier; "
            r'"disk:///var/cache/hybridkv\?bytes=100GiB" works',
        ),
        ("/var/cache", "is not the URL of a tier; .* works"),
        ("disk:", "is not the URL of a tier; .* works"),
        ("disk://[", "is not the URL of a tier; .* works"),
        (
            "disk://relative/path",
            'tier: "disk://relative/path" needs an absolute path; "disk:///var/cache/.*" works',
        ),
        ("disk:/var", 'needs an absolute path; "disk:///.*" works'),
        ("DISK:///var", 'needs an absolute path; "disk:///.*" works'),
        ("disk:///a?bytes=lots", "tier: bytes='lots' is not a size; write it like"),
        ("disk:///a?bytes", "tier: bytes='' is not a size"),
        ("disk:///a?bytes=0", "tier: bytes='0' must be larger than zero"),
        ("disk:///a?hourly=-1", "tier: hourly='-1' is not a size"),
        (
            "disk:///a?write=sometimes",
            "tier: write='sometimes' must be one of through, back, off; \"through\" works",
        ),
        ("disk:///a?write=", "tier: write='' must be one of"),
        ("disk:///a?timeout=0", "tier: timeout='0' must be seconds from 0.01 to 60; 5 works"),
        ("disk:///a?timeout=61", "timeout='61' must be seconds"),
        ("disk:///a?timeout=nan", "timeout='nan' must be seconds"),
        ("disk:///a?timeout=soon", "timeout='soon' must be seconds"),
        ("disk:///a?bytes=1GiB&bytes=2GiB", "tier: bytes is given twice; once works"),
    ],
)
def test_what_a_url_cannot_say(url: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_tier(url, "tier")


def test_what_only_a_kind_knows_is_its_own_to_refuse() -> None:
    spec = parse_tier("s3://bucket?endpont=x", "tier")
    assert spec.known_options("endpont") == {"endpont": "x"}
    with pytest.raises(
        ConfigError, match=r"tier s3://bucket: unknown option 'endpont'; did you mean 'endpoint'\?"
    ):
        spec.known_options("endpoint", "region")
    with pytest.raises(ConfigError, match=r"unknown option 'byte'; did you mean 'bytes'\?"):
        parse_tier("disk:///a?byte=1", "tier").known_options()


def test_a_bound_is_refused_where_others_bound_the_tier() -> None:
    """And nobody is led to it."""
    spec = parse_tier("s3://bucket?byte=1GiB", "tier")
    says = (
        "unknown option 'byte'; endpoint, region, write, timeout, hourly, codec, key, class work$"
    )
    with pytest.raises(ConfigError, match=says):
        spec.known_options("endpoint", "region", bounded_by="others")
    assert parse_tier("s3://bucket", "tier").known_options(bounded_by="others") == {}
    says = "^tier redis://host/0: bytes= is not taken, since others bound it; a URL without"
    bounded = parse_tier("redis://:qzxjwv@host/0?bytes=1GiB", "tier")
    with pytest.raises(ConfigError, match=says):
        bounded.known_options(bounded_by="others")


def test_a_directory_as_a_url() -> None:
    assert parse_tier(disk_url("/var/cache", None), "disk") == TierSpec(
        kind="disk", location="disk:///var/cache"
    )
    assert parse_tier(disk_url("/var/cache", "2GiB"), "disk").max_bytes == 2 << 30


@given(st.text(max_size=60) | st.from_regex(r"[a-z0-9]{1,6}://?/?[^\n]{0,40}", fullmatch=True))
def test_anything_is_a_tier_or_one_sentence(url: str) -> None:
    message = ""
    try:
        spec = parse_tier(url, "tier")
    except ConfigError as error:
        message = str(error)
    if message:
        assert message.startswith("tier")
        assert message.count("\n") <= url.count("\n")
    else:
        assert 0.01 <= spec.timeout_seconds <= 60.0
        assert spec.max_bytes is None or spec.max_bytes > 0
        assert spec.location == url.partition("?")[0]
        assert "timeout" in url or spec.timeout_seconds == TIMEOUT_SECONDS


@pytest.mark.parametrize(
    "url", ["disk:///var/\udcff", "disk:///var/\0", "s3://bucket?endpoint=\udcff"]
)
def test_a_url_is_text(url: str) -> None:
    with pytest.raises(ConfigError, match=r"tier: .* is not UTF-8; .* works"):
        parse_tier(url, "tier")
