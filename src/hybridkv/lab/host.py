"""What this machine and its daemon say to the settings of an engine that is not served yet."""

import os
from collections.abc import Iterator
from pathlib import Path

from hybridkv.client.control import ControlClient, DaemonRefusedError, DaemonUnreachableError
from hybridkv.core.capacity import make_plan, room_finding
from hybridkv.core.errors import ConfigError
from hybridkv.core.findings import Finding, fail, failure, ok, warn
from hybridkv.core.paths import socket_of_server
from hybridkv.core.settings import Settings
from hybridkv.core.sizes import format_size
from hybridkv.daemon.filesystem import check_private_directory
from hybridkv.lab.configuration import ConfigReport
from hybridkv.shm import arena
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
