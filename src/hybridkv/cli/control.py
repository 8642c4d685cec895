"""`hybridkv stats` and `hybridkv clear`."""

import argparse
import json
import os
from collections.abc import Mapping

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
            return _clear(control, arguments)
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


def _clear(control: Control, arguments: argparse.Namespace) -> int:
    """1 where a tier was to be emptied that cannot be reached."""
    dropped = control.clear(arguments.tiers)
    said: dict[str, object] = {"dropped": dropped}
    sentences = [f"dropped {dropped} objects"]
    tiers = _tiers(control.stats().values) if arguments.tiers else {}
    if arguments.tiers:
        said["tiers"] = {name: "removing" if well else "out of reach" for name, well in tiers.items()}
        sentences += [
            f"{name} is removing its own" if well else f"{name} is out of reach: what it has comes back with it"
            for name, well in tiers.items()
        ] or ["there is no tier below RAM"]
    print(json.dumps(said) if arguments.json else "; ".join(sentences))
    return int(not all(tiers.values()))


def _tiers(values: Mapping[str, float]) -> dict[str, bool]:
    """Every tier below RAM, and whether it can be asked for something."""
    names = [name.removesuffix("_is_open") for name in values if name.startswith("tier_") and name.endswith("_is_open")]
    return {
        name.removeprefix("tier_"): bool(values[f"{name}_is_open"] and not values[f"{name}_breaker_open"])
        for name in names
    }
