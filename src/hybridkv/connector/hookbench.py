"""The measurement behind `hybridkv bench hooks`: what each scheduler-side hook costs, per request and step.

The scheduler side, its link and the daemon are the real ones, and so are vLLM's request, hashes and block tables.
"""

import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, TypeVar

from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock, get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import KVConnectorBlockState
from vllm.v1.request import Request

from hybridkv.connector.metadata import StepPlan, StepReport
from hybridkv.connector.scheduler import SchedulerSide
from hybridkv.connector.tracked import BlockTable
from hybridkv.core.coverage import needed_blocks
from hybridkv.core.errors import HybridKVError
from hybridkv.core.geometry import Geometry, Kind
from hybridkv.core.keys import fingerprint
from hybridkv.core.settings import Settings

ANSWER_SECONDS = 10.0
DECODE_STEPS = 200
Result = TypeVar("Result")


def measure_hooks(
    socket_path: str, geometry: Geometry, prompt_tokens: int, step_tokens: int, rounds: int
) -> list[dict[str, Any]]:
    """Microseconds of every hook over `rounds` computed requests and as many that hit, of `prompt_tokens` tokens."""
    init_none_hash(sha256)
    bench = _Bench(socket_path, geometry, step_tokens, fingerprint({"prompt tokens": prompt_tokens}))
    try:
        for number in range(rounds):
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
        counters: Counter[str] = Counter()
        settings = Settings(lookup_timeout_ms=ANSWER_SECONDS * 1e3)
        self.side = SchedulerSide(settings, geometry, namespace, "bench", socket_path, step_tokens, counters, 1 << 30)
        self._report(self._plan({}, {}), "")
        deadline = time.monotonic() + ANSWER_SECONDS
        while not self._boot and time.monotonic() < deadline:
            self._boot = self._plan({}, {}).boot
        self._report(StepPlan(boot=self._boot), "")

    _boot = ""

    def serve(self, number: int, hit_tokens: int, hits: bool) -> None:
        """One request from arrival to its end; one token beyond the last boundary, which is always computed."""
        token = 1000 + number
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
        tables = blocks.get_block_ids
        self._timed(
            f"update_state_after_alloc ({kind})",
            lambda: self.side.allocated(request, [*map(BlockTable, blocks.blocks)], external),
        )
        if external:
            plan = self._timed("build_connector_meta (load)", lambda: self._plan({}, {}))
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
        state = KVConnectorBlockState({request.request_id}, lambda _: tables(), offers)
        return self._timed(f"build_connector_meta ({what})", lambda: self._plan({request.request_id: scheduled}, state))

    def _plan(self, scheduled: dict[str, int], state: Any) -> StepPlan:
        if not scheduled:
            state = KVConnectorBlockState(set(), lambda _: (), {})
        output = SimpleNamespace(num_scheduled_tokens=scheduled, kv_connector_block_state=state)
        return self.side.planned(output)

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
        self._plan({}, {})
        while self.side.awaits_slots and time.monotonic() < deadline:
            self._plan({}, {})

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
        started, cpu_started = time.perf_counter(), time.thread_time()
        result = work()
        cpu_ended, ended = time.thread_time(), time.perf_counter()
        self.times[hook].append(ended - started)
        self.cpu_times[hook].append(cpu_ended - cpu_started)
        return result
