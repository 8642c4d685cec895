"""What each hook of the scheduler costs, per request and step: `python -m benchmarks.hooks`.

The scheduler role, its supervision, its link and the daemon are the real ones, and so are vLLM's
request, hashes and block tables. As in the engine, the garbage collector leaves alone what was
there at the start.

The same requests are served several times in the same order, each time by a new scheduler role. The
cost of a call is the least that it took in all replays. An interruption by a shared machine never
hits the same call each time; the hook's own slow path or garbage collection always is. A hook takes
the worst of these costs. A loop of fixed work before every call is judged in the same way, and says
what the machine alone adds.

With `--nodes 2` there are two daemons, and relays as workers have them (connector.worker.relay).
"""

import argparse
import contextlib
import gc
import select
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

from vllm import SamplingParams
from vllm.utils.gc_utils import freeze_gc_heap
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock, get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from benchmarks.rows import print_rows
from hybridkv.client.control import ControlClient
from hybridkv.connector.messages import NodePlans, StepPlan, StepReport
from hybridkv.connector.scheduler.context import EngineLife, SchedulerContext
from hybridkv.connector.scheduler.listeners import EngineIdentity
from hybridkv.connector.scheduler.requests import block_tables
from hybridkv.connector.scheduler.role import SchedulerRole
from hybridkv.connector.worker.relay import Relay
from hybridkv.core.coverage import needed_blocks
from hybridkv.core.errors import HybridKVError
from hybridkv.core.geometry import Geometry, Group, GroupKind, derive_chunk_tokens
from hybridkv.core.keys import fingerprint
from hybridkv.core.settings import Settings
from hybridkv.lab.daemon_process import DaemonProcess
from hybridkv.vllm.hook_guard import HookGuard

ANSWER_SECONDS = 10.0
PROMPT_TOKENS = (32768, 131072)
STEP_TOKENS = 8192
"""Tokens of a prefill step, as on a large device."""
ROUNDS = 24
"""Requests of each kind in a replay."""
RESERVED_BYTES = 256 << 20
RESERVE_SECONDS = 30.0
BUDGET_TOKENS = 1 << 15
BUDGET_US = 100
"""The most that a hook may take up to BUDGET_TOKENS tokens. Beyond them it is twice that."""
DECODE_STEPS = 50
STEP_SECONDS = 0.002
"""The longest time for which a relay waits for an answer before it reports."""
LOOP_US = 50
"""The time of the loop of fixed work where nothing disturbs it."""
REPLAYS = 9
WARM_ROUNDS = 2
"""Rounds of each replay before those that count."""
Result = TypeVar("Result")


def measure_hooks(
    socket_paths: Sequence[str],
    geometry: Geometry,
    prompt_tokens: int,
    step_tokens: int,
    rounds: int,
) -> list[dict[str, Any]]:
    """Microseconds of every hook, over `rounds` misses and as many hits of `prompt_tokens`.

    There is a socket for each of the geometry's nodes.
    """
    init_none_hash(sha256)
    hooks: dict[str, _Times] = defaultdict(_Times)
    steps: list[int] = []
    for replay in range(REPLAYS):
        namespace = fingerprint({"prompt tokens": prompt_tokens, "replay": replay})
        bench = _Bench(
            socket_paths,
            geometry,
            hit_tokens=prompt_tokens,
            step_tokens=step_tokens,
            namespace=namespace,
            hooks=hooks,
        )
        freeze_gc_heap()
        try:
            for number in range(-WARM_ROUNDS, rounds):
                bench.counts = number >= 0
                for hits in (False, True):
                    bench.serve(number, hits)
        finally:
            bench.close()
            gc.unfreeze()
        steps += bench.lookup_steps
    if steps:
        text = f"a lookup takes {min(steps)} to {max(steps)} steps, {statistics.mean(steps):.2f}"
        print(f"{text} in the mean of {len(steps)}", file=sys.stderr)
    return [
        {
            "prompt tokens": prompt_tokens,
            "hook": hook,
            "calls": len(times.calls),
            "p50_us": _us(statistics.median(_all(times.calls))),
            "p99_us": _us(_p99(_all(times.calls))),
            "worst_us": _us(_worst(times.calls)),
            "budget_us": BUDGET_US if prompt_tokens <= BUDGET_TOKENS else 2 * BUDGET_US,
            f"p99_us of a {LOOP_US} us loop": _us(_p99(_all(times.loops))),
            f"worst_us of a {LOOP_US} us loop": _us(_worst(times.loops)),
        }
        for hook, times in hooks.items()
    ]


