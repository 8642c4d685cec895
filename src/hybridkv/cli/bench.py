"""`hybridkv bench`: the byte path, the lookup and a directory, each measured on the real thing."""

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hybridkv.cli.arguments import JSON, command, option
from hybridkv.cli.terminal import PlainConsole, new_table, pairs, print_json
from hybridkv.client.control import ControlClient
from hybridkv.core.errors import ConfigError
from hybridkv.core.geometry import Geometry, Group, GroupKind
from hybridkv.core.keys import HASH_BYTES
from hybridkv.core.packed import pack_u64, unpack_u64
from hybridkv.core.sizes import parse_size
from hybridkv.lab.daemon_process import DaemonProcess, engine_hello, reserve
from hybridkv.lab.disk_bench import measure_disk
from hybridkv.wire.messages import Commit, Found, Lookup, Release

LOOKUP_TOKENS = (1024, 4096, 16384, 32768, 65536, 131072)
LOOKUPS = 300
_BLOCK_TOKENS = 128
_PART_BYTES = 256
_DEFAULT = "(default: %(default)s)"


@command(
    option("what", choices=("path", "lookup", "disk")),
    JSON,
    option("--bytes SIZE", f"path, disk: bytes to move {_DEFAULT}", "512MiB"),
    option("--layers", f"path: layers of the group {_DEFAULT}", 32, type=int),
    option("--block SIZE", f"path: bytes of a block in a layer {_DEFAULT}", "64KiB"),
    option("--checksum", "path: as the setting of that name", "on", choices=("on", "off")),
    option("--directory", "disk: where to measure (default: the directory for temporary files)"),
    option("--device", f"path: where the engine's blocks are {_DEFAULT}", "cpu"),
)
def run_bench(arguments: argparse.Namespace) -> int:
    """Measure and print."""
    with tempfile.TemporaryDirectory(prefix="hybridkv-bench-") as directory:
        rows = list(_rows(arguments, str(Path(directory) / "daemon.sock")))
    if arguments.json:
        print_json(rows)
    elif arguments.what == "disk":
        table = new_table(rows[0])
        for row in rows:
            table.add_row(*map(str, row.values()))
        PlainConsole(120).print(table)
    else:
        for row in rows:
            print(*pairs(row.items()), "", sep="\n")
    return 0


def _rows(arguments: argparse.Namespace, socket_path: str) -> Iterator[dict[str, Any]]:
    if arguments.what == "lookup":
        for row in _measure_lookups(socket_path):
            print(f"lookup {row['lookup tokens']} tokens done", file=sys.stderr)
            yield row
        return
    if arguments.what == "disk":
        yield from measure_disk(arguments.directory, parse_size(arguments.bytes, "--bytes"))
        return
    try:
        # The engine's side is an extra.
        from hybridkv.lab.path_bench import measure_path  # noqa: PLC0415
    except ImportError as error:
        what = f"bench path needs the engine side ({error.name})"
        raise ConfigError(what, "it works where vLLM is installed") from error
    total, block = (
        parse_size(getattr(arguments, name), f"--{name}") for name in ("bytes", "block")
    )
    options = arguments.checksum, arguments.device
    yield measure_path(socket_path, total, arguments.layers, block, *options)


def _measure_lookups(socket_path: str) -> Iterator[dict[str, Any]]:
    """Milliseconds of a lookup on a hybrid of one full and two sliding groups, by its length."""
    groups = (
        Group(0, GroupKind.FULL, _BLOCK_TOKENS, (_PART_BYTES,)),
        *(Group(gid, GroupKind.SLIDING, _BLOCK_TOKENS, (_PART_BYTES,), 1024) for gid in (1, 2)),
    )
    hello = engine_hello(Geometry(groups, _BLOCK_TOKENS, _BLOCK_TOKENS, _BLOCK_TOKENS))
    hashes = random.Random(0).randbytes(LOOKUP_TOKENS[-1] // _BLOCK_TOKENS * HASH_BYTES)
    with DaemonProcess(socket_path, "256MiB"), ControlClient(socket_path, hello=hello) as control:
        for index in range(len(groups)):
            # An (unwritten) object of the group for every hash.
            unnamed = memoryview(hashes)
            for granted in reserve(control, _PART_BYTES, len(hashes) // HASH_BYTES):
                offsets, generations = granted.offsets, granted.generations
                count = len(unpack_u64(offsets))
                named, unnamed = unnamed[: count * HASH_BYTES], unnamed[count * HASH_BYTES :]
                indexes = pack_u64([index] * count)
                control.tell(Commit(offsets, generations, indexes, bytes(named)))
        for tokens in LOOKUP_TOKENS:
            yield _measure_length(control, tokens, hashes[: tokens // _BLOCK_TOKENS * HASH_BYTES])


def _measure_length(control: ControlClient, tokens: int, hashes: bytes) -> dict[str, Any]:
    seconds: list[float] = []
    for number in range(1, LOOKUPS + 1):
        lease = tokens + number
        started = time.perf_counter()
        found = control.call(Lookup(lease, lease, hashes))
        seconds.append(time.perf_counter() - started)
        assert isinstance(found, Found)
        assert found.chunks * _BLOCK_TOKENS == tokens
        control.tell(Release(lease))
    seconds.sort()
    return {
        "lookup tokens": tokens,
        "hit tokens": tokens,
        "p50_ms": round(seconds[LOOKUPS // 2] * 1e3, 3),
        "p99_ms": round(seconds[LOOKUPS * 99 // 100] * 1e3, 3),
    }
