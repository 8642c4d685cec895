"""`hybridkv serve`: the daemon's process, from its options to its detachment."""

import argparse
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hybridkv.cli.arguments import CONFIG, Argument, command, settings_file, socket_of, switch
from hybridkv.cli.logs import Hangup, has_terminal, start_log
from hybridkv.client.start_daemon import EXIT_ALREADY_SERVED, EXIT_SERVING
from hybridkv.core.daemon_settings import DAEMON_SETTINGS, DaemonSetting, resolve
from hybridkv.core.paths import check_node_name
from hybridkv.core.tier_urls import parse_tier
from hybridkv.daemon.filesystem import AlreadyServedError, fleeting_host_name, node_name
from hybridkv.daemon.loop import ServeOptions, serve
from hybridkv.shm.access import group_id
from hybridkv.shm.arena import shm_directory


def _option(setting: DaemonSetting) -> Argument:
    """A setting of the daemon as an option. It has no default, because `resolve` knows that."""
    keywords: dict[str, Any] = {"dest": setting.key, "help": setting.help}
    if setting.is_switch:
        keywords["action"] = argparse.BooleanOptionalAction
    elif setting.choices is not None:
        keywords["choices"] = setting.choices
    else:
        keywords["metavar"] = setting.metavar
    if setting.is_list:
        keywords["action"] = "append"
    return Argument(setting.option, keywords)


@command(
    CONFIG,
    *(_option(setting) for setting in DAEMON_SETTINGS.values()),
    switch("--detach", "return when it serves, and go on in the background, with no parent"),
)
def run_serve(arguments: argparse.Namespace) -> int:
    """Serve until a signal. SIGTERM leaves the cache to the next daemon, and SIGINT frees it.

    SIGHUP opens the log file anew, and ends the daemon as SIGTERM does if its terminal was closed.
    """
    if arguments.disk is not None:
        arguments.disk = os.path.abspath(arguments.disk)
    file = settings_file(arguments)
    settings = resolve(vars(arguments), os.environ, file.keys, file.path)
    socket_path = Path(socket_of(arguments))
    log_file = start_log(
        settings, settings.log_file or ("auto" if arguments.detach else None), socket_path
    )
    options = ServeOptions(
        socket_path=socket_path,
        ram_bytes=settings.ram_bytes,
        metrics_port=settings.metrics_port,
        fresh=settings.fresh,
        salt_quota_bytes=settings.salt_quota_bytes,
        user_quota_bytes=settings.user_quota_bytes,
        tiers=tuple(parse_tier(url, "tier") for url in settings.tier_urls()),
        node=check_node_name(node_name(socket_path)) if settings.node is None else settings.node,
        shm_dir=shm_directory(settings.shm_dir),
        arena_ttl_seconds=settings.arena_ttl_seconds,
        metrics_host=settings.metrics_host,
        metrics_token_file=settings.metrics_token_file,
        group=group_id(settings.group),
        traces_url=settings.traces or "",
    )
    host = fleeting_host_name(os.environ)
    if settings.node is None and host and any(tier.kind == "disk" for tier in options.tiers):
        text = "node: the host name %s is a container's and may be new with each; --node gpu7 works"
        logging.getLogger("hybridkv.daemon").warning(text, host)
    detach = _detach(log_file) if arguments.detach else lambda: None

    # Whoever started it by nohup wants it to go on without the terminal.
    is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    hangup = Hangup(
        log_file,
        has_own_stderr=arguments.detach,
        ends_with_terminal=has_terminal() and not is_ignored,
    )

    def on_serving() -> None:
        _notify()
        detach()

    try:
        serve(options, on_serving, hangup.on_hangup)
    except AlreadyServedError as error:
        logging.getLogger("hybridkv.daemon").warning("%s", error)
        return EXIT_ALREADY_SERVED
    return 0


def _notify() -> None:
    """Tell the service manager that this process serves, if it was started by one that asked."""
    name = os.environ.pop("NOTIFY_SOCKET", "")
    if not name:
        return
    # "@" stands for the zero byte of an abstract name (sd_notify).
    address = f"\0{name[1:]}" if name.startswith("@") else name
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        # A service manager that does not hear the daemon keeps it from nothing.
        manager.setblocking(False)
        manager.sendto(b"READY=1", address)


def _detach(log_file: str | None) -> Callable[[], None]:
    """Fork. The child goes on in a session of its own, and this process waits until it serves.

    Returns, in the child, the function to call once it serves. That ends this process with
    EXIT_SERVING, and closes the caller's streams in the child. The child's standard error is then
    the log, or stays as it was where there is no log file. If the child ends before it serves, this
    process ends with its status.
    """
    served, serving = os.pipe()
    if child := os.fork():
        os.close(serving)
        if os.read(served, 1):
            sys.exit(EXIT_SERVING)
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    os.close(served)
    os.setsid()

    def on_serving() -> None:
        # A reader of the caller's streams would wait until the daemon ends.
        with open(os.devnull, "r+b") as nowhere:
            os.dup2(nowhere.fileno(), 0)
            os.dup2(nowhere.fileno(), 1)
        if log_file is not None:
            with open(log_file, "ab") as log:
                os.dup2(log.fileno(), 2)
        # The process that started the daemon may have ended.
        with contextlib.suppress(BrokenPipeError):
            os.write(serving, b"\0")
        os.close(serving)

    return on_serving