class _HookCall(NamedTuple):
    """A call of a hook, which is the same in every replay."""

    request_id: str
    ordinal: int


class _Times:
    """The seconds of one hook by call, one or more of each call for a replay."""

    def __init__(self) -> None:
        self.calls: dict[_HookCall, list[float]] = defaultdict(list)
        self.loops: dict[_HookCall, list[float]] = defaultdict(list)
        """The seconds of the loop before each call."""


def _all(times: dict[_HookCall, list[float]]) -> list[float]:
    return [seconds for same in times.values() for seconds in same]


def _worst(times: dict[_HookCall, list[float]]) -> float:
    """Returns the most that a call takes where nothing interrupts it."""
    return max(min(same) for same in times.values() if len(same) >= REPLAYS)


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 1)


def _p99(times: Sequence[float]) -> float:
    return sorted(times)[len(times) * 99 // 100]


class _Bench:
    """A replay of requests through the hooks of one engine."""

    def __init__(
        self,
        socket_paths: Sequence[str],
        geometry: Geometry,
        hit_tokens: int,
        step_tokens: int,
        namespace: bytes,
        hooks: dict[str, _Times],
    ) -> None:
        self._geometry = geometry
        self._prompt_tokens = hit_tokens + 1
        """One token beyond the last boundary, which is always computed."""
        self._step_tokens = step_tokens
        self._hooks = hooks
        most = max(-(-self._prompt_tokens // group.tokens_per_block) for group in geometry.groups)
        self._blocks_of_all = [*map(KVCacheBlock, range(1 + most))]
        """The engine's blocks, made before the first request. The first is the null block."""
        self._hasher = get_request_block_hasher(geometry.hash_tokens, sha256)
        self.counts = False
        """Whether what is served is measured."""
        self._request_id = ""
        self._ordinals: Counter[str] = Counter()
        """The number of the last call of each hook for the request."""
        self._relays: list[Relay] = []
        if geometry.nodes > 1:
            self._relays = [Relay(path, "bench", None) for path in socket_paths]
        self.lookup_steps: list[int] = []
        """The steps that answers to lookups took, where relays carry them."""
        self._loop = range(_loop_length())
        self._guard = HookGuard("bench")
        context = SchedulerContext(
            settings=Settings(lookup_timeout_ms=ANSWER_SECONDS * 1e3),
            geometry=geometry,
            engine_id="bench",
            socket_path=socket_paths[0],
            step_tokens=step_tokens,
            pool_blocks=1 << 30,
        )
        life = EngineLife(context, self._guard.counters)
        self.side = SchedulerRole(context, life, EngineIdentity(namespace, {}))
        self._report(self._plan_nothing(), "")
        deadline = time.monotonic() + ANSWER_SECONDS
        while not self._boots and time.monotonic() < deadline:
            self.side.on_step_end()
            self._plan_nothing()
            self._hear()
            self._report(StepPlan(), "")
        self._report(StepPlan(), "")

    _boots: Sequence[str] = ()
    """The lives of the nodes' daemons; empty until the last plan was for them."""

    def close(self) -> None:
        """End the connections."""
        self.side.close()
        for relay in self._relays:
            relay.close()

    def serve(self, number: int, hits: bool) -> None:
        """Run a request from its arrival to its end."""
        token = 1000 + WARM_ROUNDS + number
        prompt_tokens = self._prompt_tokens
        request = Request(
            f"{number}-{hits}",
            [token, *range(prompt_tokens - 1)],
            SamplingParams(max_tokens=1),
            None,
            block_hasher=self._hasher,
        )
        self._request_id = request.request_id
        self._ordinals.clear()
        kind = "hit" if hits else "miss"
        self._timed(f"on_new_request ({kind})", lambda: self.side.on_new_request(request))
        external = self._matched(request, kind)
        if bool(external) != hits:
            raise HybridKVError(f"a lookup gave {external} tokens where a {kind} was expected")
        blocks = self._blocks(external)
        tables = partial(block_tables, blocks)
        self._timed(
            f"update_state_after_alloc ({kind})",
            lambda: self.side.on_allocated(request, tables, external),
        )
        if external:
            plan = self._timed("build_connector_meta (load)", self._plan_nothing)
            if list(plan.loads) != [request.request_id]:
                raise HybridKVError("the load was not planned")
            self._report(StepPlan(), "update_connector_output (loaded)", request.request_id)
            self._timed("take_events", self.side.on_step_end)
        computed = external
        while computed < prompt_tokens:
            request.num_computed_tokens = computed
            scheduled = min(self._step_tokens, prompt_tokens - computed)
            plan = self._step(request, scheduled, tables, "prefill")
            self._wait_for_grant()
            self._report(plan, "update_connector_output (stored)")
            self._timed("get_kv_connector_stats", self.side.take_stats)
            self._timed("take_events", self.side.on_step_end)
            self._wait_for_slots()
            computed += scheduled
        request.num_computed_tokens = prompt_tokens - 1
        for _ in range(DECODE_STEPS):
            self._step(request, 1, tables, "decode")
            self._timed("take_events", self.side.on_step_end)
        self._timed("request_finished", lambda: self.side.on_finished(request.request_id))

    def _matched(self, request: Request, kind: str) -> int:
        deadline = time.monotonic() + ANSWER_SECONDS
        asked = 0
        while time.monotonic() < deadline:
            # The first call sends the lookup. Those until the answer is there count as one.
            which = partial(_which_question, asked)
            tokens: int | None = self._timed(
                "get_num_new_matched_tokens", lambda: self.side.offer_hit(request, 0), which
            )
            if tokens is not None:
                if self._relays:
                    self.lookup_steps.append(asked)
                return tokens
            asked += 1
            self._step_idle()
        raise HybridKVError(f"no answer to a lookup ({kind}) within {ANSWER_SECONDS:g} s")

    def _step(
        self, request: Request, scheduled: int, tables: Callable[[], Any], what: str
    ) -> StepPlan:
        offers = {}
        boundary = request.num_computed_tokens + scheduled
        if what == "prefill" and boundary % self._geometry.chunk_tokens == 0:
            recurrent = [
                group for group in self._geometry.groups if group.kind is GroupKind.RECURRENT
            ]
            offers = {
                request.request_id: [
                    (g.gid, boundary // g.tokens_per_block, boundary) for g in recurrent
                ]
            }
        output = _output({request.request_id: scheduled}, offers)
        plans = self._timed(
            f"build_connector_meta ({what})",
            lambda: self.side.plan_step(output, lambda _: tables()),
        )
        return self._deliver(plans)

    def _step_idle(self) -> None:
        """Run a step without work where relays carry messages."""
        if self._relays:
            plan = self._plan_nothing()
            self._hear()
            self._report(plan, "")

    def _plan_nothing(self) -> StepPlan:
        return self._deliver(self.side.plan_step(_output({}, {}), lambda _: ()))

    def _deliver(self, plans: StepPlan | NodePlans) -> StepPlan:
        """Give a step's messages to the relays. Returns the first node's plan."""
        nodes = range(len(plans.shares)) if isinstance(plans, NodePlans) else ()
        of_nodes = [plans.on_node(node) for node in nodes] or [plans]
        self._boots = [plan.boot for plan in of_nodes if plan.boot]
        for relay, plan in zip(self._relays, of_nodes, strict=False):
            if plan.mail is not None:
                relay.deliver(plan.mail, time.monotonic())
        return of_nodes[0]

    def _hear(self) -> None:
        """Let the relays wait for an answer, as long as a short step takes."""
        for relay in self._relays:
            if relay.link is not None and relay.link.fd is not None:
                select.select([relay.link.fd], [], [], STEP_SECONDS)

    def _report(self, plan: StepPlan, hook: str, finished: str = "") -> None:
        done = {number: {*range(self._geometry.ranks)} for number in plan.stores}
        report = StepReport(plan.number, boots=dict.fromkeys(self._boots, 1), done=done)
        for node, relay in enumerate(self._relays):
            answers = relay.take_answers(time.monotonic())
            if answers is not None:
                report.answers[node] = answers
        loaded = {finished} if finished else set()

        def take() -> None:
            self.side.on_report(loaded, set(), report)

        if hook:
            self._timed(hook, take)
        else:
            take()

    def _wait_for_grant(self) -> None:
        """Wait for the daemon's grant, which comes within a real step.

        A step of this benchmark is shorter.
        """
        fd = self.side.session.link.fd if self.side.stores.credits.is_awaiting else None
        if fd is not None:
            select.select([fd], [], [], ANSWER_SECONDS)
        self._hear()

    def _wait_for_slots(self) -> None:
        """Wait for slots where the grants of one step are not enough for the next."""
        deadline = time.monotonic() + ANSWER_SECONDS
        while self.side.stores.credits.is_awaiting and time.monotonic() < deadline:
            self._step_idle()
            self.side.on_step_end()

    def _blocks(self, external: int) -> KVCacheBlocks:
        """Tables as the engine has them: after a hit, null where it needs nothing."""
        null = self._blocks_of_all[0]
        tables = []
        for group in self._geometry.groups:
            count = -(-self._prompt_tokens // group.tokens_per_block)
            nulls = needed_blocks(group, external).start
            tables.append([null] * nulls + self._blocks_of_all[1 + nulls : 1 + count])
        return KVCacheBlocks(tuple(tables))

    def _timed(
        self, hook: str, work: Callable[[], Result], which: "Callable[[Result], int] | None" = None
    ) -> Result:
        """Call a hook and time it.

        `which` makes the number of the call from its result. Without it the calls are counted.
        """
        loop = _loop_seconds(self._loop)
        started = time.perf_counter()
        result: Result = self._guard.run_hook(hook, work, _give_up)
        seconds = time.perf_counter() - started
        if self.counts:
            self._ordinals[hook] += 1
            ordinal = self._ordinals[hook] if which is None else which(result)
            call = _HookCall(self._request_id, ordinal)
            self._hooks[hook].calls[call].append(seconds)
            self._hooks[hook].loops[call].append(loop)
        return result


def _which_question(asked: int, tokens: int | None) -> int:
    return min(asked, 1) if tokens is None else 2


def _give_up() -> Any:
    raise HybridKVError("a hook failed")


def _output(scheduled: dict[str, int], offers: dict[str, list[tuple[int, int, int]]]) -> Any:
    """Returns the part of the engine's SchedulerOutput that the connector reads."""
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


def _wait_for_pages(socket_path: str) -> None:
    """Wait until a young daemon has pages.

    It grants only those, and what is not stored is no hit.
    """
    deadline = time.monotonic() + RESERVE_SECONDS
    with ControlClient(socket_path) as control:
        while control.stats().values["bytes_reserved"] < RESERVED_BYTES:
            if time.monotonic() > deadline:
                what = f"the daemon had no memory of its own within {RESERVE_SECONDS:g} s"
                raise HybridKVError(what)


def main() -> int:
    """Measure every hook on a hybrid of a full, two sliding and a recurrent group, and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hooks", description=__doc__)
    parser.add_argument(
        "--block-tokens", type=int, default=128, help="tokens of an engine block (default: 128)"
    )
    parser.add_argument(
        "--nodes", type=int, default=1, help="nodes with a daemon and a rank each (default: 1)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON array")
    arguments = parser.parse_args()
    block = arguments.block_tokens
    if block < 1 or STEP_TOKENS % block:
        parser.error(
            f"--block-tokens {block} does not divide a step of {STEP_TOKENS} tokens; 128 works"
        )
    groups = (
        Group(0, GroupKind.FULL, block, (256,)),
        Group(1, GroupKind.SLIDING, block, (256,), 1024),
        Group(2, GroupKind.SLIDING, block, (256,), 1024),
        Group(3, GroupKind.RECURRENT, block, (256,)),
    )
    nodes = arguments.nodes
    chunk = derive_chunk_tokens(groups, block, block)
    geometry = Geometry(groups, chunk, block, block, ranks=nodes, nodes=nodes)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="hybridkv-bench-") as directory:
        paths = [str(Path(directory) / f"{node}.sock") for node in range(nodes)]
        with contextlib.ExitStack() as stack:
            for path in paths:
                stack.enter_context(DaemonProcess(path, "512MiB"))
                _wait_for_pages(path)
            for tokens in PROMPT_TOKENS:
                rows += measure_hooks(paths, geometry, tokens, STEP_TOKENS, ROUNDS)
                print(f"hooks at {tokens} tokens done", file=sys.stderr)
    print_rows(rows, arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
