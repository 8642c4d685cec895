"""`hybridkv bench`: the byte path next to a memory copy, and the lookup, each against a real daemon."""

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.table import Table

from hybridkv.cli.diskbench import measure_disk
from hybridkv.cli.plain import plain_console
from hybridkv.client.control import Control
from hybridkv.core.errors import ConfigError, HybridKVError
from hybridkv.core.geometry import Geometry, Group, Kind, derive_chunk_tokens
from hybridkv.core.keys import HASH_BYTES
from hybridkv.core.packed import pack_u64, unpack_u64
from hybridkv.core.sizes import format_size, parse_size
from hybridkv.shm.arena import RAM_BYTES_MIN
from hybridkv.testing.daemon import DaemonProcess
from hybridkv.wire.messages import (
    PROTOCOL_VERSION,
    Commit,
    Found,
    Granted,
    Hello,
    Lookup,
    Release,
    Want,
    geometry_to_wire,
)

LOOKUP_TOKENS = (1024, 4096, 16384, 32768, 65536, 131072)
RESERVED_BYTES = 256 << 20
RESERVE_SECONDS = 30.0
LOOKUPS = 300
ROUNDS = 5
HOOK_TOKENS = (32768, 131072)
HOOK_STEP_TOKENS = 8192
"""Tokens of a prefill step, as on a large device."""
HOOK_ROUNDS = 24
"""Of each replay."""
_BLOCK_TOKENS = 128


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `bench`."""
    parser.add_argument("what", choices=("path", "lookup", "hooks", "disk"))
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--bytes", default="512MiB", metavar="SIZE", help="path, disk: bytes to move (default: %(default)s)"
    )
    parser.add_argument("--layers", type=int, default=32, help="path: layers of the group (default: %(default)s)")
    parser.add_argument(
        "--block",
        default="64KiB",
        metavar="SIZE",
        help="path: bytes of a block in a layer (default: %(default)s)",
    )
    parser.add_argument("--checksum", choices=("on", "off"), default="on", help="path: as the setting of that name")
    parser.add_argument(
        "--block-tokens",
        type=int,
        default=_BLOCK_TOKENS,
        help="hooks: tokens of an engine block (default: 128)",
    )
    parser.add_argument("--directory", help="disk: where to measure (default: the directory for temporary files)")
    parser.add_argument("--device", default="cpu", help="path: where the engine's blocks are (default: %(default)s)")


def run(arguments: argparse.Namespace) -> int:
    """Measure and print."""
    with tempfile.TemporaryDirectory(prefix="hybridkv-bench-") as directory:
        socket_path = str(Path(directory) / "daemon.sock")
        match arguments.what:
            case "path":
                rows = _path(arguments, socket_path)
            case "lookup":
                rows = _lookup(socket_path)
            case "disk":
                rows = measure_disk(arguments.directory, parse_size(arguments.bytes, "--bytes"))
            case _:
                rows = _hooks(arguments, socket_path)
    if arguments.json:
        print(json.dumps(rows, indent=2))
        return 0
    if arguments.what in ("hooks", "disk"):
        _print_columns(rows)
        return 0
    width = max(len(name) for row in rows for name in row)
    for row in rows:
        for name, value in row.items():
            print(f"{name:<{width}}  {value}")
        print()
    return 0


def _print_columns(rows: list[dict[str, Any]]) -> None:
    table = Table()
    for name in rows[0]:
        table.add_column(name, justify="left" if name == "hook" else "right")
    for row in rows:
        table.add_row(*map(str, row.values()))
    plain_console(120).print(table)


def _lookup(socket_path: str) -> list[dict[str, Any]]:
    """A hit at every length, on a hybrid of one full and two sliding groups, as seen from the engine's side."""
    groups = tuple(
        Group(gid, kind, _BLOCK_TOKENS, (256,), window)
        for gid, kind, window in ((0, Kind.FULL, 0), (1, Kind.SLIDING, 1024), (2, Kind.SLIDING, 1024))
    )
    geometry = Geometry(groups, _BLOCK_TOKENS, _BLOCK_TOKENS, _BLOCK_TOKENS)
    hashes = random.Random(0).randbytes(LOOKUP_TOKENS[-1] // _BLOCK_TOKENS * HASH_BYTES)
    hello = Hello(1, PROTOCOL_VERSION, "engine", "bench", bytes(HASH_BYTES), geometry_to_wire(geometry))
    rows: list[dict[str, Any]] = []
    with DaemonProcess(socket_path, "256MiB"), Control(socket_path, hello=hello) as control:
        for index in range(len(groups)):
            _fill(control, index, hashes)
        for tokens in LOOKUP_TOKENS:
            asked = hashes[: tokens // _BLOCK_TOKENS * HASH_BYTES]
            seconds: list[float] = []
            for number in range(1, LOOKUPS + 1):
                lease = tokens + number
                started = time.perf_counter()
                found = control.call(Lookup(lease, lease, asked))
                seconds.append(time.perf_counter() - started)
                assert isinstance(found, Found)
                assert found.chunks * _BLOCK_TOKENS == tokens
                control.tell(Release(lease))
            seconds.sort()
            rows.append(
                {
                    "lookup tokens": tokens,
                    "hit tokens": tokens,
                    "p50_ms": round(seconds[LOOKUPS // 2] * 1e3, 3),
                    "p99_ms": round(seconds[LOOKUPS * 99 // 100] * 1e3, 3),
                }
            )
            print(f"lookup {tokens} tokens done", file=sys.stderr)
    return rows


def _fill(control: Control, group_index: int, hashes: bytes) -> None:
    """Store an (unwritten) object of one group for every hash."""
    chunks = len(hashes) // HASH_BYTES
    part_bytes = 256
    done = 0
    while done < chunks:
        granted = control.call(Want(7, part_bytes, 1, chunks - done))
        assert isinstance(granted, Granted)
        count = len(unpack_u64(granted.offsets))
        control.tell(
            Commit(
                granted.offsets,
                granted.generations,
                pack_u64([group_index] * count),
                hashes[done * HASH_BYTES : (done + count) * HASH_BYTES],
            )
        )
        done += count


def _hooks(arguments: argparse.Namespace, socket_path: str) -> list[dict[str, Any]]:
    """Every scheduler-side hook on a hybrid of a full, two sliding and a recurrent group."""
    try:
        from hybridkv.connector.hookbench import measure_hooks  # noqa: PLC0415  # the engine side is an extra
    except ImportError as error:
        raise ConfigError(
            f"bench hooks needs the engine side ({error.name}); it works where vLLM is installed"
        ) from error
    block = arguments.block_tokens
    if block < 1 or block > HOOK_STEP_TOKENS or HOOK_STEP_TOKENS % block:
        raise ConfigError(f"--block-tokens {block} does not divide a step of {HOOK_STEP_TOKENS} tokens; 128 works")
    groups = (
        Group(0, Kind.FULL, block, (256,)),
        Group(1, Kind.SLIDING, block, (256,), 1024),
        Group(2, Kind.SLIDING, block, (256,), 1024),
        Group(3, Kind.RECURRENT, block, (256,)),
    )
    geometry = Geometry(groups, derive_chunk_tokens(groups, block, block), block, block)
    rows: list[dict[str, Any]] = []
    with DaemonProcess(socket_path, "512MiB"), Control(socket_path) as control:
        deadline = time.monotonic() + RESERVE_SECONDS
        # A young daemon grants only what has pages, and what is not stored is no hit.
        while control.stats().values["bytes_reserved"] < RESERVED_BYTES:
            if time.monotonic() > deadline:
                raise HybridKVError(f"the daemon had no memory of its own within {RESERVE_SECONDS:g} s")
        for tokens in HOOK_TOKENS:
            rows += measure_hooks(socket_path, geometry, tokens, HOOK_STEP_TOKENS, HOOK_ROUNDS)
            print(f"hooks at {tokens} tokens done", file=sys.stderr)
    return rows


def _path(arguments: argparse.Namespace, socket_path: str) -> list[dict[str, Any]]:
    """The worker's own copier between engine-like blocks and a real daemon's slots, beside a plain copy."""
    try:
        import torch  # noqa: PLC0415  # the engine side is an extra

        from hybridkv.connector.bench import measure_path  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(
            f"bench path needs the engine side ({error.name}); it works where vLLM is installed"
        ) from error
    block_bytes = parse_size(arguments.block, "--block")
    if arguments.layers < 1:
        raise ConfigError(f"--layers {arguments.layers} is no number of layers; 32 works")
    if arguments.device != "cpu" and not torch.cuda.is_available():
        raise ConfigError(f"--device {arguments.device}: this machine has no CUDA device; cpu works")
    part_bytes = block_bytes * arguments.layers
    objects = parse_size(arguments.bytes, "--bytes") // part_bytes
    if objects < 1:
        raise ConfigError(f"--bytes is less than one object of {format_size(part_bytes)}; 512MiB works")
    group = Group(0, Kind.FULL, _BLOCK_TOKENS, (block_bytes,) * arguments.layers)
    geometry = Geometry((group,), _BLOCK_TOKENS, _BLOCK_TOKENS, _BLOCK_TOKENS)
    hello = Hello(1, PROTOCOL_VERSION, "engine", "bench", bytes(HASH_BYTES), geometry_to_wire(geometry))
    ram_bytes = max(RAM_BYTES_MIN, (objects + 1) * (part_bytes + 8192) * 4)
    with DaemonProcess(socket_path, str(ram_bytes)), Control(socket_path, 60.0, hello=hello) as control:
        slots: list[tuple[int, int]] = []
        while len(slots) < objects:
            granted = control.call(Want(7, part_bytes, 1, objects - len(slots)))
            assert isinstance(granted, Granted)
            slots += zip(unpack_u64(granted.offsets), unpack_u64(granted.generations), strict=True)
        measured = measure_path(
            control.welcome,
            slots,
            arguments.layers,
            block_bytes,
            arguments.checksum,
            arguments.device,
            ROUNDS,
        )
    return [
        {
            "bytes": format_size(objects * part_bytes),
            "object": format_size(part_bytes),
            "block in a layer": format_size(block_bytes),
            "device": arguments.device,
            "checksum": arguments.checksum,
            **measured,
        }
    ]
