"""`hybridkv serve`."""

import argparse
import logging
import os
from pathlib import Path

from hybridkv.client.spawn import EXIT_ALREADY_SERVED
from hybridkv.core.eviction import Policy
from hybridkv.core.paths import check_socket_path, default_socket
from hybridkv.core.sizes import parse_size
from hybridkv.server.loop import ServeOptions, serve
from hybridkv.server.place import AlreadyServedError, make_private_directory

METRICS_PORT = 9477


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
    parser.add_argument("--log-file", metavar="FILE", help='where to log; "auto": beside the socket')


def run(arguments: argparse.Namespace) -> int:
    """Serve until SIGTERM, after which the next daemon goes on with the cache, or SIGINT (Ctrl-C), which frees it."""
    socket_path = Path(check_socket_path(arguments.socket, "socket"))
    ram_bytes = None if arguments.ram is None else parse_size(arguments.ram, "ram")
    salt_quota_bytes = None if arguments.salt_quota is None else parse_size(arguments.salt_quota, "salt-quota")
    log_file = arguments.log_file
    if log_file == "auto":
        make_private_directory(socket_path.parent, "socket")
        log_file = str(socket_path.with_suffix(".log"))
    logging.basicConfig(level=logging.INFO, filename=log_file, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    try:
        serve(
            ServeOptions(
                socket_path,
                ram_bytes,
                arguments.metrics_port,
                arguments.fresh,
                Policy(arguments.eviction),
                salt_quota_bytes,
            )
        )
    except AlreadyServedError as error:
        logging.getLogger("hybridkv.daemon").warning("%s", error)
        return EXIT_ALREADY_SERVED
    return 0
