"""`hybridkv stats` and `hybridkv clear`."""

import argparse
import json

from hybridkv.cli.arguments import JSON, SOCKET, socket_of, switch
from hybridkv.cli.terminal import pairs, plain, print_json
from hybridkv.client.control import ControlClient
from hybridkv.core.sizes import format_size
from hybridkv.wire.messages import Report, describe_groups

ARGUMENTS = (
    SOCKET,
    JSON,
    switch("--tiers", "clear: also all that tiers below RAM have, for every node that uses them"),
)


def run(arguments: argparse.Namespace) -> int:
    """Ask the daemon and print."""
    with ControlClient(socket_of(arguments)) as control:
        if arguments.command == "clear":
            return _clear(control, arguments)
        report = control.stats()
        facts = _facts(control, report)
    if arguments.json:
        print_json({**facts, **report.values}, sort_keys=True)
        return 0
    rows: list[tuple[str, str]] = [(name, plain(text)) for name, text in sorted(facts.items())]
    for name, value in sorted(report.values.items()):
        is_size = name.startswith("bytes_") or "_bytes" in name
        rows.append((name, format_size(round(value)) if is_size else f"{value:,.0f}"))
    print(*pairs(rows), sep="\n")
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


def _clear(control: ControlClient, arguments: argparse.Namespace) -> int:
    """The exit status: 1 where a tier that was to be emptied is out of reach."""
    dropped = control.clear(arguments.tiers)
    said: dict[str, object] = {"dropped": dropped}
    sentences = [f"dropped {dropped} objects"]
    tiers: dict[str, bool] = {}
    if arguments.tiers:
        tiers = {tier.name: tier.is_reachable for tier in control.stats().tiers}
        said["tiers"] = {
            name: "removing" if well else "out of reach" for name, well in tiers.items()
        }
        sentences += [
            f"{name} is removing its own"
            if is_well
            else f"{name} is out of reach: what it has comes back with it"
            for name, is_well in tiers.items()
        ] or ["there is no tier below RAM"]
    print(json.dumps(said) if arguments.json else "; ".join(sentences))
    return int(not all(tiers.values()))
