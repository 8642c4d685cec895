"""The `hybridkv` command. Each subcommand is imported when it runs, so that `serve` starts fast."""

import argparse
import contextlib
import errno
import importlib
import io
import os
import sys
from collections.abc import Sequence

from hybridkv import __version__
from hybridkv.cli.arguments import Command
from hybridkv.core.errors import HybridKVError
from hybridkv.vllm.proven import PROVEN
from hybridkv.wire.messages import PROTOCOL_VERSION

EXIT_BAD_INPUT = 2
EXIT_NOBODY_READS = 141  # The exit status of a program that SIGPIPE ended.
COMMANDS = {  # By name: the module with run_NAME, and what `hybridkv --help` says of it.
    "serve": ("serve", "run the cache daemon of this node"),
    "ping": ("control", "say whether a daemon answers"),
    "stop": ("arenas", "end the daemon, and keep its memory for the next one or free it"),
    "arenas": ("arenas", "list the memory of all your daemons, also of those that have ended"),
    "stats": ("control", "print the daemon's counters"),
    "top": ("top", "show what the daemon does, live"),
    "explain": ("control", "say what became of a request, and why"),
    "fsck": ("bundle", "prove every object in a directory, and put right what is wrong"),
    "export": ("bundle", "write objects to one file, from a directory or a daemon's memory"),
    "import": ("bundle", "put the objects of an exported file into a directory"),
    "clear": ("control", "drop everything that the daemon holds"),
    "plan": ("plan", "say what a model costs in the cache, and from which prompt on it helps"),
    "replay": ("replay", "say what caches of several sizes would have hit on a trace of prompts"),
    "doctor": ("plan", "check a vllm serve command line before it is served"),
    "verify": ("verify", "prove on real engines that the cache changes no answer"),
    "completion": ("completion", "print a script by which a shell completes commands and options"),
    "bench": ("bench", "measure the byte path and the lookup"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 2 for bad input, with one line on what works."""
    try:
        try:
            return _run(list(sys.argv[1:] if argv is None else argv))
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:
        _write_no_more()
        return EXIT_NOBODY_READS
    except OSError as error:
        if error.errno != errno.ENOSPC or error.filename is not None:
            raise
        _write_no_more()
        # The error does not say of which file it is.
        what = "standard output or a file that the command writes"
        print(f"hybridkv: {what} has no room ({error.strerror})", file=sys.stderr)
        return EXIT_BAD_INPUT


def _write_no_more() -> None:
    """Send what is still buffered nowhere, or it would fail again when the interpreter ends."""
    with open(os.devnull, "wb") as nowhere:
        for stream in (sys.stdout, sys.stderr):
            # A stream without a descriptor is nobody's pipe.
            with contextlib.suppress(AttributeError, OSError):
                try:
                    stream.flush()
                except OSError:
                    os.dup2(nowhere.fileno(), stream.fileno())


def _run(words: list[str]) -> int:
    if isinstance(sys.stdout, io.TextIOWrapper):
        # What the terminal's encoding does not have must not end a command.
        sys.stdout.reconfigure(errors="replace")
    about = "A KV cache outside the LLM engine."
    parser = argparse.ArgumentParser(prog="hybridkv", description=about)
    parser.add_argument("--version", action="version", version=_versions())
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, (_, about) in COMMANDS.items():
        command = subparsers.add_parser(name, help=about, description=f"{about.capitalize()}.")
        if words[:1] == [name]:
            add_arguments(command, name)
    # argparse refuses what follows "--" where options come before it.
    cut = words.index("--") if "--" in words else len(words)
    parsed = parser.parse_args(words[:cut])
    if parsed.command is None:
        parser.print_help()
        return 0
    if passed := words[cut + 1 :]:
        if "vllm_arguments" not in parsed:
            parser.error(f"unrecognized arguments: {' '.join(passed)}")
        parsed.vllm_arguments += passed
    parsed.commands = {name: about for name, (_, about) in COMMANDS.items()}
    parsed.options_of = options_of
    try:
        _, run = _loaded(parsed.command)
        return run(parsed)
    except HybridKVError as error:
        print(f"hybridkv: {error}", file=sys.stderr)
        return getattr(error, "exit_status", EXIT_BAD_INPUT)
    except KeyboardInterrupt:
        return 130


def _versions() -> str:
    """This package's version, and those of what it must agree with: daemons, engines, vLLM."""
    return f"hybridkv {__version__}, protocol {PROTOCOL_VERSION}, vLLM {', '.join(PROVEN)}"


def _loaded(name: str) -> Command:
    module = importlib.import_module(f"hybridkv.cli.{COMMANDS[name][0]}")
    loaded: Command = getattr(module, f"run_{name}")
    return loaded


def options_of() -> dict[str, list[str]]:
    """The names of every command's options, as its parser has them."""
    found = {}
    for name in COMMANDS:
        parser = argparse.ArgumentParser(prog=name)
        add_arguments(parser, name)
        found[name] = sorted(
            word for word in parser._option_string_actions if word.startswith("--")
        )
    return found


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    """The arguments of a command, as its module has them."""
    for one in _loaded(command)[0]:
        several = isinstance(one, list)
        where = parser.add_mutually_exclusive_group(required=True) if several else parser
        for name, keywords in one if isinstance(one, list) else [one]:
            where.add_argument(name, **keywords)
