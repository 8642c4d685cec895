"""`hybridkv stop` and `hybridkv arenas`: the end of a daemon, and what it leaves in memory."""

import argparse
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from hybridkv.cli.arguments import JSON, SHM_DIR, SOCKET, command, shm_dir_of, socket_of, switch
from hybridkv.cli.terminal import PlainConsole, new_table, plain, print_json
from hybridkv.client.control import (
    ControlClient,
    DaemonRefusedError,
    DaemonUnreachableError,
    DaemonVersionError,
)
from hybridkv.client.link import peer_pid
from hybridkv.client.start_daemon import END_SECONDS, end_process
from hybridkv.core.durations import format_duration
from hybridkv.core.errors import HybridKVError
from hybridkv.core.sizes import format_size
from hybridkv.daemon.filesystem import (
    arena_bytes,
    arenas_of_user,
    bound_sockets,
    free_left,
    is_arena_of,
    is_in_use,
    remove_unused,
    stale_arenas,
)
from hybridkv.daemon.orphan import seconds_left
from hybridkv.shm.arena import arena_seen


@command(
    SOCKET,
    SHM_DIR,
    JSON,
    switch("--free", "free its memory too, which is else kept for the next one"),
)
def run_stop(arguments: argparse.Namespace) -> int:
    """End the daemon, wait until it has ended, and print what became of its memory."""
    socket_path, is_freed = socket_of(arguments), arguments.free
    path, pid, directory = Path(socket_path), None, shm_dir_of(arguments)
    left_arenas = stale_arenas(path, directory)
    if not (is_freed and left_arenas and peer_pid(socket_path) < 0):
        signal_number = signal.SIGINT if is_freed else signal.SIGTERM
        pid, ended_arenas = _end(socket_path, signal_number, directory)
        left_arenas += ended_arenas
    if is_freed:
        free_left(path, directory)
    kept_arenas = {*left_arenas, *stale_arenas(path, directory)}
    kept_bytes = sum(arena_bytes(arena)[1] for arena in kept_arenas)
    if arguments.json:
        print_json({"pid": pid, "freed": is_freed, "kept_bytes": kept_bytes})
        return 0
    end = "no daemon was there" if pid is None else f"the daemon (pid {pid}) ended"
    lifetimes = [
        seconds for arena in stale_arenas(path, directory) if (seconds := seconds_left(arena))
    ]
    bound = f", for {format_duration(max(lifetimes))} at most" if lifetimes else ""
    kept = f"{format_size(kept_bytes)} of memory are kept for the next one{bound}"
    print(f"{end}; {'its memory is free again' if is_freed else kept}")
    return 0


def _end(socket_path: str, number: signal.Signals, directory: Path) -> tuple[int, list[Path]]:
    """End the daemon with a signal.

    Returns its pid and its arena, or no arena where the daemon is of another version. Raises
    HybridKVError where there is none, where this user may not end it, or where it does not end.
    """
    arenas = []
    try:
        with ControlClient(socket_path) as control:
            arenas.append(arena_seen(control.welcome.arena_path, str(directory)))
    except DaemonVersionError:
        pass  # It ends by the same signals.
    except DaemonRefusedError:
        raise
    except DaemonUnreachableError as error:
        remedy = _remedy(socket_path, peer_pid(socket_path), directory)
        raise DaemonUnreachableError(error.what, remedy) from None
    pid = peer_pid(socket_path)
    try:
        # Another process may have ended it meanwhile.
        has_ended = pid < 0 or end_process(pid, number)
    except ProcessLookupError:
        has_ended = True
    except OSError:
        what = f"the daemon at {socket_path} is in another pid namespace"
        raise HybridKVError(f"{what}; the same command works there") from None
    if not has_ended:
        what = f"the daemon at {socket_path} did not end within {END_SECONDS:g} s"
        raise DaemonUnreachableError(what, _remedy(socket_path, pid, directory))
    return pid, arenas


def _remedy(socket_path: str, pid: int, directory: Path) -> str:
    if pid > 0:
        return f'"kill -9 {pid}" ends it and keeps its memory for the next one'
    if stale_arenas(Path(socket_path), directory):
        return f'"hybridkv stop --free --socket {socket_path}" frees what the last one left'
    return ""


@command(SOCKET, SHM_DIR, JSON, switch("--prune", "remove those that no daemon has open"))
def run_arenas(arguments: argparse.Namespace) -> int:
    """Print every arena of this user. With --prune, remove those that no daemon has open."""
    sockets = [*bound_sockets(), socket_of(arguments)]
    directory = shm_dir_of(arguments)
    rows = [_row_of(path, sockets, arguments.prune) for path in arenas_of_user(directory)]
    if arguments.json:
        print_json([row._asdict() for row in rows])
    elif not rows:
        print(f"there is no arena of yours in {directory}")
    else:
        columns = ("arena", "size", "memory", "in use", "kept for", "socket")
        table = new_table(columns, ("arena", "socket"))
        for row in rows:
            in_use = "removed" if row.removed else "yes" if row.in_use else "no"
            kept_for = "-" if row.in_use or row.removed else _kept_for(row.kept_seconds)
            table.add_row(
                row.path,
                format_size(row.size_bytes),
                format_size(row.held_bytes),
                in_use,
                kept_for,
                plain(row.socket or "not known"),
            )
        PlainConsole(160).print(table)
    return 0


class _ArenaRow(NamedTuple):
    """An arena as it is printed."""

    path: str
    size_bytes: int
    held_bytes: int  # The memory that it takes.
    in_use: bool  # Whether a daemon has it open.
    socket: str | None  # Where its daemons serve; None where that is not known.
    removed: bool
    kept_seconds: float | None
    """How long it is kept for a next daemon. None where a daemon has it, or without a bound."""


def _kept_for(seconds: float | None) -> str:
    return "no bound" if seconds is None else format_duration(seconds)


def _row_of(path: Path, sockets: Iterable[str], is_pruned: bool) -> _ArenaRow:
    """An arena's row. The arena is removed if `is_pruned` and no daemon has it open."""
    (size_bytes, held_bytes), left_seconds = arena_bytes(path), seconds_left(path)
    is_removed = is_pruned and remove_unused(path)
    in_use = not is_removed and is_in_use(path)
    return _ArenaRow(
        path=str(path),
        size_bytes=size_bytes,
        held_bytes=held_bytes,
        in_use=in_use,
        socket=next((socket for socket in sockets if is_arena_of(path, socket)), None),
        removed=is_removed,
        kept_seconds=None if in_use or is_removed else left_seconds,
    )
