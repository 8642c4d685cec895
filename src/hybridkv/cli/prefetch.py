"""`hybridkv prefetch`: prompts that are expected are brought from tiers into RAM."""

import argparse
import time
from collections.abc import Mapping

from hybridkv.cli.arguments import JSON, SOCKET, command, control_of, option, socket_of, switch
from hybridkv.cli.terminal import plain, print_json, progress
from hybridkv.client.control import ControlClient
from hybridkv.core.durations import parse_duration
from hybridkv.core.errors import ConfigError, HybridKVError
from hybridkv.core.keys import HASH_BYTES
from hybridkv.core.paths import is_writable
from hybridkv.core.sizes import format_size
from hybridkv.wire.messages import PREFETCH_MS_MAX, PrefetchState, PrefetchStatus

POLL_SECONDS = 0.1  # How often `--wait` asks the daemon.
OPEN_STATES = (PrefetchState.WAITING, PrefetchState.READING)
USEFUL_STATES = (*OPEN_STATES, PrefetchState.WHOLE, PrefetchState.NEEDLESS, PrefetchState.BOUND)
"""States that are no failure: of others RAM may have nothing."""
STATES: Mapping[PrefetchState, str] = {
    PrefetchState.WAITING: "waits for its time",
    PrefetchState.READING: "is being read",
    PrefetchState.WHOLE: "RAM has all that tiers have",
    PrefetchState.NEEDLESS: "RAM had it",
    PrefetchState.ABSENT: "no tier has more of it than RAM",
    PrefetchState.BOUND: "it is larger than the share of RAM for what is prefetched",
    PrefetchState.PRESSURE: "others needed the room",
    PrefetchState.LATE: "it was not read in time",
    PrefetchState.IDENTITY: "its identity is gone",
    PrefetchState.TIERS_AWAY: "no tier answers",
    PrefetchState.FAILED: "a tier failed",
    PrefetchState.NO_TIERS: "the daemon has no tier below RAM",
    PrefetchState.TOO_FAR: "an hour ahead is the most",
    PrefetchState.TOO_MANY: "too many prefetches wait",
}
"""Each state in words."""
_REQUEST = option(
    "request_id REQUEST_ID", "as the engine names it in its answers and logs", nargs="?"
)
_FAMILY = option("--family HEX", "all prompts whose first chunk's hash begins so, the latest first")
_IN = option("--in DURATION", "when the prompt is expected (default: now)", "0s", dest="ahead")
_WAIT = switch("--wait", "wait until they are read, and show how far that is")


class UnknownPromptError(HybridKVError):
    """The daemon knows no such prompt."""

    exit_status = 1


@command([_REQUEST, _FAMILY], _IN, _WAIT, SOCKET, JSON)
def run_prefetch(arguments: argparse.Namespace) -> int:
    """Prefetch prompts, and print what became of them. Returns 1 where nothing came."""
    ahead_ms = 1e3 * parse_duration(arguments.ahead, "--in")
    if ahead_ms > PREFETCH_MS_MAX:
        raise ConfigError(f"--in {arguments.ahead} is more than an hour", '"20s" works')
    family = _family_of(arguments.family) if arguments.family is not None else b""
    request_id = arguments.request_id or ""
    if not family and not (request_id and is_writable(request_id)):
        what = f"request {request_id!r} is no name of a request"
        raise ConfigError(what, "a name as the engine's log has it works")
    with control_of(arguments) as control:
        started = control.start_prefetch(request_id, family, round(ahead_ms))
        if not started.is_known:
            named = f"family {arguments.family}" if family else f"request {plain(request_id)!r}"
            what = f"the daemon at {socket_of(arguments)} knows no prompt of {named}"
            raise UnknownPromptError(
                f"{what}; it knows those of the last lookups since its start, if it has a tier"
            )
        statuses = started.prefetches
        if arguments.wait:
            statuses = _await_end(control, statuses)
    if arguments.json:
        print_json({"prefetches": [_facts(status) for status in statuses]})
    else:
        print("\n".join(map(_sentence, statuses)))
    return int(not any(status.state in USEFUL_STATES for status in statuses))


def _family_of(text: str) -> bytes:
    """The start of a hash: "0a1b" -> two bytes. Raises ConfigError."""
    try:
        start = bytes.fromhex(text)
    except ValueError:
        start = b""
    if not 0 < len(start) <= HASH_BYTES:
        what = f"--family {text!r} is not the start of a hash, an even number of hex digits"
        raise ConfigError(what, '"0a1b2c3d" works')
    return start


def _await_end(control: ControlClient, started: list[PrefetchStatus]) -> list[PrefetchStatus]:
    """Ask until all prefetches have ended. Returns their last states."""
    latest = {status.number: status for status in started if status.number}
    with progress("prompts", len(latest)) as advance:
        open_numbers = list(latest)
        while open_numbers:
            known = {status.number: status for status in control.read_prefetches(open_numbers)}
            latest |= known
            for number in list(open_numbers):
                if number not in known or known[number].state not in OPEN_STATES:
                    open_numbers.remove(number)
                    advance()
            if open_numbers:
                time.sleep(POLL_SECONDS)
    refused = [status for status in started if not status.number]
    return [*latest.values(), *refused]


def _facts(status: PrefetchStatus) -> dict[str, object]:
    return {
        "state": str(status.state),
        "tokens": status.tokens,
        "tokens_in_ram": status.hit_tokens,
        "objects_read": status.objects,
        "bytes_read": status.read_bytes,
        "expected_in_seconds": status.wait_ms / 1e3,
    }


def _sentence(status: PrefetchStatus) -> str:
    """A prefetch for people: "1024 tokens: RAM has all that tiers have, ..."."""
    sentence = f"{status.tokens} tokens: {STATES[status.state]}"
    if status.state is PrefetchState.WAITING:
        return f"{sentence}, in {status.wait_ms / 1e3:.1f} s"
    if status.number and status.state is not PrefetchState.READING:
        read = f"{status.objects} objects ({format_size(status.read_bytes)}) were read"
        sentence += f"; RAM hits {status.hit_tokens} tokens, {read}"
    return sentence
