"""The measurement behind `hybridkv bench hooks`: what each scheduler-side hook costs, per request and step.

The scheduler side, its supervision, its link and the daemon are the real ones, and so are vLLM's request, hashes and
block tables. As in the engine the collector leaves alone what was there at the start. Before every call the same bench
times a loop of fixed work, which shows what the machine alone does to a measurement of that length.

A request is measured with one clock: asking for a thread's processor time is a call into the kernel's scheduler, which
lets others run then and there, and that would count as the hook's time.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar

from vllm import SamplingParams
from vllm.utils.gc_utils import freeze_gc_heap
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock, get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from hybridkv.connector.metadata import StepPlan, StepReport
from hybridkv.connector.scheduler import SchedulerSide
from hybridkv.connector.supervise import Supervisor
from hybridkv.connector.tracked import block_tables
from hybridkv.core.coverage import needed_blocks
from hybridkv.core.errors import HybridKVError
from hybridkv.core.geometry import Geometry, Kind
from hybridkv.core.keys import fingerprint
from hybridkv.core.settings import Settings

ANSWER_SECONDS = 10.0
DECODE_STEPS = 50
LOOP_US = 50
"""What the loop of fixed work takes where nothing disturbs it."""
WARM_ROUNDS = 2
"""Not counted."""
Result = TypeVar("Result")


def measure_hooks(
    socket_path: str, geometry: Geometry, prompt_tokens: int, step_tokens: int, rounds: int
) -> list[dict[str, Any]]:
    """Microseconds of every hook over `rounds` computed requests and as many that hit, of `prompt_tokens` tokens."""
    init_none_hash(sha256)
    bench = _Bench(socket_path, geometry, step_tokens, fingerprint({"prompt tokens": prompt_tokens}))
    freeze_gc_heap()
    try:
        for number in range(-WARM_ROUNDS, rounds):
            if not number:
                bench.forget()
            bench.processor_time = number % 2 == 1
            for hits in (False, True):
                bench.serve(number, prompt_tokens, hits)
    finally:
        bench.side.close()
    return [
        {
            "prompt tokens": prompt_tokens,
            "hook": hook,
            "calls": len(times),
            "p50_us": round(statistics.median(times) * 1e6, 1),
            "p99_us": round(_p99(times) * 1e6, 1),
            "max_us": round(max(times) * 1e6, 1),
            "cpu_p99_us": round(_p99(bench.cpu_times[hook]) * 1e6, 1),
            f"p99_us of a {LOOP_US} us loop": round(_p99(bench.loop_times[hook]) * 1e6, 1),
        }
        for hook, times in bench.times.items()
    ]


def _p99(times: Sequence[float]) -> float:
    return sorted(times)[len(times) * 99 // 100]


class _Bench:
    def __init__(self, socket_path: str, geometry: Geometry, step_tokens: int, namespace: bytes) -> None:
        self._geometry = geometry
        self._step_tokens = step_tokens
        self._hasher = get_request_block_hasher(geometry.hash_tokens, sha256)
        self.times: dict[str, list[float]] = defaultdict(list)
        self.cpu_times: dict[str, list[float]] = defaultdict(list)
        """Without what the thread waited for a core."""
        self.loop_times: dict[str, list[float]] = defaultdict(list)
        """Of the loop before each call."""
        self._loop = range(_loop_length())
        self._supervisor = Supervisor("bench")
        settings = Settings(lookup_timeout_ms=ANSWER_SECONDS * 1e3)
        self.side = SchedulerSide(
            settings, geometry, namespace, "bench", socket_path, step_tokens, self._supervisor.counters, 1 << 30
        )
        self._report(self._plan_nothing(), "")
        deadline = time.monotonic() + ANSWER_SECONDS
        while not self._boot and time.monotonic() < deadline:
            self._boot = self._plan_nothing().boot
        self._report(StepPlan(boot=self._boot), "")

    _boot = ""
    processor_time = False
    """Whether hooks are timed without what the thread waits for a core."""

    def forget(self) -> None:
        """What was measured so far."""
        for times in (self.times, self.cpu_times, self.loop_times):
            times.clear()

    def serve(self, number: int, hit_tokens: int, hits: bool) -> None:
        """One request from arrival to its end; one token beyond the last boundary, which is always computed."""
        token = 1000 + WARM_ROUNDS + number
        prompt_tokens = hit_tokens + 1
        request = Request(
            f"{number}-{hits}",
            [token, *range(prompt_tokens - 1)],
            SamplingParams(max_tokens=1),
            None,
            block_hasher=self._hasher,
        )
        kind = "hit" if hits else "miss"
        self._timed(f"on_new_request ({kind})", lambda: self.side.arrived(request))
        external = self._matched(request, kind)
        if bool(external) != hits:
            raise HybridKVError(f"a lookup gave {external} tokens where a {kind} was expected")
        blocks = self._blocks(prompt_tokens, external)
        tables = partial(block_tables, blocks)
        self._timed(
            f"update_state_after_alloc ({kind})",
            lambda: self.side.allocated(request, tables(), external),
        )
        if external:
            plan = self._timed("build_connector_meta (load)", self._plan_nothing)
            if list(plan.loads) != [request.request_id]:
                raise HybridKVError("the load was not planned")
            self._report(StepPlan(boot=self._boot), "update_connector_output (loaded)", request.request_id)
        computed = external
        while computed < prompt_tokens:
            request.num_computed_tokens = computed
            scheduled = min(self._step_tokens, prompt_tokens - computed)
            self._wait_for_slots()
            plan = self._step(request, scheduled, tables, "prefill")
            self._report(plan, "update_connector_output (stored)")
            computed += scheduled
        request.num_computed_tokens = prompt_tokens - 1
        for _ in range(DECODE_STEPS):
            self._step(request, 1, tables, "decode")
        self._timed("request_finished", lambda: self.side.finished(request.request_id))

    def _matched(self, request: Request, kind: str) -> int:
        deadline = time.monotonic() + ANSWER_SECONDS
        while time.monotonic() < deadline:
            tokens = self._timed("get_num_new_matched_tokens", lambda: self.side.matched(request, 0))
            if tokens is not None:
                return tokens
        raise HybridKVError(f"no answer to a lookup ({kind}) within {ANSWER_SECONDS:g} s")

    def _step(self, request: Request, scheduled: int, tables: Callable[[], Any], what: str) -> StepPlan:
        offers = {}
        boundary = request.num_computed_tokens + scheduled
        if what == "prefill" and boundary % self._geometry.chunk_tokens == 0:
            recurrent = [group for group in self._geometry.groups if group.kind is Kind.RECURRENT]
            offers = {request.request_id: [(g.gid, boundary // g.tokens_per_block, boundary) for g in recurrent]}
        output = _output({request.request_id: scheduled}, offers)
        return self._timed(f"build_connector_meta ({what})", lambda: self.side.planned(output, lambda _: tables()))

    def _plan_nothing(self) -> StepPlan:
        return self.side.planned(_output({}, {}), lambda _: ())

    def _report(self, plan: StepPlan, hook: str, finished: str = "") -> None:
        report = StepReport({self._boot: 1} if self._boot else {}, {number: {0} for number in plan.stores})
        done = {finished} if finished else set()

        def take() -> None:
            self.side.reported(done, set(), report)

        if hook:
            self._timed(hook, take)
        else:
            take()

    def _wait_for_slots(self) -> None:
        """A real step takes so long that the daemon's grant is always there; ours take microseconds."""
        deadline = time.monotonic() + ANSWER_SECONDS
        self._plan_nothing()
        while self.side.awaits_slots and time.monotonic() < deadline:
            self._plan_nothing()

    def _blocks(self, prompt_tokens: int, external: int) -> KVCacheBlocks:
        """Tables as the engine has them: after a hit, null where it needs nothing."""
        tables = []
        for group in self._geometry.groups:
            needed = needed_blocks(group, external)
            tables.append(
                [
                    KVCacheBlock(0 if position < needed.start else position + 1)
                    for position in range(-(-prompt_tokens // group.tokens_per_block))
                ]
            )
        return KVCacheBlocks(tuple(tables))

    def _timed(self, hook: str, work: Callable[[], Result]) -> Result:
        self.loop_times[hook].append(_loop_seconds(self._loop))
        clock, times = (time.thread_time, self.cpu_times) if self.processor_time else (time.perf_counter, self.times)
        started = clock()
        result: Result = self._supervisor.run(hook, work, _give_up)
        times[hook].append(clock() - started)
        return result


def _give_up() -> Any:
    raise HybridKVError("a hook failed")


def _output(scheduled: dict[str, int], offers: dict[str, list[tuple[int, int, int]]]) -> Any:
    """What of the engine's SchedulerOutput the connector reads."""
    state = SimpleNamespace(boundary_state_offloads=offers)
    return SimpleNamespace(
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=sum(scheduled.values()),
        kv_connector_block_state=state,
    )


def _loop_seconds(steps: range) -> float:
    started = time.perf_counter()
    for _ in steps:
        pass
    return time.perf_counter() - started


def _loop_length() -> int:
    """Steps of a loop that takes LOOP_US."""
    trial = range(1000)
    return round(LOOP_US * 1e-6 / min(_loop_seconds(trial) for _ in range(1000)) * len(trial))
