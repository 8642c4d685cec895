"""`hybridkv pin` and `unpin`: what RAM has of a request or a tenant stays there for a time."""

import argparse
import time

from hybridkv.cli.arguments import JSON, SOCKET, command, control_of, option
from hybridkv.cli.survey import IDENTITY, SALT, read_digits, read_salt
from hybridkv.cli.terminal import PlainConsole, new_table, plain, print_json
from hybridkv.core.durations import format_duration, parse_duration
from hybridkv.core.errors import ConfigError, HybridKVError
from hybridkv.core.keys import tenant_of
from hybridkv.core.sizes import format_size
from hybridkv.wire import messages as wire

WAIT_SECONDS = 60.0
_REQUEST = option(
    "request_id REQUEST_ID",
    "the prompt of this request, which ended lately, as the engine names it",
    nargs="?",
)
_FOR = option("--for TIME", 'how long, like "2h" (default: 1h)', "1h", dest="ttl")


@command(_REQUEST, SALT, IDENTITY, _FOR, SOCKET, JSON)
def run_pin(arguments: argparse.Namespace) -> int:
    """Pin what is named, and print all pins. Returns 1 where a part of it was refused."""
    seconds = parse_duration(arguments.ttl, "for")
    if not 0 < seconds <= wire.RETENTION_MS_MAX / 1e3:
        what = f"for={arguments.ttl!r} must be more than 0 and at most a day"
        raise ConfigError(what, value="2h")
    request = _request_of(arguments, round(seconds * 1e3))
    pinned = _ask(arguments, request)
    _print(pinned, arguments.json)
    named = request.request_id, request.identity, request.tenant
    mine = [pin for pin in pinned.pins if (pin.request_id, pin.identity, pin.tenant) == named]
    return int(any(pin.kept < pin.chunks or not pin.chunks for pin in mine))


@command(_REQUEST, SALT, IDENTITY, SOCKET, JSON)
def run_unpin(arguments: argparse.Namespace) -> int:
    """End the retention of what is named, whoever wished it, and print the pins that are left."""
    request = _request_of(arguments, 0)
    if not request.names_anything:
        what = "unpin needs to know what: a request, a salt or an identity"
        raise ConfigError(
            what, '"hybridkv unpin --salt -" works, and "hybridkv pin" lists all pins'
        )
    _print(_ask(arguments, request), arguments.json)
    return 0


def _request_of(arguments: argparse.Namespace, ttl_ms: int) -> wire.Pin:
    """Returns the message for what the arguments name. Raises ConfigError."""
    salt = read_salt(arguments.salt)
    identity = read_digits(arguments.identity, "identity")
    if arguments.request_id and (salt or identity):
        raise ConfigError("a request has an identity and a salt", "the request alone works")
    return wire.Pin(
        id=0,
        ttl_ms=ttl_ms,
        request_id=(arguments.request_id or "")[: wire.TEXT_MAX],
        identity=identity,
        tenant=None if salt is None else tenant_of(salt),
    )


def _ask(arguments: argparse.Namespace, request: wire.Pin) -> wire.Pinned:
    """Returns what is pinned once the daemon has done what is asked for."""
    until = time.monotonic() + WAIT_SECONDS
    with control_of(arguments) as control:
        pinned = control.pin_chunks(request)
        while pinned.is_busy:
            if time.monotonic() > until:
                raise HybridKVError(f"the daemon has not done it after {WAIT_SECONDS:.0f} s")
            pinned = control.pin_chunks(wire.Pin(0))
    return pinned


def _print(pinned: wire.Pinned, as_json: bool) -> None:
    if as_json:
        pins = [
            {
                "request": pin.request_id or None,
                "identity": pin.identity or None,
                "tenant": None if pin.tenant is None else f"{pin.tenant:016x}",
                "seconds_left": pin.left_ms / 1e3,
                "chunks": pin.chunks,
                "kept": pin.kept,
            }
            for pin in pinned.pins
        ]
        tenants = [
            {
                "tenant": f"{row.tenant:016x}" if row.tenant else None,
                "retained_bytes": row.charged_bytes,
                "share_bytes": row.share_bytes,
            }
            for row in pinned.tenants
        ]
        print_json({"pins": pins, "retained": tenants})
        return
    console = PlainConsole(width=100)
    table = new_table(["pinned", "for", "chunks", "kept"], left={"pinned"})
    for pin in pinned.pins:
        left = format_duration(pin.left_ms / 1e3)
        table.add_row(_name(pin), left, f"{pin.chunks:,}", f"{pin.kept:,}")
    if pinned.pins:
        console.print(table)
    else:
        print("nothing is pinned")
    for row in pinned.tenants:
        tenant = f"tenant {row.tenant:016x}" if row.tenant else "what has no salt"
        sizes = f"{format_size(row.charged_bytes)} of at most {format_size(row.share_bytes)}"
        print(f"retained for {tenant}: {sizes}")


def _name(pin: wire.WirePin) -> str:
    """What a pin names, for people."""
    if pin.request_id:
        return f"request {plain(pin.request_id)}"
    tenant = "" if pin.tenant is None else f"tenant {pin.tenant:016x}"
    return ", ".join(filter(None, (pin.identity and f"identity {pin.identity}", tenant)))
