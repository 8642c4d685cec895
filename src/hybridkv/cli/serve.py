"""`hybridkv serve`."""

import argparse
import contextlib
import logging
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hybridkv.cli.arguments import SOCKET, command, option, socket_of, switch
from hybridkv.client.control import EXIT_ALREADY_SERVED, EXIT_SERVING
from hybridkv.core.errors import ConfigError
from hybridkv.core.paths import check_node_name
from hybridkv.core.settings import SERVE_SETTINGS
from hybridkv.core.tier_urls import disk_url, parse_tier
from hybridkv.daemon.filesystem import AlreadyServedError, make_private_directory, node_name
from hybridkv.daemon.loop import ServeOptions, serve
from hybridkv.observe.web import METRICS_PORT

_PORT_MAX = 65535


@command(
    SOCKET,
    *(
        (f"--{name}", {"dest": one.name, "default": one.default, **one.metadata["serve"]})
        for name, one in SERVE_SETTINGS.items()
    ),
    option(
        "--metrics-port PORT",
        f"loopback port of /metrics; -1: none (default: {METRICS_PORT}, or a free one)",
        type=int,
    ),
    switch("--fresh", "start empty, even where a daemon that ended left its cache in memory"),
    option("--disk DIRECTORY", "keep objects there too, also over a reboot"),
    option(
        "--disk-bytes SIZE", 'the most that may take, like "200GiB" (default: half of what is free)'
    ),
    option(
        "--tier URL",
        "a tier below RAM, may be given several times, the fastest first: "
        "disk:///directory?bytes=200GiB, valkey://host:6379/0, s3://bucket/prefix, "
        "mooncake://host:50051; with &write=through|back|off, &hourly=SIZE to spare an SSD, "
        "&timeout=SECONDS",
        [],
        action="append",
    ),
    option(
        "--node NAME",
        "tells this daemon from others on one directory (default: host name and socket)",
    ),
    option(
        "--traces URL",
        "send spans of lookups, loads and tiers to an OpenTelemetry collector, like "
        "http://127.0.0.1:4318/v1/traces (needs hybridkv[otel]; default: no)",
    ),
    option("--log-file FILE", 'where to log; "auto": beside the socket'),
    switch("--detach", "return when it serves, and go on in the background, with no parent"),
)
def run_serve(arguments: argparse.Namespace) -> int:
    """Serve until SIGTERM, which leaves the cache to the next daemon, or SIGINT, which frees it."""
    socket_path = Path(socket_of(arguments))
    node = check_node_name(node_name(socket_path) if arguments.node is None else arguments.node)
    values: dict[str, Any] = {}
    for argument, setting in SERVE_SETTINGS.items():
        given, parse = getattr(arguments, setting.name), setting.metadata["parse"]
        values[setting.name] = None if given is None else parse(given, argument)
    urls = list(arguments.tier)
    if arguments.disk is not None:
        urls.insert(0, disk_url(os.path.abspath(arguments.disk), arguments.disk_bytes))
    elif arguments.disk_bytes is not None:
        raise ConfigError("disk-bytes: it needs a directory", "--disk /var/cache/hybridkv works")
    tiers = tuple(parse_tier(url, "tier") for url in urls)
    port, traces = arguments.metrics_port, arguments.traces or ""
    if port is not None and not -1 <= port <= _PORT_MAX:
        what = f"metrics-port={port} must be from 0 to {_PORT_MAX}, or -1 for none"
        raise ConfigError(what, f"{METRICS_PORT} works")
    log_file = _log_to(arguments.log_file, socket_path)
    if arguments.traces is not None and not traces.startswith(("http://", "https://")):
        what = f"traces: {traces!r} is no URL of a collector"
        raise ConfigError(what, '"http://127.0.0.1:4318/v1/traces" works')
    values |= {"tiers": tiers, "node": node, "traces_url": traces}
    detach = _detach(log_file) if arguments.detach else lambda: None

    def on_serving() -> None:
        _notify()
        detach()

    options = ServeOptions(socket_path, metrics_port=port, fresh=arguments.fresh, **values)
    try:
        serve(options, on_serving)
    except AlreadyServedError as error:
        logging.getLogger("hybridkv.daemon").warning("%s", error)
        return EXIT_ALREADY_SERVED
    return 0


def _log_to(log_file: str | None, socket_path: Path) -> str | None:
    """Log from here on; the path of the log, or None where that is standard error."""
    if log_file == "auto":
        make_private_directory(socket_path.parent, "socket")
        log_file = str(socket_path.with_suffix(".log"))
    line = "%(asctime)s %(name)s %(levelname)s %(message)s"
    try:
        logging.basicConfig(level=logging.INFO, filename=log_file, format=line)
    except OSError as error:
        what = f"log-file: {log_file} cannot be written ({error.strerror})"
        raise ConfigError(what, "a file in a directory of yours works") from error
    return log_file


def _notify() -> None:
    """Tell the service manager that started this process, if it asked, that it serves."""
    name = os.environ.pop("NOTIFY_SOCKET", "")
    if not name:
        return
    # "@" stands for the zero byte of an abstract name (sd_notify).
    address = f"\0{name[1:]}" if name.startswith("@") else name
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.setblocking(False)
        manager.sendto(b"READY=1", address)


def _detach(log_file: str | None) -> Callable[[], None]:
    """Go on in a session of its own, in a process that has no parent once it serves.

    The process of the caller ends when the function that is returned was called, or with the status
    of the one that goes on, which has no stream of the caller then. Its standard error is the log,
    or stays where there is no file for that.
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
        # Whoever reads what the caller says would wait until the daemon ends.
        with open(os.devnull, "r+b") as nowhere:
            os.dup2(nowhere.fileno(), 0)
            os.dup2(nowhere.fileno(), 1)
        if log_file is not None:
            with open(log_file, "ab") as log:
                os.dup2(log.fileno(), 2)
        # Whoever started it may be gone.
        with contextlib.suppress(BrokenPipeError):
            os.write(serving, b"\0")
        os.close(serving)

    return on_serving
