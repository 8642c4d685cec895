"""What the scheduler's hooks answer where the scheduler role does not serve them.

Each hook of vLLM has one method, of the same name in three classes. SchedulerRole does the work
while the role is on. RoleFallback answers after a fault in that work, and while the role is off.
NoRole answers after the shutdown.

| method             | SchedulerRole              | RoleFallback                   | NoRole        |
|--------------------|----------------------------|--------------------------------|---------------|
| `on_new_request`   | looks the request up       | follows its adapter and media  | nothing       |
| `offer_hit`        | tokens to load             | 0                              | 0             |
| `on_allocated`     | plans the load             | fails the load                 | nothing       |
| `plan_step`        | loads and stores           | failed loads, no stores        | an empty plan |
| `on_report`        | ends loads, commits stores | follows weights and adapters   | nothing       |
| `has_pending_work` | True while stores are open | False                          | False         |
| `on_finished`      | forgets the request        | forgets its blocks and adapter | nothing       |
| `load_sources`     | tokens of a load by tier   | unknown                        | unknown       |
| `take_stats`       | new statistics             | None                           | None          |
| `on_step_end`      | sends commits; KV events   | withdraws all KV events        | no events     |
| `on_reset`         | asks for the weights       | ends the session, switches off | nothing       |

One fault of `on_reset` switches the role off. Any other hook does so after FAULTS_MAX faults
(`vllm.hook_guard`). `take_stats` goes on while the role is off, until it fails itself. No method
here raises.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

from vllm.distributed.kv_events import KVCacheEvent

from hybridkv.connector.messages import StepPlan, StepReport
from hybridkv.connector.scheduler.role import SchedulerRole
from hybridkv.connector.stats import HybridKVStats
from hybridkv.vllm.hook_guard import HookGuard


class NoRole:
    """The hooks of a connector that was shut down: nothing is loaded or stored."""

    def on_new_request(self, request: Any) -> None:
        return

    def offer_hit(self, request: Any, local_tokens: int) -> int | None:
        return 0

    def on_allocated(
        self, request: Any, tables: Callable[[], Sequence[Sequence[int]]], external_tokens: int
    ) -> None:
        return

    def plan_step(self, output: Any, tables: Callable[[str], Sequence[Sequence[int]]]) -> StepPlan:
        return StepPlan()

    def on_report(
        self, finished: Collection[str], failed: Collection[str], report: StepReport | None
    ) -> None:
        return

    def has_pending_work(self) -> bool:
        return False

    def on_finished(self, request_id: str) -> None:
        return

    def load_sources(self, request_id: str, external_tokens: int) -> dict[str, int]:
        return {}

    def take_stats(self, off_since: float, off_seconds: float) -> HybridKVStats | None:
        return None

    def on_step_end(self) -> list[KVCacheEvent]:
        return []

    def on_reset(self, is_empty: bool) -> bool:
        return True  # The connector need not be switched off.


class RoleFallback(NoRole):
    """The hooks of a scheduler role after a fault in its own work, and while it is switched off.

    They keep what the next role goes on with: adapters, weights, blocks of loads, and the requests
    that the engine keeps waiting for a load.
    """

    def __init__(self, role: SchedulerRole, guard: HookGuard) -> None:
        self._role = role
        self._guard = guard

    def on_new_request(self, request: Any) -> None:
        """Follow the request's adapter and its media, and sessions."""
        self._role.life.note_session(request)
        self._role.life.adapters.on_new_request(request)
        self._role.life.media.on_untracked_request(request)

    def on_allocated(
        self, request: Any, tables: Callable[[], Sequence[Sequence[int]]], external_tokens: int
    ) -> None:
        """Let the load fail that the engine waits for."""
        self._role.loads.fail_load(request.request_id, external_tokens)

    def plan_step(self, output: Any, tables: Callable[[str], Sequence[Sequence[int]]]) -> StepPlan:
        """Return a plan that fails the loads which no worker knows of.

        While the role is off, the session ends too, and the daemon gets back all that it lent.
        """
        return self._role.plan_failures(output.num_scheduled_tokens, not self._guard.is_on)

    def on_report(
        self, finished: Collection[str], failed: Collection[str], report: StepReport | None
    ) -> None:
        """Take counters, and the weights and adapters of the step.

        The next report names a new identity of the weights.
        """
        if report is not None:
            life = self._role.life
            life.adapters.on_report(report.number, report.adapters)
            life.weights.on_answers(report.weights)
            life.counters.update(report.counters)

    def on_finished(self, request_id: str) -> None:
        """Forget the request's blocks, which are the engine's now, and its adapter."""
        self._role.life.room.on_running((request_id,))
        self._role.life.adapters.on_request_ended(request_id)

    def on_step_end(self) -> list[KVCacheEvent]:
        """Return the KV events that withdraw all chunks."""
        return self._role.final_events()

    def on_reset(self, is_empty: bool) -> bool:
        """End the session, so that no earlier hit is loaded. Returns False: switch the role off."""
        self._role.close()
        # A role that begins anew later asks for the weights too.
        self._role.life.weights.on_reset(is_empty)
        if is_empty:
            self._role.life.adapters.on_cache_emptied()
        return False
