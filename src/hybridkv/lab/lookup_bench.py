"""`hybridkv bench lookup`: hits of several lengths, as the engine's side sees them."""

import random
import time
from collections.abc import Iterator
from typing import Any

from hybridkv.client.control import ControlClient
from hybridkv.core.geometry import Geometry, Group, GroupKind
from hybridkv.core.keys import HASH_BYTES
from hybridkv.core.packed import pack_u64, unpack_u64
from hybridkv.lab.daemon_process import DaemonProcess, engine_hello, reserve
from hybridkv.wire.messages import Commit, Found, Lookup, Release

LOOKUP_TOKENS = (1024, 4096, 16384, 32768, 65536, 131072)
LOOKUPS = 300
_BLOCK_TOKENS = 128
_PART_BYTES = 256


def measure_lookups(socket_path: str) -> Iterator[dict[str, Any]]:
    """Milliseconds of a lookup on a hybrid of one full and two sliding groups, by its length."""
    groups = (
        Group(0, GroupKind.FULL, _BLOCK_TOKENS, (_PART_BYTES,)),
        *(Group(gid, GroupKind.SLIDING, _BLOCK_TOKENS, (_PART_BYTES,), 1024) for gid in (1, 2)),
    )
    hello = engine_hello(Geometry(groups, _BLOCK_TOKENS, _BLOCK_TOKENS, _BLOCK_TOKENS))
    hashes = random.Random(0).randbytes(LOOKUP_TOKENS[-1] // _BLOCK_TOKENS * HASH_BYTES)
    with DaemonProcess(socket_path, "256MiB"), ControlClient(socket_path, hello=hello) as control:
        for index in range(len(groups)):
            # An (unwritten) object of the group for every hash.
            unnamed = memoryview(hashes)
            for granted in reserve(control, _PART_BYTES, len(hashes) // HASH_BYTES):
                offsets, generations = granted.offsets, granted.generations
                count = len(unpack_u64(offsets))
                named, unnamed = unnamed[: count * HASH_BYTES], unnamed[count * HASH_BYTES :]
                indexes = pack_u64([index] * count)
                control.tell(Commit(offsets, generations, indexes, bytes(named)))
        for tokens in LOOKUP_TOKENS:
            yield _measure(control, tokens, hashes[: tokens // _BLOCK_TOKENS * HASH_BYTES])


def _measure(control: ControlClient, tokens: int, hashes: bytes) -> dict[str, Any]:
    seconds: list[float] = []
    for number in range(1, LOOKUPS + 1):
        lease = tokens + number
        started = time.perf_counter()
        found = control.call(Lookup(lease, lease, hashes))
        seconds.append(time.perf_counter() - started)
        assert isinstance(found, Found)
        assert found.chunks * _BLOCK_TOKENS == tokens
        control.tell(Release(lease))
    seconds.sort()
    return {
        "lookup tokens": tokens,
        "hit tokens": tokens,
        "p50_ms": round(seconds[LOOKUPS // 2] * 1e3, 3),
        "p99_ms": round(seconds[LOOKUPS * 99 // 100] * 1e3, 3),
    }
