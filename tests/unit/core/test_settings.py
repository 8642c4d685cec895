"""Settings, sizes and paths: every error names the setting and a value that works."""

import math

import pytest

from hybridkv.core.durations import format_duration, parse_duration
from hybridkv.core.errors import ConfigError
from hybridkv.core.paths import check_socket_path, default_socket, socket_of_server
from hybridkv.core.policies import LoadPolicy
from hybridkv.core.settings import Settings, parse_settings
from hybridkv.core.sizes import format_size, parse_size
from hybridkv.core.tier_urls import parse_tier


def test_defaults() -> None:
    assert parse_settings({}) == Settings() == parse_settings({"sub_block_hits": "auto"})


def test_every_key_is_read() -> None:
    extra = {
        "server": "unix:///tmp/x/daemon.sock",
        "ram": "2GiB",
        "hybrid_chunk_size": "512",
        "load_timeout_seconds": 5,
        "lookup_timeout_ms": 50,
        "store_generated": False,
        "checksum": "paranoid",
        "weights_identity": "v1",
        "share_tp": 2,
        "disk": "/var/cache/kv",
        "disk_bytes": "200 GiB",
        "tiers": ["valkey://127.0.0.1:6379?write=back", "disk:///mnt/shared"],
        "load_policy": "always",
        "salt_quota": 4096,
    }
    settings = parse_settings(extra)
    assert settings.daemon.ram_bytes == 2 << 30
    assert (
        settings.hybrid_chunk_size,
        settings.load_timeout_seconds,
        settings.lookup_timeout_ms,
    ) == (512, 5.0, 50.0)
    assert isinstance(settings.hybrid_chunk_size, int), "a text is taken for the number it is (B12)"
    assert (settings.store_generated, settings.checksum, settings.weights_identity) == (
        False,
        "paranoid",
        "v1",
    )
    assert settings.share_tp == 2
    assert settings.load_policy is LoadPolicy.ALWAYS
    assert tuple(settings.daemon.tier_urls()) == (
        "disk:///var/cache/kv?bytes=214748364800",
        "valkey://127.0.0.1:6379?write=back",
        "disk:///mnt/shared",
    )
    assert settings.daemon_options == (
        *("--ram", str(2 << 30), "--salt-quota", "4096"),
        *("--disk", "/var/cache/kv", "--disk-bytes", str(200 << 30)),
        *("--tier", "valkey://127.0.0.1:6379?write=back", "--tier", "disk:///mnt/shared"),
    )


