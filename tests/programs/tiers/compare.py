"""What a value costs in the tier and in the client library: python -m tests.programs.tiers.compare

It prints the throughput of each, and the longest time for which another thread did not run. Then
come records in one server, and in a cluster of three, on the same machine.
"""

import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import valkey as library

from hybridkv.core.keys import KEY_BYTES
from hybridkv.core.tier_urls import parse_tier
from hybridkv.tiers.conformance.samples import pages
from hybridkv.tiers.contract import ReadRequest, WriteRequest
from hybridkv.tiers.valkey.tier import ValkeyTier
from tests.programs.tiers.cluster import ValkeyCluster
from tests.programs.tiers.servers import ValkeyServer

VALUE_BYTES = 32 << 20
RECORDS = 32  # Of one call to one server, or to a cluster. Together they have VALUE_BYTES.
ROUNDS = 10
FINDS = 200
TICK_SECONDS = 0.0002


class Watch:
    """Another thread, which wants to run all the time as the daemon's loop does."""

    def __init__(self) -> None:
        self.longest_seconds = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        last = time.perf_counter()
        while not self._ended.wait(TICK_SECONDS):
            now = time.perf_counter()
            self.longest_seconds = max(self.longest_seconds, now - last)
            last = now

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


def measure(name: str, call: Callable[[], object]) -> None:
    """Measure one way of moving a value, and print a line."""
    call()
    with Watch() as watch:
        start = time.perf_counter()
        for _ in range(ROUNDS):
            call()
        seconds = time.perf_counter() - start
    speed = ROUNDS * VALUE_BYTES / seconds / 1e9
    print(
        f"{name:15} {speed:5.2f} GB/s, others waited up to {watch.longest_seconds * 1e3:5.1f} ms",
        flush=True,
    )


def main() -> None:
    """Compare over a Unix socket, with a value in two pieces."""
    half = VALUE_BYTES // 2
    source, into, key = pages(VALUE_BYTES), pages(VALUE_BYTES), bytes(KEY_BYTES)
    source[:] = into[:] = bytes(range(256)) * (VALUE_BYTES // 256)
    with tempfile.TemporaryDirectory() as place, ValkeyServer(Path(place)) as server:
        tier = ValkeyTier(parse_tier(f"valkey+unix://{server.socket}", "tier"))
        tier.open()
        with library.Valkey(unix_socket_path=str(server.socket)) as client:

            def get() -> None:
                into[:] = client.get("key")

            measure(
                "library put", lambda: client.set("key", b"".join([source[:half], source[half:]]))
            )
            measure("library get", get)
        measure("tier put", lambda: tier.put([WriteRequest(key, [source[:half], source[half:]])]))
        measure("tier get", lambda: tier.get([ReadRequest(key, [into[:half], into[half:]])]))
        tier.close()
    with tempfile.TemporaryDirectory() as place, ValkeyServer(Path(place)) as server:
        measure_records("one server", server.url)
    with tempfile.TemporaryDirectory() as place, ValkeyCluster(Path(place)) as cluster:
        measure_records("a cluster", cluster.url())


def measure_records(name: str, url: str) -> None:
    """Measure puts and gets of several records by one call, and print a line for each."""
    tier = ValkeyTier(parse_tier(url, "tier"))
    tier.open()
    size, source = VALUE_BYTES // RECORDS, pages(VALUE_BYTES)
    parts = [source[start : start + size] for start in range(0, VALUE_BYTES, size)]
    keys = [bytes([number]) * KEY_BYTES for number in range(RECORDS)]
    puts = [WriteRequest(key, [part]) for key, part in zip(keys, parts, strict=True)]
    gets = [ReadRequest(key, [part]) for key, part in zip(keys, parts, strict=True)]
    measure(f"{name}, put", lambda: tier.put(puts))
    measure(f"{name}, get", lambda: tier.get(gets))
    start = time.perf_counter()
    for _ in range(FINDS):
        tier.find(keys)
    print(f"{name}, find of {RECORDS}: {(time.perf_counter() - start) / FINDS * 1e3:.2f} ms")
    tier.close()


if __name__ == "__main__":
    main()
