"""`hybridkv explain REQUEST_ID`: what was looked up, found and loaded for a request, or why not."""

import argparse

from hybridkv.cli.arguments import JSON, SOCKET, option, socket_of
from hybridkv.cli.terminal import pairs, plain, print_json
from hybridkv.client.control import ControlClient
from hybridkv.core.errors import ConfigError, HybridKVError
from hybridkv.core.paths import is_writable
from hybridkv.observe.explanations import sentences_of_reply

ARGUMENTS = (
    option("request_id", "REQUEST_ID", "as the engine names it in its answers and logs"),
    SOCKET,
    JSON,
)


class UnknownRequestError(HybridKVError):
    """The daemon was not told of this request."""

    exit_status = 1


def run(arguments: argparse.Namespace) -> int:
    """Ask the daemon and print."""
    request_id: str = arguments.request_id
    if not is_writable(request_id):
        what = f"request {request_id!r} is not UTF-8, and no engine names one so"
        raise ConfigError(what, "a name as the engine's log has it works")
    with ControlClient(socket_of(arguments)) as control:
        explained = control.explain(request_id)
    facts = sentences_of_reply(explained)
    if not facts:
        latest = ", ".join(map(plain, explained.latest)) or "none"
        raise UnknownRequestError(
            f"no request {request_id!r} ended lately (an engine tells of a request when it ends); "
            f"the latest are: {latest}"
        )
    if arguments.json:
        print_json({"request": request_id, **facts})
    else:
        print(*pairs((plain(name), plain(fact)) for name, fact in facts.items()), sep="\n")
    return 0
