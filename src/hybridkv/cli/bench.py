"""`hybridkv bench`: the byte path, the lookup and a directory, each measured on the real thing.

The directory tier runs beside `fio` and `dd` with direct I/O. The byte path needs the engine.
"""

import argparse
import json
import math
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from hybridkv.cli.arguments import JSON, command, option, or_refuse
from hybridkv.cli.terminal import PlainConsole, new_table, pairs, print_json, waiting
from hybridkv.client.control import ControlClient
from hybridkv.core.errors import ConfigError
from hybridkv.core.geometry import Group, GroupKind
from hybridkv.core.keys import HASH_BYTES
from hybridkv.core.packed import SLOT_BYTES, pack_u64
from hybridkv.core.sizes import format_size, parse_size
from hybridkv.core.tier_urls import TierSpec
from hybridkv.lab.capacity import GroupPreview
from hybridkv.lab.configuration import inspect_model
from hybridkv.lab.daemon_process import DaemonProcess, engine_hello, reserve
from hybridkv.lab.tier_bench import TierLoad
from hybridkv.shm.slots import payload_offset, slot_bytes
from hybridkv.tiers.disk.tier import DiskTier
from hybridkv.tiers.jobs import LIMITS, JobKind
from hybridkv.wire.messages import Commit, Found, Lookup, Release

READS_MAX, WRITES_MAX = LIMITS[JobKind.READ], LIMITS[JobKind.WRITE]
LOOKUP_TOKENS = (1024, 4096, 16384, 32768, 65536, 131072)
LOOKUPS = 300
_BLOCK_TOKENS = 128
_PART_BYTES = 256
_WORD_BYTES = 8
OBJECT_BYTES = (1 << 20, 4 << 20, 16 << 20)
"""Objects of models have some MB: 3 for gpt-oss-20b, 8 for Gemma 3 12B, 9 for DeepSeek-V3."""
ROUNDS = 5
DD_BLOCK_BYTES = 8 << 20
_DEFAULT = "(default: %(default)s)"


@command(
    option("what", choices=("path", "lookup", "disk")),
    JSON,
    option("--bytes SIZE", f"path, disk: bytes to move {_DEFAULT}", "512MiB"),
    option("--layers", f"path: layers of the group {_DEFAULT}", 32, type=int),
    option("--block SIZE", f"path: bytes of a block in a layer {_DEFAULT}", "64KiB"),
    option("--checksum", "path: as the setting of that name", "on", choices=("on", "off")),
    option("--directory", "disk: where to measure (default: the directory for temporary files)"),
    option(
        "--model DIR_OR_NAME",
        "path: move the objects of each group of a model's layers, instead of --layers and --block",
    ),
    option("--device", f"path: where the engine's blocks are {_DEFAULT}", "cpu"),
)
def run_bench(arguments: argparse.Namespace) -> int:
    """Measure the byte path, the lookup or a directory, and print the numbers."""
    with tempfile.TemporaryDirectory(prefix="hybridkv-bench-") as directory:
        rows = list(_rows(arguments, str(Path(directory) / "daemon.sock")))
    if arguments.json:
        print_json(rows)
    elif arguments.what == "disk":
        table = new_table(tuple(rows[0]))
        for row in rows:
            table.add_row(*map(str, row.values()))
        PlainConsole(120).print(table)
    else:
        for row in rows:
            print(*pairs(row.items()), "", sep="\n")
    return 0


def _rows(arguments: argparse.Namespace, socket_path: str) -> Iterator[dict[str, Any]]:
    if arguments.what == "lookup":
        yield from _measure_lookups(socket_path)
        return
    if arguments.what == "disk":
        yield from _measure_disk(arguments.directory, parse_size(arguments.bytes, "--bytes"))
        return
    try:
        # The engine's side is an extra.
        from hybridkv.lab.path_bench import PathOptions, measure_path  # noqa: PLC0415
    except ImportError as error:
        what = f"bench path needs the engine side ({error.name})"
        raise ConfigError(what, "it works where vLLM is installed") from error
    options = PathOptions(
        total_bytes=parse_size(arguments.bytes, "--bytes"),
        layers=arguments.layers,
        block_bytes=parse_size(arguments.block, "--block"),
        checksum=arguments.checksum,
        device=arguments.device,
    )
    if arguments.model is None:
        yield measure_path(socket_path, options)
        return
    for group in _groups_of(arguments.model):
        # Every number that is copied has eight bytes.
        block_bytes = math.ceil(group.block_bytes / group.layers / _WORD_BYTES) * _WORD_BYTES
        print(f"group {group.gid}: {group.kind}, {group.layers} layers", file=sys.stderr)
        shape = replace(options, layers=group.layers, block_bytes=block_bytes)
        yield {"group": f"{group.gid}:{group.kind}", **measure_path(socket_path, shape)}


def _groups_of(model: str) -> list[GroupPreview]:
    """Return the groups of a model that are stored. Raises ConfigError where there are none."""
    preview = inspect_model(model, [], waiting).preview
    groups = [] if preview is None else [g for g in preview.groups if not g.refusal]
    if not groups:
        raise ConfigError(f"--model {model}: no group is served", "`hybridkv doctor` says why")
    return groups


