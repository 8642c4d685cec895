"""`hybridkv stats` and `hybridkv clear`."""

import argparse
import json
import os

from hybridkv.cli.terminal import plain
from hybridkv.client.control import ControlClient
from hybridkv.core.paths import check_socket_path, default_socket
from hybridkv.core.sizes import format_size
from hybridkv.wire.messages import Report, describe_groups


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of both commands."""
    parser.add_argument(
        "--socket", default=default_socket(os.environ, os.geteuid()), metavar="PATH"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--tiers",
        action="store_true",
        help="clear: also all that tiers below RAM have, for every node that uses them",
    )


def run(arguments: argparse.Namespace) -> int:
    """Ask the daemon and print."""
    with ControlClient(check_socket_path(arguments.socket, "socket")) as control:
        if arguments.command == "clear":
            return _clear(control, arguments)
        report = control.stats()
        facts = _facts(control, report)
    if arguments.json:
        print(json.dumps({**facts, **report.values}, indent=2, sort_keys=True))
        return 0
    rows = [
        *((name, plain(text)) for name, text in sorted(facts.items())),
        *((name, _show(name, value)) for name, value in sorted(report.values.items())),
    ]
    width = max(len(name) for name, _ in rows)
    for name, shown in rows:
        print(f"{name:<{width}}  {shown}")
    return 0


def _facts(control: ControlClient, report: Report) -> dict[str, str]:
    """What is not a number, by name."""
    welcome = control.welcome
    facts = {"boot": welcome.boot, "arena": welcome.arena_path, "pid": str(welcome.pid)}
    facts["metrics"] = report.metrics_url
    for number, tier in enumerate(report.tiers):
        bound = "" if tier.max_bytes is None else f", at most {format_size(tier.max_bytes)}"
        facts[f"tier_{number}"] = f"{tier.name}: written {tier.write}{bound}"
    for number, engine in enumerate(control.engines()):
        geometry = engine.geometry
        facts[f"session_{number}"] = (
            f"chunk {geometry.chunk_tokens} groups {describe_groups(geometry.groups)} "
            f"engine {engine.engine_id} identity {engine.namespace.hex()[:12]}"
        )
    return facts


def _show(name: str, value: float) -> str:
    is_size = name.startswith("bytes_") or "_bytes" in name
    return format_size(round(value)) if is_size else f"{value:,.0f}"


def _clear(control: ControlClient, arguments: argparse.Namespace) -> int:
    """The exit status: 1 where a tier that was to be emptied is out of reach."""
    dropped = control.clear(arguments.tiers)
    said: dict[str, object] = {"dropped": dropped}
    is_complete = True
    sentences = [f"dropped {dropped} objects"]
    if arguments.tiers:
        tiers = {tier.name: tier.is_reachable for tier in control.stats().tiers}
        said["tiers"] = {
            name: "removing" if is_well else "out of reach" for name, is_well in tiers.items()
        }
        sentences += [
            f"{name} is removing its own"
            if is_well
            else f"{name} is out of reach: what it has comes back with it"
            for name, is_well in tiers.items()
        ] or ["there is no tier below RAM"]
        is_complete = all(tiers.values())
    print(json.dumps(said) if arguments.json else "; ".join(sentences))
    return int(not is_complete)
