"""`hybridkv serve`."""

import argparse
import logging
import os
from pathlib import Path

from hybridkv.client.spawn import EXIT_ALREADY_SERVED
from hybridkv.core.errors import ConfigError
from hybridkv.core.eviction import Policy
from hybridkv.core.paths import check_node_name, check_socket_path, default_socket
from hybridkv.core.sizes import parse_size
from hybridkv.core.tiers import disk_url, parse_tier
from hybridkv.server.loop import ServeOptions, serve
from hybridkv.server.place import AlreadyServedError, make_private_directory, node_name

METRICS_PORT = 9477
_PORT_MAX = 65535


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `serve`."""
    parser.add_argument("--socket", default=default_socket(os.environ, os.geteuid()), metavar="PATH")
    parser.add_argument(
        "--ram",
        metavar="SIZE",
        help='memory for the cache, like "8GiB" (default: what an earlier daemon left, else a quarter)',
    )
    parser.add_argument(
        "--metrics-port",
        type=int,
        default=METRICS_PORT,
        metavar="PORT",
        help="loopback port of /metrics; a free one where it is taken; -1: none (default: %(default)s)",
    )
    parser.add_argument(
        "--fresh", action="store_true", help="start empty, even where a daemon that ended left its cache in memory"
    )
    parser.add_argument(
        "--eviction",
        choices=[str(policy) for policy in Policy],
        default=Policy.TWO_QUEUES,
        help="what stays: with 2q prompts that nobody repeats do not push out what is read (default: %(default)s)",
    )
    parser.add_argument(
        "--salt-quota",
        metavar="SIZE",
        help='the most that the prompts of one cache_salt may take, like "2GiB" (default: all of --ram)',
    )
    parser.add_argument("--disk", metavar="DIRECTORY", help="keep objects there too, also over a reboot")
    parser.add_argument(
        "--disk-bytes", metavar="SIZE", help='the most that may take, like "200GiB" (default: half of what is free)'
    )
    parser.add_argument(
        "--tier",
        action="append",
        default=[],
        metavar="URL",
        help="a tier below RAM, may be given several times, the fastest first: disk:///directory?bytes=200GiB, "
        "valkey://host:6379/0, s3://bucket/prefix, mooncake://host:50051; with &write=through|back|off, "
        "&hourly=SIZE to spare an SSD, &timeout=SECONDS",
    )
    parser.add_argument(
        "--node", metavar="NAME", help="tells this daemon from others on one directory (default: host name and socket)"
    )
    parser.add_argument(
        "--traces",
        metavar="URL",
        help="send spans of lookups, loads and tiers to an OpenTelemetry collector, like "
        "http://127.0.0.1:4318/v1/traces (needs hybridkv[otel]; default: no)",
    )
    parser.add_argument("--log-file", metavar="FILE", help='where to log; "auto": beside the socket')


def _traces_url(url: str | None) -> str:
    if url is not None and not url.startswith(("http://", "https://")):
        raise ConfigError(f'traces: {url!r} is no URL of a collector; "http://127.0.0.1:4318/v1/traces" works')
    return url or ""


def run(arguments: argparse.Namespace) -> int:
    """Serve until SIGTERM, after which the next daemon goes on with the cache, or SIGINT (Ctrl-C), which frees it."""
    socket_path = Path(check_socket_path(arguments.socket, "socket"))
    node = check_node_name(node_name(socket_path) if arguments.node is None else arguments.node)
    ram_bytes = None if arguments.ram is None else parse_size(arguments.ram, "ram")
    salt_quota_bytes = None if arguments.salt_quota is None else parse_size(arguments.salt_quota, "salt-quota")
    urls = list(arguments.tier)
    if arguments.disk is not None:
        urls.insert(0, disk_url(os.path.abspath(arguments.disk), arguments.disk_bytes))
    elif arguments.disk_bytes is not None:
        raise ConfigError("disk-bytes: it needs a directory; --disk /var/cache/hybridkv works")
    tiers = tuple(parse_tier(url, "tier") for url in urls)
    if not -1 <= arguments.metrics_port <= _PORT_MAX:
        raise ConfigError(
            f"metrics-port={arguments.metrics_port} must be from 0 to {_PORT_MAX}, or -1 for none; {METRICS_PORT} works"
        )
    log_file = arguments.log_file
    if log_file == "auto":
        make_private_directory(socket_path.parent, "socket")
        log_file = str(socket_path.with_suffix(".log"))
    line = "%(asctime)s %(name)s %(levelname)s %(message)s"
    try:
        logging.basicConfig(level=logging.INFO, filename=log_file, format=line)
    except OSError as error:
        raise ConfigError(
            f"log-file: {log_file} cannot be written ({error.strerror}); a file in a directory of yours works"
        ) from error
    try:
        serve(
            ServeOptions(
                socket_path,
                ram_bytes,
                arguments.metrics_port,
                arguments.fresh,
                Policy(arguments.eviction),
                salt_quota_bytes,
                tiers,
                node,
                _traces_url(arguments.traces),
            )
        )
    except AlreadyServedError as error:
        logging.getLogger("hybridkv.daemon").warning("%s", error)
        return EXIT_ALREADY_SERVED
    return 0