def _measure_lookups(socket_path: str) -> Iterator[dict[str, Any]]:
    """Milliseconds of a lookup by its length, with one full and two sliding groups."""
    groups = (
        Group(0, GroupKind.FULL, _BLOCK_TOKENS, (_PART_BYTES,)),
        *(Group(gid, GroupKind.SLIDING, _BLOCK_TOKENS, (_PART_BYTES,), 1024) for gid in (1, 2)),
    )
    hello = engine_hello(groups, _BLOCK_TOKENS)
    hashes = random.Random(0).randbytes(LOOKUP_TOKENS[-1] // _BLOCK_TOKENS * HASH_BYTES)
    with DaemonProcess(socket_path, "256MiB"), ControlClient(socket_path, hello=hello) as control:
        for index in range(len(groups)):
            # An (unwritten) object of the group for every hash.
            unnamed = memoryview(hashes)
            for granted in reserve(control, _PART_BYTES, len(hashes) // HASH_BYTES):
                count = len(granted.slots) // SLOT_BYTES
                named, unnamed = unnamed[: count * HASH_BYTES], unnamed[count * HASH_BYTES :]
                indexes = pack_u64([index] * count)
                control.tell(Commit(granted.slots, indexes, bytes(named)))
        for tokens in LOOKUP_TOKENS:
            seconds, prompt = [], hashes[: tokens // _BLOCK_TOKENS * HASH_BYTES]
            for lease in range(tokens + 1, tokens + LOOKUPS + 1):
                started = time.perf_counter()
                found = control.call(Lookup(lease, lease, prompt))
                seconds.append(time.perf_counter() - started)
                assert isinstance(found, Found)
                assert found.chunks * _BLOCK_TOKENS == tokens
                control.tell(Release(lease))
            row: dict[str, Any] = {"lookup tokens": tokens, "hit tokens": tokens}
            for percent in (50, 99):
                milliseconds = sorted(seconds)[LOOKUPS * percent // 100] * 1e3
                row[f"p{percent}_ms"] = round(milliseconds, 3)
            yield row
            print(f"lookup {tokens} tokens done", file=sys.stderr)


def _measure_disk(directory: str | None, total_bytes: int) -> list[dict[str, Any]]:
    """Rates for objects of several sizes, each the median of ROUNDS rounds."""
    least, size = WRITES_MAX * OBJECT_BYTES[-1], format_size(total_bytes)
    if total_bytes < least:
        what = f"--bytes {size} is less than what {WRITES_MAX} threads write at once"
        raise ConfigError(what, f"{format_size(least)} works")
    with (
        or_refuse(f"--directory {directory} cannot be used", "one that you may write to works"),
        tempfile.TemporaryDirectory(prefix="hybridkv-bench-", dir=directory) as place,
    ):
        return [_measure_objects(Path(place), size, total_bytes) for size in OBJECT_BYTES]


def _measure_objects(place: Path, object_bytes: int, total_bytes: int) -> dict[str, Any]:
    """Rates for objects of one size, in a directory at `place`."""
    samples: dict[str, list[float]] = {}
    part_bytes = object_bytes - payload_offset(1)
    load = TierLoad(Counter({(part_bytes, 1): total_bytes // slot_bytes(part_bytes, 1)}))
    moved = load.size_bytes

    def measure(name: str, work: Callable[[], object]) -> None:
        started = time.perf_counter()
        work()
        samples.setdefault(name, []).append(moved / (time.perf_counter() - started))

    raw = place / "raw"
    spec = TierSpec(
        kind="disk", location=f"disk://{place}/tier", max_bytes=2 * total_bytes, node="bench"
    )
    for round_number in range(ROUNDS):
        tier = DiskTier(spec)
        tier.open()
        measure("write", partial(load.move_objects, tier, JobKind.WRITE))
        measure("read", partial(load.move_objects, tier, JobKind.READ))
        shutil.rmtree(place / "tier")
        measure("dd_write", partial(_dd, moved, f"of={raw}", "if=/dev/zero", "oflag=direct"))
        measure("dd_read", partial(_dd, moved, f"if={raw}", "of=/dev/null", "iflag=direct"))
        os.unlink(raw)
        if shutil.which("fio"):
            for verb, threads in (("write", WRITES_MAX), ("read", READS_MAX)):
                samples.setdefault(f"fio_{verb}", []).append(_fio(place, verb, moved, threads))
        print(f"{format_size(object_bytes)}: round {round_number + 1} of {ROUNDS}", file=sys.stderr)
    rates = {name: statistics.median(rounds) for name, rounds in samples.items()}
    row: dict[str, Any] = {"object": format_size(object_bytes), "moved": format_size(moved)}
    for verb in ("write", "read"):
        row[f"{verb} GB/s"] = round(rates[verb] / 1e9, 3)
        for program in ("dd", "fio"):
            if f"{program}_{verb}" in rates:
                row[f"{verb} / {program}"] = round(rates[verb] / rates[f"{program}_{verb}"], 2)
    return row


def _dd(size: int, *options: str) -> None:
    words = (f"bs={DD_BLOCK_BYTES}", f"count={-(-size // DD_BLOCK_BYTES)}", *options)
    subprocess.run(["dd", *words], check=True, capture_output=True)


def _fio(place: Path, verb: str, size: int, threads: int) -> float:
    """Bytes per second of as many threads as the tier's, each on a file of its own."""
    command = ["fio", "--name=bench", f"--directory={place}", f"--rw={verb}", "--bs=1M"]
    command += [f"--size={size // threads}", f"--numjobs={threads}", "--direct=1"]
    command += ["--ioengine=psync", "--group_reporting", "--output-format=json"]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    rate: float = json.loads(output[output.index("{") :])["jobs"][0][verb]["bw_bytes"]
    if verb == "read":
        for path in place.glob("bench.*"):
            path.unlink()
    return rate
