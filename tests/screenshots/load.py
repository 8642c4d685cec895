"""Engines without a model that keep a daemon busy with growing conversations."""

import math
import random
import threading
import time
from types import SimpleNamespace
from typing import NamedTuple

from hybridkv.connector.scheduler.requests import (
    RequestLoad,
    RequestLookup,
    StoreProgress,
    TrackedRequest,
    explain_request,
)
from hybridkv.core.coverage import part_bytes
from hybridkv.core.errors import HybridKVError
from hybridkv.core.geometry import Geometry, Group, GroupKind
from hybridkv.core.keys import HASH_BYTES
from hybridkv.core.packed import pack_slots, pack_u64
from hybridkv.wire.messages import PROTOCOL_VERSION as VERSION
from hybridkv.wire.messages import (
    Commit,
    Found,
    Hello,
    Release,
    ReportRequest,
    WireModel,
    geometry_to_wire,
)
from tests.unit.daemon.tierclient import Client, hashes


class Served(NamedTuple):
    """A model whose engine a Player plays."""

    name: str
    model: str
    geometry: Geometry
    identity: bytes
    conversations: int
    per_second: float


def group(gid: int, kind: GroupKind, tokens: int, size: int, window: int = 0) -> Group:
    """A group whose blocks have `size` bytes."""
    return Group(gid, kind, tokens, (size,), window)


NEXT = Geometry(
    (
        group(0, GroupKind.FULL, 256, 192 << 10),
        group(1, GroupKind.RECURRENT, 256, 96 << 10),
        group(2, GroupKind.RECURRENT, 256, 96 << 10),
    ),
    256,
    256,
    256,
)
GEMMA = Geometry(
    (group(0, GroupKind.SLIDING, 128, 80 << 10, 1024), group(1, GroupKind.FULL, 128, 64 << 10)),
    128,
    128,
    128,
)
QWEN = Served(
    name="qwen-0",
    model="Qwen/Qwen3-Next-80B-A3B-Instruct",
    geometry=NEXT,
    identity=b"q" * HASH_BYTES,
    conversations=160,
    per_second=5.0,
)
ENGINES = (
    QWEN,
    QWEN._replace(name="qwen-1"),
    Served(
        name="gemma-0",
        model="google/gemma-3-27b-it",
        geometry=GEMMA,
        identity=b"g" * HASH_BYTES,
        conversations=110,
        per_second=4.0,
    ),
)
STRANGERS = 0.12
"""The share of requests that nobody repeats."""
PREFILL = 8_000
"""Tokens per second that the engines claim to compute."""
WAVE_SECONDS = 150.0
BATCH = 32


class Player(threading.Thread):
    """Plays the requests of one engine until `stop`."""

    def __init__(self, socket_path: str, served: Served, seed: int) -> None:
        super().__init__(name=served.name, daemon=True)
        self._socket_path = socket_path
        self._served = served
        self._rng = random.Random(seed)
        self._over = threading.Event()
        self._turns: dict[int, int] = {}
        self._requests = 0
        self.failed: Exception | None = None

    def stop(self) -> None:
        """End the thread, and wait for its end."""
        self._over.set()
        self.join()

    def run(self) -> None:
        """Make one request after the other."""
        served = self._served
        model = WireModel(
            name=served.model,
            max_model_len=131072,
            kv_dtype="bfloat16",
            layers=[1] * len(served.geometry.groups),
            retention_tokens=None,
            step_tokens=8192,
        )
        try:
            client = Client(self._socket_path, served.geometry, served.name, served.identity)
            client.link.greet_with(
                Hello(
                    id=1,
                    version=VERSION,
                    role="engine",
                    engine_id=served.name,
                    namespace=served.identity,
                    geometry=geometry_to_wire(served.geometry),
                    model=model,
                )
            )
            with client:
                while not self._over.is_set():
                    self._request(client)
                    wave = 1.0 + 0.5 * math.sin(time.monotonic() * 2 * math.pi / WAVE_SECONDS)
                    self._over.wait(self._rng.expovariate(served.per_second * wave))
        except (AssertionError, HybridKVError) as error:
            self.failed = error

    def _request(self, client: Client) -> None:
        """Play a turn of a conversation: look up, load, store new chunks, report."""
        served, rng = self._served, self._rng
        prompt = int(served.conversations * rng.random() ** 1.6)
        if rng.random() < STRANGERS:
            # Somebody whose question nobody repeats.
            prompt = rng.randrange(10_000, 1 << 30)
        turns = self._turns[prompt] = self._turns.get(prompt, rng.randrange(2, 8)) + rng.choice(
            (0, 0, 1)
        )
        if turns > 24:
            self._turns[prompt] = 4
        chunks = min(turns, 24)
        tokens = chunks * served.geometry.chunk_tokens + rng.randrange(
            1, served.geometry.chunk_tokens
        )
        number = client.ask(prompt, chunks, 1000, PREFILL)
        found = client.answer(number)
        loaded = found.chunks * served.geometry.chunk_tokens
        size = sum(self._sizes(found))
        if found.chunks:
            client.tell(Release(number, loaded, size))
        stored = self._store(client, prompt, chunks, found)
        asked = b"".join(hashes(prompt, chunks))
        tracked = TrackedRequest(
            SimpleNamespace(num_prompt_tokens=tokens),
            lookup=RequestLookup(asked, answer=found),
            load=RequestLoad(loaded_tokens=loaded, loaded_bytes=size),
            local_seen=0,
            progress=StoreProgress(objects=stored),
        )
        explanation = explain_request(served.geometry, tracked)
        self._requests += 1
        client.tell(
            ReportRequest(f"chatcmpl-{rng.getrandbits(64):016x}-{self._requests}", explanation)
        )

    def _sizes(self, found: Found) -> list[int]:
        geometry = self._served.geometry
        return [
            part_bytes(geometry, group, chunk)
            for group, mask in zip(geometry.groups, found.masks, strict=True)
            for chunk in range(found.chunks)
            if mask[chunk] and (group.kind is not GroupKind.RECURRENT or chunk == found.chunks - 1)
        ]

    def _store(self, client: Client, prompt: int, chunks: int, found: Found) -> int:
        geometry, names = self._served.geometry, hashes(prompt, chunks)
        stored = 0
        for index, group in enumerate(geometry.groups):
            missing = [
                chunk
                for chunk in range(chunks)
                if not found.masks[index][chunk]
                and part_bytes(geometry, group, chunk)
                and (group.kind is not GroupKind.RECURRENT or chunk == chunks - 1)
            ][:BATCH]
            if not missing:
                continue
            size = part_bytes(geometry, group, missing[0])
            slots = client.want(size, 1, len(missing))
            for slot, chunk in zip(slots, missing, strict=False):
                client.fill(slot, index, names[chunk], size, 1)
                parent = names[chunk - 1] if chunk else bytes(HASH_BYTES)
                client.tell(
                    Commit(
                        slots=pack_slots([slot]),
                        groups=pack_u64([index]),
                        hashes=names[chunk],
                        tokens=geometry.chunk_tokens if group.kind is GroupKind.FULL else 0,
                        parents=parent,
                    )
                )
                stored += 1
        return stored
