"""A client process that takes leases and write slots and waits: `holder SOCKET NUMBER`."""

import sys

from hybridkv.client.control import ControlClient
from hybridkv.wire.messages import PROTOCOL_VERSION, Found, Hello, Lookup, Reserve, Reserved
from tests.layouts import LAYOUTS
from tests.unit.daemon import harness

GEOMETRY = LAYOUTS["qwen3"]
PART = GEOMETRY.groups[0].block_bytes
IDENTITY = b"n" * 32
OBJECTS = 4
"""The objects that are stored before, under the hashes 0, 1 ..."""
HASHES = b"".join(bytes([number]) * 32 for number in range(OBJECTS))
SLOTS = 3


def engine_hello(name: str) -> Hello:
    """The hello of an engine of this module's geometry and identity."""
    return harness.engine_hello(GEOMETRY, name, IDENTITY)


def take(engine: ControlClient) -> None:
    """Take two leases and SLOTS slots."""
    for lease in (1, 2):
        found = engine.call(Lookup(10 + lease, lease, HASHES))
        assert isinstance(found, Found)
        assert found.chunks == OBJECTS
    granted = engine.call(Reserve(3, PART, 1, SLOTS))
    assert isinstance(granted, Reserved)


def main() -> None:
    """Take leases and slots, and wait."""
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
