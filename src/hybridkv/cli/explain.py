"""`hybridkv explain REQUEST_ID`: what was looked up, found and loaded for a request, or why not."""

import argparse
import json
import os

from hybridkv.cli.terminal import plain
from hybridkv.client.control import ControlClient
from hybridkv.core.errors import ConfigError, HybridKVError
from hybridkv.core.paths import check_socket_path, default_socket, is_writable
from hybridkv.observe.explanations import sentences_of_reply


class UnknownRequestError(HybridKVError):
    """The daemon was not told of this request."""

    exit_status = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `explain`."""
    parser.add_argument(
        "request_id", metavar="REQUEST_ID", help="as the engine names it in its answers and logs"
    )
    parser.add_argument(
        "--socket", default=default_socket(os.environ, os.geteuid()), metavar="PATH"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Ask the daemon and print."""
    if not is_writable(arguments.request_id):
        raise ConfigError(
            f"request {arguments.request_id!r} is not UTF-8, and no engine names one so",
            "a name as the engine's log has it works",
        )
    with ControlClient(check_socket_path(arguments.socket, "socket")) as control:
        explained = control.explain(arguments.request_id)
    facts = sentences_of_reply(explained)
    if not facts:
        latest = ", ".join(map(plain, explained.latest)) or "none"
        raise UnknownRequestError(
            f"no request {arguments.request_id!r} ended lately (an engine tells of a request when "
            f"it ends); the latest are: {latest}"
        )
    if arguments.json:
        print(json.dumps({"request": arguments.request_id, **facts}, indent=2))
        return 0
    width = max(len(plain(name)) for name in facts)
    for name, fact in facts.items():
        print(f"{plain(name):<{width}}  {plain(fact)}")
    return 0
