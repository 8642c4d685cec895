"""What announcing a warm node costs: `python -m benchmarks.announce [--chunks COUNT]`.

An engine stores and describes chunks of many prompts in a real daemon. Another engine of the node
connects and announces all of them, in as many steps as an engine with requests takes, or with
--idle one without. The row has the milliseconds of its last hook of a step, beside those of such
steps once everything is announced, and the bytes of the daemon's token book. Then the daemon is
killed, and the steps withdraw everything. The steps are the same in each replay, and a step's time
is the least that it took in all of them, as in benchmarks.hooks.
"""

import argparse
import os
import select
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from vllm import SamplingParams
from vllm.utils.gc_utils import freeze_gc_heap
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash
from vllm.v1.request import Request

from benchmarks.rows import print_rows
from hybridkv.client.control import ControlClient
from hybridkv.client.link import Link
from hybridkv.connector.scheduler.context import EngineLife, SchedulerContext
from hybridkv.connector.scheduler.descriptions import AnnouncedBlocks, encode_blocks
from hybridkv.connector.scheduler.listeners import EngineIdentity
from hybridkv.connector.scheduler.requests import TrackedRequest
from hybridkv.connector.scheduler.role import SchedulerRole
from hybridkv.core.coverage import slot_shapes
from hybridkv.core.errors import HybridKVError
from hybridkv.core.geometry import Geometry, Group, GroupKind
from hybridkv.core.keys import HASH_BYTES
from hybridkv.core.packed import SLOT_BYTES, pack_u64
from hybridkv.core.settings import Settings
from hybridkv.core.sizes import format_size
from hybridkv.lab.daemon_process import DaemonProcess
from hybridkv.shm.slots import slot_bytes
from hybridkv.vllm.hook_guard import HookGuard
from hybridkv.wire import messages as wire

BLOCK, CHUNK = 16, 128
GEOMETRY = Geometry((Group(0, GroupKind.FULL, BLOCK, (256,)),), CHUNK, BLOCK, BLOCK)
IDENTITY = bytes(range(HASH_BYTES))
SECONDS = 120.0
IDLE_STEPS = 5000  # Steps without anything to announce. The longest says what the machine adds.
BATCH = 32  # Chunks of one message.


