"""`hybridkv bench`: the byte path, the lookup and a directory, each measured on the real thing."""

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hybridkv.cli.arguments import JSON, command, option
from hybridkv.cli.terminal import PlainConsole, new_table, pairs, print_json
from hybridkv.core.errors import ConfigError
from hybridkv.core.sizes import parse_size
from hybridkv.lab.disk_bench import measure_disk
from hybridkv.lab.lookup_bench import measure_lookups

_DEFAULT = "(default: %(default)s)"


@command(
    option("what", None, None, choices=("path", "lookup", "disk")),
    JSON,
    option("--bytes", "SIZE", f"path, disk: bytes to move {_DEFAULT}", default="512MiB"),
    option("--layers", None, f"path: layers of the group {_DEFAULT}", type=int, default=32),
    option("--block", "SIZE", f"path: bytes of a block in a layer {_DEFAULT}", default="64KiB"),
    option(
        *("--checksum", None, "path: as the setting of that name"),
        choices=("on", "off"),
        default="on",
    ),
    option(
        "--directory", None, "disk: where to measure (default: the directory for temporary files)"
    ),
    option("--device", None, f"path: where the engine's blocks are {_DEFAULT}", default="cpu"),
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
        for row in measure_lookups(socket_path):
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
