"""`hybridkv ping`, `stats`, `clear` and `explain`: a daemon is asked once."""

import argparse
import contextlib
import json
import os
from pathlib import Path

from hybridkv.cli.arguments import JSON, SOCKET, command, control_of, option, socket_of, switch
from hybridkv.cli.terminal import pairs, plain, print_json
from hybridkv.core.errors import ConfigError, HybridKVError
from hybridkv.core.paths import is_writable
from hybridkv.core.sizes import format_size
from hybridkv.observe.status import sentences_of_reply
from hybridkv.wire.messages import describe_groups

_ALL_NODES = "clear: also all that tiers below RAM have, for every node that uses them"
_TIERS = switch("--tiers", _ALL_NODES)
_DEBUG = switch("--debug", "also values for those who work on hybridkv")
_REQUEST = option("request_id REQUEST_ID", "as the engine names it in its answers and logs")


class UnknownRequestError(HybridKVError):
    """No engine has told the daemon of this request."""

    exit_status = 1


@command(SOCKET, JSON)
def run_ping(arguments: argparse.Namespace) -> int:
    """Print the pid of the daemon that answers."""
    socket_path = socket_of(arguments)
    with control_of(arguments) as control:
        pid, boot = control.welcome.pid, control.welcome.boot
    if arguments.json:
        print_json({"socket": socket_path, "pid": pid, "boot": boot})
    else:
        print(f"a daemon answers at {socket_path} (pid {pid})")
    return 0


@command(SOCKET, JSON, _TIERS, _DEBUG)
def run_stats(arguments: argparse.Namespace) -> int:
    """Print the daemon's counters and other facts by name."""
    with control_of(arguments) as control:
        report = control.stats(debug=arguments.debug)
        welcome, engines = control.welcome, control.engines()
    facts = {"boot": welcome.boot, "arena": welcome.arena_path, "pid": str(welcome.pid)}
    facts["metrics"] = report.metrics_url
    if log_path := _log_of(welcome.pid):
        facts["log"] = log_path
    for number, tier in enumerate(report.tiers):
        bound = "" if tier.max_bytes is None else f", at most {format_size(tier.max_bytes)}"
        facts[f"tier_{number}"] = f"{tier.name}: written {tier.write}{bound}"
    for number, engine in enumerate(engines):
        chunk, groups = engine.geometry.chunk_tokens, describe_groups(engine.geometry.groups)
        named = f"engine {engine.engine_id} identity {engine.namespace.hex()[:12]}"
        facts[f"session_{number}"] = f"chunk {chunk} groups {groups} {named}"
    if arguments.json:
        numbers = {
            name: int(value) if value.is_integer() else value
            for name, value in report.values.items()
        }
        print_json({**facts, **numbers}, sort_keys=True)
        return 0
    texts = {name: plain(text) for name, text in sorted(facts.items())}
    texts |= {name: _value_text(name, value) for name, value in sorted(report.values.items())}
    print("\n".join(pairs(texts.items())))
    return 0


def _log_of(pid: int) -> str:
    """The file that a daemon of this machine appends to, which is its log. Empty if unknown."""
    for descriptor in Path(f"/proc/{pid}/fd").glob("*"):
        with contextlib.suppress(OSError, ValueError):
            # A descriptor of the daemon that is closed meanwhile, or another user's, is not its
            # log.
            path = os.readlink(descriptor)
            lines = Path(f"/proc/{pid}/fdinfo/{descriptor.name}").read_text().splitlines()
            flags = next(line for line in lines if line.startswith("flags:"))
            if int(flags.split()[1], 8) & os.O_APPEND and Path(path).is_file():
                return path
    return ""


def _value_text(name: str, value: float) -> str:
    """A counter's value as people read it: ("bytes_committed", 1048576.0) -> "1MiB"."""
    is_size = name.startswith("bytes_") or "_bytes" in name
    return format_size(round(value)) if is_size else f"{value:,.0f}"


@command(SOCKET, JSON, _TIERS)
def run_clear(arguments: argparse.Namespace) -> int:
    """Drop all objects and print. Returns 1 where a tier to be emptied is out of reach."""
    tiers: dict[str, bool] = {}
    with control_of(arguments) as control:
        dropped = control.clear_objects(arguments.tiers)
        if arguments.tiers:
            tiers = {tier.name: tier.is_reachable for tier in control.stats().tiers}
    document: dict[str, object] = {"dropped": dropped}
    sentences = [f"dropped {dropped} objects"]
    if arguments.tiers:
        document["tiers"] = {
            name: "removing" if is_reachable else "out of reach"
            for name, is_reachable in tiers.items()
        }
        ends = {True: "removing its own", False: "out of reach: what it has comes back with it"}
        results = [f"{name} is {ends[is_reachable]}" for name, is_reachable in tiers.items()]
        sentences += results or ["there is no tier below RAM"]
    print(json.dumps(document) if arguments.json else "; ".join(sentences))
    return int(not all(tiers.values()))


@command(_REQUEST, SOCKET, JSON)
def run_explain(arguments: argparse.Namespace) -> int:
    """Print what was looked up, found and loaded for a request, or why not."""
    request_id: str = arguments.request_id
    if not is_writable(request_id):
        what = f"request {request_id!r} is not UTF-8, and no engine names one so"
        raise ConfigError(what, "a name as the engine's log has it works")
    with control_of(arguments) as control:
        explained = control.explain(request_id)
    facts = sentences_of_reply(explained)
    if not facts:
        latest = ", ".join(map(plain, explained.latest)) or "none"
        what = f"no request {request_id!r} ended lately (an engine tells of a request when it ends)"
        raise UnknownRequestError(f"{what}; the latest are: {latest}")
    if arguments.json:
        keys = {name.replace(" ", "_").replace("'", ""): fact for name, fact in facts.items()}
        print_json({"request": request_id, **keys})
    else:
        lines = pairs((plain(name), plain(fact)) for name, fact in facts.items())
        print("\n".join(lines))
    return 0
