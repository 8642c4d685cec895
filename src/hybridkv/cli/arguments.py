"""Arguments that several commands have."""

import argparse
import os
from collections.abc import Iterable

from hybridkv.core.paths import check_socket_path, default_socket


def add_socket(parser: argparse.ArgumentParser) -> None:
    """The daemon to ask."""
    parser.add_argument(
        "--socket", default=default_socket(os.environ, os.geteuid()), metavar="PATH"
    )


def socket_of(arguments: argparse.Namespace) -> str:
    """The path of that daemon's socket; raises ConfigError where no socket can have it."""
    return check_socket_path(arguments.socket, "socket")


def add_json(parser: argparse.ArgumentParser) -> None:
    """Whether the output is for programs."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def add_model(
    parser: argparse.ArgumentParser,
    bundled: Iterable[str],
    otherwise: str,
    what: str = "a model directory (its config.json is enough), a hub name",
    default: str | None = None,
) -> None:
    """The model and vLLM's arguments; `otherwise` says what is meant without a model."""
    parser.add_argument(
        "--model",
        default=default,
        metavar="DIR_OR_NAME",
        help=f"{what}, or a bundled tiny model: {', '.join(bundled)} (default: {otherwise})",
    )
    parser.add_argument(
        "vllm_arguments", nargs="*", metavar="-- VLLM ARGS", help="passed to vLLM as they are"
    )
