"""Which node of a Valkey cluster has which slot. It only computes: others ask and send.

::

    key     -> slot    CRC16 of the key, modulo 16384
    slot    -> node    CLUSTER SLOTS tells all, MOVED and ASK tell one
"""

import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hybridkv.tiers.valkey.resp import RefusedCommand, Reply

SLOTS = 1 << 14


class Address(NamedTuple):
    """Where a server listens."""

    host: str  # Of a Unix socket its path.
    port: int  # 0 = a Unix socket.

    def __str__(self) -> str:
        """The address as in a URL: Address("::1", 6379) -> "[::1]:6379"."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def slot_of(name: bytes) -> int:
    """Returns the slot of a key.

    Where the key has a hash tag, the tag alone decides: b"{kv}:1" and b"{kv}:2" share a slot.
    """
    _, brace, rest = name.partition(b"{")
    tag, end, _ = rest.partition(b"}")
    return binascii.crc_hqx(tag if brace and end and tag else name, 0) % SLOTS


@dataclass(frozen=True)
class SlotMap:
    """The primary of each slot, as somebody has told."""

    owners: Sequence[Address | None]  # By slot. None = nobody serves the slot.
    primaries: Sequence[Address]  # Each once.

    def moved(self, slots: Mapping[int, Address]) -> "SlotMap":
        """Returns the map after these slots went to these nodes."""
        owners = list(self.owners)
        for slot, address in slots.items():
            owners[slot] = address
        return _map_of(owners)


def read_slots(reply: Reply, asked: Address) -> SlotMap | None:
    """Returns the map in the answer of node `asked` to CLUSTER SLOTS. None = it tells of no slot.

    The answer is `[[start, end, [host, port, ...], replica...]...]`. Replicas do not count.
    """
    owners: list[Address | None] = [None] * SLOTS
    for entry in reply if isinstance(reply, list) else ():
        match entry:
            case [int() as start, int() as end, [host, int() as port, *_], *_]:
                address = _address(host if isinstance(host, bytes) else b"", port, asked)
                if 0 <= start <= end < SLOTS and address is not None:
                    owners[start : end + 1] = [address] * (end + 1 - start)
    found = _map_of(owners)
    return found if found.primaries else None


def redirect_of(refusal: RefusedCommand, asked: Address) -> Address | None:
    """Returns the node that the MOVED or ASK of node `asked` names. None = it names none."""
    host, _, port = refusal.target.encode().rpartition(b":")
    return _address(host, int(port), asked) if port.isdigit() else None


def _address(host: bytes, port: int, asked: Address) -> Address | None:
    # A node that does not know its own name has none, or "?". Then the one that was asked is meant.
    if host == b"?" or not 0 < port < 1 << 16:
        return None
    return Address(host.decode("ascii", "replace") or asked.host, port)


def _map_of(owners: Sequence[Address | None]) -> SlotMap:
    return SlotMap(owners, [owner for owner in dict.fromkeys(owners) if owner is not None])