@pytest.mark.parametrize(
    ("extra", "tiers"),
    [
        ({"disk": "/a"}, ("disk:///a",)),
        ({"disk": "/a", "disk_bytes": 4096}, ("disk:///a?bytes=4096",)),
        ({"disk_bytes": "1MiB", "disk": "/a"}, ("disk:///a?bytes=1048576",)),
        ({"disk": "/with space", "disk_bytes": "1 MiB"}, ("disk:///with space?bytes=1048576",)),
        ({"disk": None}, ()),
        ({"tiers": []}, ()),
        ({"tiers": ["disk:///b"], "disk": "/a"}, ("disk:///a", "disk:///b")),
    ],
)
def test_tiers(extra: dict[str, object], tiers: tuple[str, ...]) -> None:
    settings = parse_settings(extra)
    assert tuple(settings.daemon.tier_urls()) == tiers
    assert [parse_tier(url, "tier").kind for url in tiers] == ["disk"] * len(tiers)


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"sever": "auto"}, "unknown key 'sever'; did you mean 'server'"),
        ({"load_weight": 2}, "is for a child of MultiConnector"),
        ({"chunk_size": 1}, "did you mean 'hybrid_chunk_size'"),
        ({"ram_bytes": 1}, "did you mean 'ram'"),
        ({"server": "localhost:5555"}, r'server=.* must be "auto" or a socket like "unix:///'),
        ({"ram": "lots"}, 'ram=.*write it like "1GiB"'),
        ({"ram": True}, 'ram=.*write it like "1GiB"'),
        ({"ram": 0}, "ram=.*larger than zero"),
        ({"hybrid_chunk_size": -1}, "hybrid_chunk_size=-1.*1024 works"),
        (
            {"hybrid_chunk_size": 1024.9},
            "hybrid_chunk_size=1024.9 must be a whole number from 1 to .*; 1024 works",
        ),
        ({"hybrid_chunk_size": "1024.9"}, "hybrid_chunk_size='1024.9' must be a whole number"),
        ({"load_timeout_seconds": 300}, "load_timeout_seconds=300.*from 0.001 to 30; 10 works"),
        ({"lookup_timeout_ms": "soon"}, "lookup_timeout_ms='soon'.*100 works"),
        ({"store_generated": "yes"}, "store_generated.*true works"),
        ({"checksum": True}, 'checksum=True.*"on" works'),
        (
            {"disk": "cache"},
            r"disk='cache' must be an absolute path without '\?'; \"/var/cache/hybridkv\" works",
        ),
        ({"disk": 5}, "disk=5 must be an absolute path"),
        ({"disk": "/a?b"}, r"disk='/a\?b' must be an absolute path without '\?'"),
        ({"disk": "/a", "disk_bytes": "lots"}, "disk_bytes='lots' is not a size"),
        ({"disk": "/a", "disk_bytes": 0}, "disk_bytes=0 must be larger than zero"),
        ({"disk_bytes": "1GiB"}, "disk_bytes='1GiB' needs a directory; .* works"),
        ({"tiers": "disk:///a"}, "tiers='disk:///a' must be a list of URLs; .* works"),
        ({"tiers": [5]}, r"tiers=\[5\] must be a list of URLs"),
        ({"tiers": ["disk://["]}, r"tiers: that is not the URL of a tier; .* works"),
        ({"tiers": ["disk:///a?write=no"]}, "tiers: write='no' must be one of"),
        (
            {"load_policy": "sometimes"},
            "load_policy='sometimes' must be one of faster, always, never; .faster. works",
        ),
        ({"load_policy": None}, "load_policy=None must be one of"),
        ({"xyzzy": 1}, "unknown key 'xyzzy'; docs/configuration.md lists all keys$"),
        ({"disc": "/a"}, "unknown key 'disc'; did you mean 'disk'"),
        ({"weights_identity": ""}, 'weights_identity.*"my-model-v1" works'),
        ({"share_tp": 0, "weights_identity": "v1"}, "share_tp=0 must be a whole number.*2 works"),
        (
            {"share_tp": 2},
            'share_tp=2 needs a name for the weights; "weights_identity": "my-model-v1" works',
        ),
    ],
)
def test_bad_settings(extra: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_settings(extra)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1GiB", 1 << 30),
        ("512 mib", 512 << 20),
        ("1.5k", 1536),
        ("2GB", 2 * 10**9),
        ("4096", 4096),
        (7, 7),
    ],
)
def test_sizes(text: str | int, size: int) -> None:
    assert parse_size(text, "ram") == size


def test_sizes_as_people_read_them() -> None:
    assert [format_size(n) for n in (0, 1023, 1024, 1536, 5 << 20, (3 << 30) // 2)] == [
        "0B",
        "1023B",
        "1KiB",
        "1.5KiB",
        "5MiB",
        "1.5GiB",
    ]


@pytest.mark.parametrize(
    ("given", "seconds", "shown"),
    [
        ("90s", 90, "1.5min"),
        ("30 min", 1800, "30min"),
        (3600, 3600, "1h"),
        ("1.5d", 129600, "1.5d"),
        (0, 0, "0s"),
        ("never", math.inf, "never"),
    ],
)
def test_durations(given: object, seconds: float, shown: str) -> None:
    assert parse_duration(given, "arena-ttl") == seconds
    assert format_duration(seconds) == shown


@pytest.mark.parametrize("given", ["", "soon", "1 fortnight", "-1s", True, "400d", math.nan])
def test_what_is_no_duration(given: object) -> None:
    with pytest.raises(ConfigError, match=r"^arena-ttl=.* works?$"):
        parse_duration(given, "arena-ttl")


def test_sockets() -> None:
    assert default_socket("/run/user/7", 7) == "/run/user/7/hybridkv/daemon.sock"
    assert default_socket("", 7) == "/tmp/hybridkv-7/daemon.sock"
    assert socket_of_server("unix:///a/b.sock", "", 7) == "/a/b.sock"
    assert socket_of_server("unix:///a/{node}.sock", "", 7, 3) == "/a/3.sock"
    for bad in ("relative.sock", "/" + "x" * 107, "/", "/a/..", "/a\0", "/\udcff"):
        with pytest.raises(ConfigError, match=r'socket: .* "/tmp/hybridkv/daemon.sock" works'):
            check_socket_path(bad, "socket")


@pytest.mark.parametrize("text", ["9" * 400, "9" * 400 + "GiB", "9" * 30, "9000000TiB"])
def test_no_size_is_larger_than_a_file_can_be(text: str) -> None:
    with pytest.raises(ConfigError, match=r'larger than any memory; "1GiB" works'):
        parse_size(text, "ram")
