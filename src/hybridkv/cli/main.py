"""The `hybridkv` command. Each subcommand is imported when it runs, so that `serve` starts fast."""

import argparse
import contextlib
import errno
import importlib
import io
import os
import sys
from collections.abc import Sequence
from typing import NamedTuple

from hybridkv import __version__
from hybridkv.cli.arguments import Command
from hybridkv.core.copies import PAYLOAD_VERSION
from hybridkv.core.errors import HybridKVError
from hybridkv.core.option_parsers import did_you_mean
from hybridkv.tiers.record import RECORD_VERSION
from hybridkv.vllm.proven import PROVEN
from hybridkv.wire.messages import PROTOCOL_VERSION

EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130
EXIT_NOBODY_READS = 141  # The exit status of a program that SIGPIPE ended.


class CommandEntry(NamedTuple):
    """Where a command is, and what `hybridkv --help` says of it."""

    module: str  # The module of hybridkv.cli with run_NAME.
    about: str


COMMANDS = {
    "serve": CommandEntry("serve", "run the cache daemon of this node"),
    "ping": CommandEntry("control", "say whether a daemon answers"),
    "stop": CommandEntry(
        "arenas", "end the daemon, and keep its memory for the next one or free it"
    ),
    "arenas": CommandEntry(
        "arenas", "list the memory of all your daemons, also of those that have ended"
    ),
    "stats": CommandEntry("control", "print the daemon's counters"),
    "top": CommandEntry("top", "show what the daemon does, live; w wraps lines, q ends it"),
    "explain": CommandEntry("control", "say what became of a request, and why"),
    "pin": CommandEntry("pins", "keep a prompt or a tenant's prompts in RAM for a time"),
    "unpin": CommandEntry("pins", "let what is kept in RAM go again"),
    "prefetch": CommandEntry(
        "prefetch", "bring a prompt from tiers into RAM before it is asked for"
    ),
    "fsck": CommandEntry("fsck", "prove every object in a directory, and put right what is wrong"),
    "ls": CommandEntry("ls", "list what is held in RAM and below, by identity and tenant"),
    "forget": CommandEntry(
        "forget", "delete a tenant's, an identity's, a family's or old objects everywhere"
    ),
    "quota": CommandEntry("quota", "show or set the most that a tenant may take of RAM"),
    "clear": CommandEntry("control", "drop everything that the daemon holds"),
    "plan": CommandEntry(
        "plan", "say what a model costs in the cache, and from which prompt on it helps"
    ),
    "replay": CommandEntry(
        "replay", "say what caches of several sizes would have hit on a trace of prompts"
    ),
    "doctor": CommandEntry("plan", "check a vllm serve command line before it is served"),
    "model": CommandEntry("model", "write a tiny model, to try vllm serve with"),
    "verify": CommandEntry("verify", "prove on real engines that the cache changes no answer"),
    "tier-check": CommandEntry(
        "tier_check", "prove that a tier below RAM keeps the contract, faults included"
    ),
    "completion": CommandEntry(
        "completion", "print a script by which a shell completes commands and options"
    ),
    "bench": CommandEntry("bench", "measure the byte path, the lookup and a directory"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns its exit status: 2 for bad input, with one line on what works."""
    try:
        try:
            return _run(list(sys.argv[1:] if argv is None else argv))
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:
        _write_no_more()
        return EXIT_NOBODY_READS
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except OSError as error:
        if error.errno != errno.ENOSPC or error.filename is not None:
            raise
        _write_no_more()
        # The error does not say of which file it is.
        what = "standard output or a file that the command writes"
        print(f"hybridkv: {what} has no room ({error.strerror})", file=sys.stderr)
        return EXIT_BAD_INPUT


def _write_no_more() -> None:
    """Drop what is still buffered, which would fail again when the interpreter ends."""
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
    description = "A KV cache outside the LLM engine."
    parser = argparse.ArgumentParser(prog="hybridkv", description=description)
    parser.add_argument("--version", action="version", version=_versions())
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, (_, about) in COMMANDS.items():
        description = f"{about.capitalize()}."
        command = subparsers.add_parser(name, help=about, description=description)
        if words[:1] == [name]:
            add_arguments(command, name)
    if words and not words[0].startswith("-") and words[0] not in COMMANDS:
        hint = did_you_mean(words[0], COMMANDS, '"hybridkv --help" lists all')
        print(f"hybridkv: {words[0]!r} is no command; {hint}", file=sys.stderr)
        return EXIT_BAD_INPUT
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
    parsed.commands = {name: entry.about for name, entry in COMMANDS.items()}
    parsed.options_of = options_of
    try:
        return command_of(parsed.command).run(parsed)
    except HybridKVError as error:
        print(f"hybridkv: {error}", file=sys.stderr)
        return getattr(error, "exit_status", EXIT_BAD_INPUT)


def _versions() -> str:
    """This package's version, and those of what it must agree with: daemons, engines, vLLM."""
    formats = f"protocol {PROTOCOL_VERSION}, payload {PAYLOAD_VERSION}, record {RECORD_VERSION}"
    return f"hybridkv {__version__}, {formats}, vLLM {', '.join(PROVEN)}"


def command_of(name: str) -> Command:
    """Returns the command of this name. Imports its module."""
    module = importlib.import_module(f"hybridkv.cli.{COMMANDS[name].module}")
    loaded: Command = getattr(module, f"run_{name.replace('-', '_')}")
    return loaded


def options_of() -> dict[str, list[str]]:
    """Returns the options of each command: {"ping": ["--help", "--json", "--socket"], ...}."""
    options = {}
    for name in COMMANDS:
        parser = argparse.ArgumentParser(prog=name)
        add_arguments(parser, name)
        options[name] = sorted(
            word for word in parser._option_string_actions if word.startswith("--")
        )
    return options


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    """Add the arguments of a command, as its module has them."""
    for argument in command_of(command).arguments:
        if isinstance(argument, list):
            choice = parser.add_mutually_exclusive_group(required=True)
            for name, keywords in argument:
                choice.add_argument(name, **keywords)
        else:
            parser.add_argument(argument.name, **argument.keywords)
