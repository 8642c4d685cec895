"""`hybridkv stats` and `hybridkv clear`."""

import argparse
import json
import os

from hybridkv.cli.plain import plain
from hybridkv.client.control import Control
from hybridkv.core.paths import check_socket_path, default_socket
from hybridkv.core.sizes import format_size


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of both."""
    parser.add_argument("--socket", default=default_socket(os.environ, os.geteuid()), metavar="PATH")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--tiers", action="store_true", help="clear: also all that tiers below RAM have, for every node that uses them"
    )


def run(arguments: argparse.Namespace) -> int:
    """Ask the daemon and print."""
    with Control(check_socket_path(arguments.socket, "socket")) as control:
        if arguments.command == "clear":
            dropped = control.clear(arguments.tiers)
            more = "; the tiers are removing theirs" if arguments.tiers else ""
            print(json.dumps({"dropped": dropped}) if arguments.json else f"dropped {dropped} objects{more}")
            return 0
        report = control.stats()
    if arguments.json:
        print(json.dumps({**report.info, **report.values}, indent=2, sort_keys=True))
        return 0
    rows = [
        *((plain(name), plain(text)) for name, text in sorted(report.info.items())),
        *((name, _show(name, value)) for name, value in sorted(report.values.items())),
    ]
    width = max(len(name) for name, _ in rows)
    for name, shown in rows:
        print(f"{name:<{width}}  {shown}")
    return 0


def _show(name: str, value: float) -> str:
    is_size = name.startswith("bytes_") or "_bytes" in name
    return format_size(round(value)) if is_size else f"{value:,.0f}"
