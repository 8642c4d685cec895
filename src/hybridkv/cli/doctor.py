"""`hybridkv doctor`: a `vllm serve` command line checked before it is served."""

import argparse
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from hybridkv.cli.arguments import JSON, command, option
from hybridkv.cli.terminal import STYLES, PlainConsole, new_table, print_json
from hybridkv.client.control import ControlClient, DaemonRefusedError, DaemonUnreachableError
from hybridkv.core.errors import ConfigError
from hybridkv.core.findings import Finding, Verdict, fail, failure, ok, warn
from hybridkv.core.paths import socket_of_server
from hybridkv.core.settings import Settings
from hybridkv.core.sizes import format_size
from hybridkv.daemon.filesystem import check_private_directory
from hybridkv.lab.capacity import make_plan, room_finding
from hybridkv.lab.configuration import ConfigReport, inspect_arguments, serve_arguments
from hybridkv.shm import arena
from hybridkv.shm.slots import slot_bytes
from hybridkv.wire.messages import PROTOCOL_VERSION

DAEMON_SECONDS = 2.0

_WORDS = 'a whole "vllm serve MODEL ..." command line, or its arguments'


@command(JSON, option("vllm_arguments -- VLLM ARGS", _WORDS, nargs="+"))
def run_doctor(arguments: argparse.Namespace) -> int:
    """Run every check and print; 1 = the engine would not start, or not use the cache."""
    report = inspect_arguments(serve_arguments(arguments.vllm_arguments))
    findings = [*report.findings, *host_findings(report)]
    count = Counter(finding.verdict for finding in findings)
    failed = count[Verdict.FAIL]
    if arguments.json:
        checks = [asdict(finding) for finding in findings]
        identity = {"identity": report.identity, "identity_facts": report.facts}
        print_json({"ok": not failed, "checks": checks, **identity})
        return int(failed > 0)
    columns = ("check", "state", "what", "remedy")
    table = new_table(columns, columns, "hybridkv doctor")
    for column in table.columns:
        column.overflow = "fold"
    for finding in findings:
        words = (finding.check, str(finding.verdict), finding.what, finding.remedy)
        table.add_row(*words, style=STYLES.get(finding.verdict))
    console = PlainConsole(160)
    console.print(table)
    if report.identity:
        console.print(f"identity {report.identity}", highlight=False)
        for name, value in report.facts.items():
            console.print(f"  {name}: {value}", highlight=False)
    print(f"{failed} failed, {count[Verdict.WARN]} warnings, {count[Verdict.OK]} ok")
    return int(failed > 0)


def host_findings(report: ConfigReport) -> Iterator[Finding]:
    """The socket, the daemon, the memory and the room for prompts; nothing is started."""
    settings = report.settings
    try:
        socket_path = socket_of_server(settings.server, os.environ, os.geteuid())
    except ConfigError as error:
        yield failure("socket", error)
        return
    try:
        check_private_directory(Path(socket_path).parent, "server")
        yield ok("socket", socket_path)
    except ConfigError as error:
        yield failure("socket", error)
    arena_bytes: int | None = None
    try:
        with ControlClient(socket_path, DAEMON_SECONDS) as control:
            arena_bytes, pid = control.welcome.slots_bytes, control.welcome.pid
    except DaemonRefusedError as error:
        remedy = 'another "server" works, like "unix:///tmp/hybridkv/daemon.sock"'
        yield fail("daemon", str(error), remedy)
    except DaemonUnreachableError as error:
        if settings.server == "auto":
            yield ok("daemon", f"none runs at {socket_path}; vLLM will start one")
        else:
            yield warn("daemon", error.what, error.remedy)
    else:
        yield ok(
            "daemon",
            f"process {pid} of this user at {socket_path}, protocol {PROTOCOL_VERSION}, "
            f"{format_size(arena_bytes)} of memory",
        )
    yield _memory(settings, arena_bytes)
    if report.preview is not None:
        ram_bytes = arena_bytes or settings.ram_bytes or arena.default_ram_bytes()
        totals = make_plan(report.preview, ram_bytes, slot_bytes).totals
        if totals is not None:
            yield room_finding(totals)


def _memory(settings: Settings, arena_bytes: int | None) -> Finding:
    """Whether the machine has the memory that a daemon to be started would take."""
    room = (
        f"of {format_size(arena.machine_memory_bytes())} that this process may use (machine or "
        f"control group), {format_size(arena.shm_free_bytes())} free in {arena.SHM_DIR}"
    )
    if arena_bytes is None:
        wanted = settings.ram_bytes or arena.default_ram_bytes()
        try:
            arena.check_ram(wanted, "kv_connector_extra_config.ram")
        except ConfigError as error:
            return failure("memory", error)
        return ok("memory", f"{format_size(wanted)} {room}")
    has = format_size(arena_bytes)
    if settings.ram_bytes is None or settings.ram_bytes == arena_bytes:
        return ok("memory", f"the daemon has {has} {room}")
    ram = format_size(settings.ram_bytes)
    what = f"ram={ram} is asked for, and the running daemon has {has}"
    return warn("memory", what, "ending that daemon before serving works")
