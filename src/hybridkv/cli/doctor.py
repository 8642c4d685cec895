"""`hybridkv doctor`: a `vllm serve` command line checked before it is served."""

import argparse
import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from rich.table import Table

from hybridkv.cli.plain import plain_console
from hybridkv.cli.preview import Answer, look, serve_arguments
from hybridkv.client.control import Control, DaemonRefusedError, DaemonUnreachableError
from hybridkv.core.errors import ConfigError
from hybridkv.core.findings import Finding, Verdict, fail, failure, ok, warn
from hybridkv.core.paths import socket_of_server
from hybridkv.core.plan import make_plan, room_finding
from hybridkv.core.settings import Settings
from hybridkv.core.sizes import format_size
from hybridkv.server.place import check_private_directory
from hybridkv.shm.arena import (
    SHM_DIR,
    check_ram,
    default_ram_bytes,
    machine_memory_bytes,
    shm_free_bytes,
)
from hybridkv.shm.slots import slot_bytes
from hybridkv.wire.messages import PROTOCOL_VERSION

DAEMON_SECONDS = 2.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `doctor`."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "vllm_arguments",
        nargs="+",
        metavar="-- VLLM ARGS",
        help='a whole "vllm serve MODEL ..." command line, or its arguments',
    )


def run(arguments: argparse.Namespace) -> int:
    """Run every check and print; 1 = the engine would not start, or not use the cache."""
    answer = look(serve_arguments(arguments.vllm_arguments))
    findings = [*answer.findings, *host_findings(answer)]
    failed = any(finding.verdict is Verdict.FAIL for finding in findings)
    if arguments.json:
        checks = [asdict(finding) for finding in findings]
        print(
            json.dumps(
                {"ok": not failed, "checks": checks, "identity": answer.identity, "identity_facts": answer.facts},
                indent=2,
            )
        )
    else:
        _print_table(findings, answer)
    return int(failed)


def host_findings(answer: Answer) -> Iterator[Finding]:
    """What this machine and its daemon say to the settings."""
    settings = answer.settings
    try:
        socket_path = socket_of_server(settings.server, os.environ, os.geteuid())
    except ConfigError as error:
        yield failure("socket", error)
        return
    yield _directory(socket_path)
    arena_bytes: int | None = None
    try:
        with Control(socket_path, DAEMON_SECONDS) as control:
            arena_bytes, pid = control.welcome.slots_bytes, control.welcome.pid
    except DaemonRefusedError as error:
        yield fail("daemon", str(error), 'another "server" works, like "unix:///tmp/hybridkv/daemon.sock"')
    except DaemonUnreachableError as error:
        yield _no_daemon(settings, socket_path, error)
    else:
        yield ok(
            "daemon",
            f"process {pid} of this user at {socket_path}, protocol {PROTOCOL_VERSION}, "
            f"{format_size(arena_bytes)} of memory",
        )
    yield _memory(settings, arena_bytes)
    if answer.preview is not None:
        ram_bytes = arena_bytes or settings.ram_bytes or default_ram_bytes()
        totals = make_plan(answer.preview, ram_bytes, slot_bytes).totals
        if totals is not None:
            yield room_finding(totals)


def _directory(socket_path: str) -> Finding:
    try:
        check_private_directory(Path(socket_path).parent, "server")
    except ConfigError as error:
        return failure("socket", error)
    return ok("socket", socket_path)


def _no_daemon(settings: Settings, socket_path: str, error: DaemonUnreachableError) -> Finding:
    if settings.server == "auto":
        return ok("daemon", f"none runs at {socket_path}; vLLM will start one")
    return warn("daemon", *str(error).split("; ", 1))


def _memory(settings: Settings, arena_bytes: int | None) -> Finding:
    """Whether the machine has the memory that a daemon to be started would take."""
    room = (
        f"of {format_size(machine_memory_bytes())} that this process may use (machine or control group), "
        f"{format_size(shm_free_bytes())} free in {SHM_DIR}"
    )
    if arena_bytes is not None:
        if settings.ram_bytes is not None and settings.ram_bytes != arena_bytes:
            return warn(
                "memory",
                f"ram={format_size(settings.ram_bytes)} is asked for, and the running daemon has "
                f"{format_size(arena_bytes)}",
                "ending that daemon before serving works",
            )
        return ok("memory", f"the daemon has {format_size(arena_bytes)} {room}")
    wanted = settings.ram_bytes or default_ram_bytes()
    try:
        check_ram(wanted, "kv_connector_extra_config.ram")
    except ConfigError as error:
        return failure("memory", error)
    return ok("memory", f"{format_size(wanted)} {room}")


def _print_table(findings: list[Finding], answer: Answer) -> None:
    table = Table(title="hybridkv doctor", title_justify="left", show_lines=False)
    for column in ("check", "state", "what", "setting that works"):
        table.add_column(column, overflow="fold")
    for finding in findings:
        style = {Verdict.OK: None, Verdict.WARN: "yellow", Verdict.FAIL: "bold red"}[finding.verdict]
        table.add_row(
            finding.check,
            str(finding.verdict),
            finding.what,
            finding.remedy.removesuffix(" works"),
            style=style,
        )
    console = plain_console(160)
    console.print(table)
    if answer.identity:
        console.print(f"identity {answer.identity}", highlight=False)
        for name, value in answer.facts.items():
            console.print(f"  {name}: {value}", highlight=False)
    counts = {verdict: sum(finding.verdict is verdict for finding in findings) for verdict in Verdict}
    print(f"{counts[Verdict.FAIL]} failed, {counts[Verdict.WARN]} warnings, {counts[Verdict.OK]} ok")
