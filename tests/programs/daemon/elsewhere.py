"""An engine with a worker, in another pid namespace: `elsewhere SOCKET mapped|unmapped`.

It takes write slots, maps the arena as a worker does, and prints "held". For a line that it reads
it closes both connections, as a reset of the engine does, and prints "closed". If it has mapped the
arena, it may still copy until it ends.
"""

import sys
from pathlib import Path

from hybridkv.client.control import ControlClient
from hybridkv.shm.arena import attach_arena, new_lock
from hybridkv.wire.messages import PROTOCOL_VERSION, Hello, Reserve, Reserved
from tests.programs.daemon.holder import PART, SLOTS, engine_hello


def main() -> None:
    """Hold slots as the module says."""
    socket_path, mapped = sys.argv[1:]
    lock = new_lock()
    worker = Hello(1, PROTOCOL_VERSION, "worker", "e", lock=lock)
    with (
        ControlClient(socket_path, hello=worker) as copying,
        ControlClient(socket_path, hello=engine_hello("e")) as engine,
    ):
        welcome = copying.welcome
        path, size_bytes = Path(welcome.arena_path), welcome.arena_bytes
        if mapped == "mapped":
            arena = attach_arena(path, size_bytes, pid=welcome.pid, lock=lock)
        assert isinstance(engine.call(Reserve(3, PART, 1, SLOTS)), Reserved)
        print("held", flush=True)
        sys.stdin.readline()
    print("closed", flush=True)
    sys.stdin.read()
    if mapped == "mapped":
        arena.close()


if __name__ == "__main__":
    main()
