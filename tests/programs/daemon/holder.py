"""A client process that takes leases and write slots and waits: `holder SOCKET NUMBER`."""

import sys

from hybridkv.client.control import ControlClient
from hybridkv.wire.messages import (
    PROTOCOL_VERSION,
    Found,
    Hello,
    Lookup,
    Reserve,
    Reserved,
    geometry_to_wire,
)
from tests.layouts import LAYOUTS

GEOMETRY = LAYOUTS["qwen3"]
PART = GEOMETRY.groups[0].block_bytes
IDENTITY = b"n" * 32
OBJECTS = 4
"""That are stored before, under the hashes 0, 1 ..."""
HASHES = b"".join(bytes([number]) * 32 for number in range(OBJECTS))
SLOTS = 3


def engine_hello(name: str) -> Hello:
    """An engine's greeting."""
    return Hello(1, PROTOCOL_VERSION, "engine", name, IDENTITY, geometry_to_wire(GEOMETRY))


def take(engine: ControlClient) -> None:
    """Two leases and some slots."""
    for lease in (1, 2):
        found = engine.call(Lookup(10 + lease, lease, HASHES))
        assert isinstance(found, Found)
        assert found.chunks == OBJECTS
    granted = engine.call(Reserve(3, PART, 1, SLOTS))
    assert isinstance(granted, Reserved)


def main() -> None:
    """See above."""
    socket_path, name = sys.argv[1:]
    with (
        ControlClient(socket_path, hello=engine_hello(name)) as engine,
        ControlClient(socket_path, hello=Hello(1, PROTOCOL_VERSION, "worker", name)),
    ):
        take(engine)
        print("held", flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
