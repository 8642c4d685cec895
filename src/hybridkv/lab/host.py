"""What this machine and its daemon say to the settings of an engine that is not served yet."""

import os
from collections.abc import Iterator
from pathlib import Path

from hybridkv.client.control import ControlClient, DaemonRefusedError, DaemonUnreachableError
from hybridkv.core.errors import ConfigError
from hybridkv.core.findings import Finding, fail, failure, ok, warn
from hybridkv.core.paths import socket_of_server
from hybridkv.core.settings import Settings
from hybridkv.core.sizes import format_size
from hybridkv.daemon.filesystem import check_private_directory
from hybridkv.lab.capacity import make_plan, room_finding
from hybridkv.lab.configuration import ConfigReport
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


def host_findings(report: ConfigReport) -> Iterator[Finding]:
    """The socket, the daemon, the memory and the room for prompts; nothing is started."""
    settings = report.settings
    try:
        socket_path = socket_of_server(settings.server, os.environ, os.geteuid())
    except ConfigError as error:
        yield failure("socket", error)
        return
    yield _directory(socket_path)
    arena_bytes: int | None = None
    try:
        with ControlClient(socket_path, DAEMON_SECONDS) as control:
            arena_bytes, pid = control.welcome.slots_bytes, control.welcome.pid
    except DaemonRefusedError as error:
        remedy = 'another "server" works, like "unix:///tmp/hybridkv/daemon.sock"'
        yield fail("daemon", str(error), remedy)
    except DaemonUnreachableError as error:
        yield _no_daemon(settings, socket_path, error)
    else:
        yield ok(
            "daemon",
            f"process {pid} of this user at {socket_path}, protocol {PROTOCOL_VERSION}, "
            f"{format_size(arena_bytes)} of memory",
        )
    yield _memory(settings, arena_bytes)
    if report.preview is not None:
        ram_bytes = arena_bytes or settings.ram_bytes or default_ram_bytes()
        totals = make_plan(report.preview, ram_bytes, slot_bytes).totals
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
    return warn("daemon", error.what, error.remedy)


def _memory(settings: Settings, arena_bytes: int | None) -> Finding:
    """Whether the machine has the memory that a daemon to be started would take."""
    room = (
        f"of {format_size(machine_memory_bytes())} that this process may use (machine or control "
        f"group), {format_size(shm_free_bytes())} free in {SHM_DIR}"
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
