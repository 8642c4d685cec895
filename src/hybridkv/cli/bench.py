"""`hybridkv bench`: the byte path, the lookup and a directory, each measured on the real thing."""

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hybridkv.cli.arguments import add_json
from hybridkv.cli.terminal import new_table, pairs, plain_console, print_json
from hybridkv.core.errors import ConfigError
from hybridkv.core.sizes import parse_size
from hybridkv.lab.disk_bench import measure_disk
from hybridkv.lab.lookup_bench import measure_lookups


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `bench`."""
    parser.add_argument("what", choices=("path", "lookup", "disk"))
    add_json(parser)
    parser.add_argument(
        "--bytes",
        default="512MiB",
        metavar="SIZE",
        help="path, disk: bytes to move (default: %(default)s)",
    )
    parser.add_argument(
        "--layers", type=int, default=32, help="path: layers of the group (default: %(default)s)"
    )
    parser.add_argument(
        "--block",
        default="64KiB",
        metavar="SIZE",
        help="path: bytes of a block in a layer (default: %(default)s)",
    )
    parser.add_argument(
        "--checksum", choices=("on", "off"), default="on", help="path: as the setting of that name"
    )
    parser.add_argument(
        "--directory", help="disk: where to measure (default: the directory for temporary files)"
    )
    parser.add_argument(
        "--device", default="cpu", help="path: where the engine's blocks are (default: %(default)s)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure and print."""
    with tempfile.TemporaryDirectory(prefix="hybridkv-bench-") as directory:
        rows = list(_rows(arguments, str(Path(directory) / "daemon.sock")))
    if arguments.json:
        print_json(rows)
    elif arguments.what == "disk":
        table = new_table(rows[0])
        for row in rows:
            table.add_row(*map(str, row.values()))
        plain_console(120).print(table)
    else:
        for row in rows:
            print(*pairs(row.items()), "", sep="\n")
    return 0


def _rows(arguments: argparse.Namespace, socket_path: str) -> Iterator[dict[str, Any]]:
    match arguments.what:
        case "path":
            yield _path(arguments, socket_path)
        case "lookup":
            for row in measure_lookups(socket_path):
                print(f"lookup {row['lookup tokens']} tokens done", file=sys.stderr)
                yield row
        case _:
            yield from measure_disk(arguments.directory, parse_size(arguments.bytes, "--bytes"))


def _path(arguments: argparse.Namespace, socket_path: str) -> dict[str, Any]:
    try:
        # The engine's side is an extra.
        from hybridkv.lab.path_bench import PathOptions, measure_path  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(
            f"bench path needs the engine side ({error.name})", "it works where vLLM is installed"
        ) from error
    options = PathOptions(
        parse_size(arguments.bytes, "--bytes"),
        arguments.layers,
        parse_size(arguments.block, "--block"),
        arguments.checksum,
        arguments.device,
    )
    return measure_path(options, socket_path)