class Storing:
    """An engine that stores chunks without computing them."""

    def __init__(self, socket_path: str) -> None:
        hello = wire.Hello(
            id=1,
            version=wire.PROTOCOL_VERSION,
            role="engine",
            engine_id="storing",
            namespace=IDENTITY,
            geometry=wire.geometry_to_wire(GEOMETRY),
        )
        self._link = Link(socket_path, hello, lambda why: None)
        self._until(lambda: self._link.welcome is not None, [])
        self._link.queue(wire.Subscribe(), 0.0)

    def store(self, prompts: int, prompt_chunks: int) -> None:
        """Store and describe the chunks of so many prompts."""
        for _ in range(prompts):
            names = [os.urandom(HASH_BYTES) for _ in range(prompt_chunks)]
            last_block = None
            for at in range(0, prompt_chunks, BATCH):
                part = names[at : at + BATCH]
                parents = [names[at - 1] if at else bytes(HASH_BYTES), *part[:-1]]
                contents = []
                for _ in part:
                    blocks = [
                        maybe_convert_block_hash(BlockHash(os.urandom(HASH_BYTES)))
                        for _ in range(CHUNK // BLOCK)
                    ]
                    described = AnnouncedBlocks(
                        names=blocks,
                        parent=last_block,
                        tokens=list(os.urandom(CHUNK)),
                        extra_keys=[None] * len(blocks),
                    )
                    contents.append(encode_blocks(described) or b"")
                    last_block = blocks[-1]
                slots = self._reserve(len(part))
                hashes = b"".join(part)
                commit = wire.Commit(slots, pack_u64([0]), hashes, parents=parents[0])
                self._link.queue(commit, 0.0)
                self._link.queue(wire.Describe(hashes, b"".join(parents), contents), 0.0)
                self._link.flush(0.0)

    def close(self) -> None:
        """End the session."""
        self._link.close()

    def _reserve(self, count: int) -> bytes:
        """Return write slots, waiting for them."""
        part_bytes, parts = slot_shapes(GEOMETRY, GEOMETRY.groups[0])[0]
        self._link.queue(wire.Reserve(2, part_bytes, parts, count), 0.0)
        slots = b""

        def is_granted() -> bool:
            return len(slots) == count * SLOT_BYTES

        deadline = time.monotonic() + SECONDS
        while not is_granted() and time.monotonic() < deadline:
            for reply in self._poll():
                if isinstance(reply, wire.Error):
                    raise HybridKVError(f"the daemon refused: {reply.message}")
                if isinstance(reply, wire.Reserved):
                    slots += reply.slots
                    if not reply.slots:
                        time.sleep(0.01)  # Its pages are being reserved.
                    if not is_granted():
                        missing = count - len(slots) // SLOT_BYTES
                        self._link.queue(wire.Reserve(2, part_bytes, parts, missing), 0.0)
        if not is_granted():
            raise HybridKVError(f"the daemon gave no slots within {SECONDS:g} s")
        return slots

    def _poll(self) -> list[wire.Reply]:
        self._link.flush(0.0)
        if self._link.fd is not None:
            select.select([self._link.fd], [], [], 1.0)
        return self._link.poll(0.0)

    def _until(self, is_reached: Any, replies: list[wire.Reply]) -> None:
        deadline = time.monotonic() + SECONDS
        while not is_reached():
            replies += self._poll()
            if time.monotonic() > deadline:
                raise HybridKVError(f"the daemon does not answer within {SECONDS:g} s")


class StepTimes(NamedTuple):
    """The seconds of an engine's last hook of a step, in the order of the steps."""

    announcing: list[float]
    idle: list[float]
    withdrawing: list[float]
    blocks: int  # That were announced.

    def least(self, other: "StepTimes") -> "StepTimes":
        """Returns the lesser time of each step. Raises HybridKVError where the steps differ."""
        if len(self.announcing) != len(other.announcing):
            raise HybridKVError("the replays have other steps")
        return StepTimes(
            announcing=[*map(min, self.announcing, other.announcing)],
            idle=[*map(min, self.idle, other.idle)],
            withdrawing=[*map(min, self.withdrawing, other.withdrawing)],
            blocks=self.blocks,
        )

    def row(self) -> dict[str, Any]:
        """Returns the row of the table."""
        busy, idle = sorted(self.announcing), sorted(self.idle)
        return {
            "chunks": self.blocks * BLOCK // CHUNK,
            "steps": len(busy),
            "step p50 ms": _ms(busy[len(busy) // 2]),
            "step p99 ms": _ms(busy[len(busy) * 99 // 100]),
            "worst ms": _ms(busy[-1]),
            "without p50 ms": _ms(idle[len(idle) // 2]),
            "without worst ms": _ms(idle[-1]),
            "withdrawn in steps": len(self.withdrawing),
            "worst of them ms": _ms(max(self.withdrawing)),
        }


def announce(daemon: DaemonProcess, is_idle: bool) -> StepTimes:
    """Connect an engine that announces everything. Returns the times of its steps.

    The daemon is killed at the end.
    """
    context = SchedulerContext(
        settings=Settings(),
        geometry=GEOMETRY,
        engine_id="announcing",
        socket_path=daemon.socket_path,
        step_tokens=8192,
        pool_blocks=1 << 20,
        publishes_events=True,
    )
    guard = HookGuard("announcing")
    role = SchedulerRole(context, EngineLife(context, guard.counters), EngineIdentity(IDENTITY, {}))
    if not is_idle:
        running = Request("running", [1], SamplingParams(max_tokens=1), None)
        role.requests.by_id[running.request_id] = TrackedRequest(running)
    freeze_gc_heap()  # As the engine does.
    busy: list[float] = []
    idle: list[float] = []
    # The names of blocks. The garbage collector does not look into such a dictionary.
    announced: dict[Any, None] = {}
    started = time.monotonic()
    while role.events.has_more or len(idle) < IDLE_STEPS:
        if role.session.link.fd is not None:
            select.select([role.session.link.fd], [], [], 0.002)
        began = time.perf_counter()
        events: list[Any] = role.on_step_end()
        seconds = time.perf_counter() - began
        if events:
            busy.append(seconds)
            announced.update((name, None) for event in events for name in event.block_hashes)
        elif announced:
            idle.append(seconds)
        if time.monotonic() - started > SECONDS:
            raise HybridKVError(f"nothing is announced within {SECONDS:g} s")
    daemon.kill()
    withdrawing: list[float] = []
    blocks = len(announced)
    while announced:
        began = time.perf_counter()
        removed: list[Any] = role.on_step_end()
        withdrawing.append(time.perf_counter() - began)
        for name in (name for event in removed for name in event.block_hashes):
            del announced[name]
        if time.monotonic() - started > 2 * SECONDS:
            raise HybridKVError(f"not all is withdrawn within {SECONDS:g} s")
    role.close()
    return StepTimes(busy, idle[:IDLE_STEPS], withdrawing, blocks)


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


def main() -> int:
    """Fill a daemon, announce what it has, and print a row."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.announce", description=__doc__)
    parser.add_argument("--chunks", type=int, default=100_000, help="default: 100000")
    parser.add_argument("--prompt-chunks", type=int, default=250, help="of a prompt (default: 250)")
    parser.add_argument("--replays", type=int, default=3, help="default: 3")
    parser.add_argument("--idle", action="store_true", help="steps without requests, which do more")
    parser.add_argument("--json", action="store_true", help="print one JSON array")
    options = parser.parse_args()
    prompts = max(1, options.chunks // options.prompt_chunks)
    part_bytes, parts = slot_shapes(GEOMETRY, GEOMETRY.groups[0])[0]
    ram = prompts * options.prompt_chunks * slot_bytes(part_bytes, parts) * 3 // 2 + (64 << 20)
    least: StepTimes | None = None
    for _ in range(options.replays):
        with tempfile.TemporaryDirectory(prefix="hybridkv-bench-") as directory:
            path = str(Path(directory) / "d.sock")
            with DaemonProcess(path, f"{ram >> 20}MiB") as daemon:
                storing = Storing(path)
                storing.store(prompts, options.prompt_chunks)
                with ControlClient(path) as control:
                    values = control.stats().values
                print(f"{values['token_book_chunks']:,.0f} chunks are described", file=sys.stderr)
                times = announce(daemon, options.idle)
                storing.close()
        least = times if least is None else least.least(times)
        print(f"the longest step: {_ms(max(times.announcing))} ms", file=sys.stderr)
    assert least is not None
    row = {**least.row(), "token book": format_size(int(values["token_book_bytes"]))}
    print_rows([row], options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
