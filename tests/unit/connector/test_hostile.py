"""Whatever one client sends, no hook faults: its request is declined, and others are served."""

import contextlib
import functools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from hybridkv.connector.metrics import LOADS_DONE
from hybridkv.core.keys import HASH_BYTES
from hybridkv.core.metrics import Metric
from hybridkv.lab.daemon_process import DaemonProcess
from hybridkv.vllm.hints import OWN_KEYS
from hybridkv.vllm.hook_guard import FAULTS, QUARANTINED, SWITCHED_OFF
from hybridkv.vllm.weights import StepLook, WeightsAnswer
from tests.chance import examples
from tests.forked_daemon import ForkedDaemon
from tests.unit.connector.requests import has_write_slots
from tests.waiting import until

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]

LAYOUT = "full"
BLOCKS = 64
HINTS = st.sampled_from(("kv_hint", *OWN_KEYS))
HINT_VALUES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats()
    | st.just({"actions": [7]})
)
TEXTS = st.text(st.characters(exclude_categories=()), max_size=8) | st.sampled_from(
    ("", "u\ud800", "\udfff\ud800", "\x00", "../..", "s" * 1_000_000, "{", "🙂" * 300)
)
TOKENS = st.integers(-3, 40) | st.sampled_from((-(1 << 63), (1 << 63) - 1, 1 << 63, 1 << 64, 1e3))
"""Checked by vLLM only where it has a tokenizer."""


@functools.cache
def hasher(tokens: int, algorithm: str) -> Any:
    """vLLM's function that names a request's blocks."""
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

    function = get_hash_fn_by_name(algorithm)
    init_none_hash(function)
    return get_request_block_hasher(tokens, function)


class Served:
    """A connector's scheduler role with a daemon, whose workers are attached."""

    def __init__(self, daemon: DaemonProcess, algorithm: str) -> None:
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

        from hybridkv.connector import HybridKVConnector
        from hybridkv.connector.messages import StepReport
        from tests.simulation.configs import Shape, config_of
        from tests.simulation.engine import Rank
        from tests.simulation.layouts import LAYOUTS, ON_CPU

        layout = LAYOUTS[LAYOUT]
        chosen: dict[str, object] = {
            "weights_identity": "simulated",
            "audit": "off",
            "lookup_timeout_ms": 20_000,
        }
        chosen["hybrid_chunk_size"] = layout.unit
        shape = Shape(layout, BLOCKS, 1 << 20, 512, 4, None, 1, ON_CPU, chosen)
        config = config_of(shape, daemon.socket_path, f"e {algorithm}")
        config.cache_config.prefix_caching_hash_algo = self.algorithm = algorithm
        rank = Rank(shape, config, 0)
        rank.register()
        self.connector = HybridKVConnector(
            config, KVConnectorRole.SCHEDULER, layout.config(config, BLOCKS, worker=False)
        )
        self._worker = rank.connector
        self.connector.set_xfer_handshake_metadata({0: self._worker.get_handshake_metadata()})
        self.side: Any = self.connector.scheduler_role
        row = [SimpleNamespace(block_id=1 + at) for at in range(BLOCKS - 1)]
        self.blocks = SimpleNamespace(blocks=[row] * 4)
        self.connector.bind_kv_cache_manager(
            SimpleNamespace(
                get_blocks=lambda name: self.blocks, block_pool=None, reset_prefix_cache=bool
            )
        )
        self.report = StepReport
        until(self._is_ready, "there are write slots")

    def _is_ready(self) -> bool:
        self.step({})
        return self.side.session.workers_attached() and has_write_slots(self.side)

    def step(self, scheduled: dict[str, int]) -> None:
        """One in which every store succeeds."""
        plan: Any = self.connector.build_connector_meta(
            SimpleNamespace(
                num_scheduled_tokens=scheduled,
                total_num_scheduled_tokens=sum(scheduled.values()),
                kv_connector_block_state=SimpleNamespace(boundary_state_offloads={}),
            )
        )
        assert self.connector.life is not None
        weights = self.connector.life.weights.identity_digests[0]
        look = WeightsAnswer(plan.question, 0, weights, (StepLook(plan.number, 0),))
        self.connector.update_connector_output(
            SimpleNamespace(
                finished_recving=set(plan.loads),
                failed_recving=set(),
                kv_connector_worker_meta=self.report(
                    plan.number,
                    boots={self.side.session.boot: 1},
                    done={run: {0} for run in plan.stores},
                    weights={0: look},
                    adapters={0: {1: b"a" * HASH_BYTES}},
                ),
            )
        )
        self.connector.get_kv_connector_stats()
        self.connector.take_events()

    def serve(self, request: Any) -> None:
        """From its arrival to its end, as vLLM's scheduler does."""
        connector = self.connector
        connector.on_new_request(request)
        tokens = None
        while tokens is None:
            tokens, _ = connector.get_num_new_matched_tokens(request, 0)
        connector.update_state_after_alloc(request, self.blocks, tokens)
        connector.get_external_cache_hit_sources(request, tokens)
        self.step({})
        self.step({request.request_id: request.num_tokens - tokens})
        connector.request_finished_all_groups(request, ([],))
        self.step({})

    def close(self) -> None:
        """End both roles, each with its connection."""
        self.connector.shutdown()
        self._worker.shutdown()

    def faults(self) -> dict[Metric, int]:
        """What is counted as a fault of ours."""
        counters = self.connector.counters
        return {
            metric: count
            for metric, count in counters.items()
            if metric.family in (FAULTS, "daemon_refusals") or metric in (QUARANTINED, SWITCHED_OFF)
        }


@pytest.fixture(scope="module", params=["sha256", "xxhash"])
def served(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Served]:
    """With the engine's hashes, and with ours."""
    with ForkedDaemon(str(tmp_path_factory.mktemp("d") / "d.sock"), "16MiB") as daemon:
        served = Served(daemon, request.param)
        yield served
        served.close()


@st.composite
def hostile(draw: st.DrawFn) -> dict[str, Any]:
    """What a client decides about its request, and how its adapter is named."""
    tokens = draw(st.lists(TOKENS, min_size=1, max_size=120))
    with_embeds = draw(st.sampled_from(("no", "no", "no", "all", "mixed")))
    features = draw(st.lists(st.tuples(TEXTS, st.integers(0, 200), st.integers(0, 50)), max_size=3))
    return {
        "request_id": draw(TEXTS),
        "cache_salt": draw(st.none() | TEXTS | st.sampled_from((7, b"\xff", ["a"]))),
        "tokens": tokens * draw(st.sampled_from((1, 1, 1, 40))),
        "embeds": with_embeds,
        "features": features,
        "params": draw(
            st.none() | TEXTS | st.dictionaries(HINTS | TEXTS, HINT_VALUES | TEXTS, max_size=3)
        ),
        "adapter": draw(
            st.none()
            | st.tuples(TEXTS, st.sampled_from(("/good", "gone", "/\x00", "\ud800", "x" * 9999)))
        ),
        "in_place": draw(st.booleans()),
        "priority": draw(st.integers()),
        "prompt_logprobs": draw(st.sampled_from((None, None, 1))),
        "session_id": draw(st.none() | TEXTS),
    }


def request_of(drawn: dict[str, Any], served: Served) -> Any:
    """vLLM's request, or None where vLLM itself does not take it."""
    import torch
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.v1.request import Request

    tokens, embeds, adapter = drawn["tokens"], drawn["embeds"], drawn["adapter"]
    with contextlib.suppress(Exception):
        lora = None
        if adapter is not None:
            lora = LoRARequest(adapter[0], 1, adapter[1])
            lora.load_inplace = drawn["in_place"]
        return Request(
            drawn["request_id"],
            None if embeds == "all" else tokens,
            SamplingParams(
                max_tokens=2,
                prompt_logprobs=drawn["prompt_logprobs"],
                extra_args={"kv_transfer_params": drawn["params"]},
            ),
            None,
            prompt_embeds=None if embeds == "no" else torch.zeros(len(tokens), 4),
            prompt_is_token_ids=[at % 2 == 0 for at in range(len(tokens))]
            if embeds == "mixed"
            else None,
            mm_features=[
                MultiModalFeatureSpec(
                    data=None,
                    modality="image",
                    identifier=name,
                    mm_position=PlaceholderRange(offset=offset, length=length),
                )
                for name, offset, length in sorted(
                    drawn["features"], key=lambda feature: feature[1]
                )
            ],
            lora_request=lora,
            cache_salt=drawn["cache_salt"],
            priority=drawn["priority"],
            session_id=drawn["session_id"],
            block_hasher=hasher(served.side.geometry.hash_tokens, served.algorithm),
        )
    return None


PLAIN = {
    "request_id": "r",
    "cache_salt": None,
    "tokens": [1] * 400,
    "embeds": "no",
    "features": [],
    "params": None,
    "adapter": None,
    "in_place": False,
    "priority": 0,
    "prompt_logprobs": None,
    "session_id": None,
}


@settings(
    max_examples=examples(100),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(hostile())
@example({**PLAIN, "cache_salt": 7})
@example({**PLAIN, "tokens": [1 << 63] * 400})
@example({**PLAIN, "tokens": [1.5] * 400})
def test_no_request_is_a_fault(served: Served, drawn: dict[str, Any]) -> None:
    request = request_of(drawn, served)
    if request is not None:
        served.serve(request)
    plain = request_of({**PLAIN, "request_id": "plain"}, served)
    served.serve(plain)
    assert not served.faults()
    assert not served.side.requests.by_id
    assert not served.side.requests.by_lease
    hits = served.connector.counters.get(LOADS_DONE, 0)

    def is_served() -> bool:
        served.serve(request_of({**PLAIN, "request_id": "again"}, served))
        return served.connector.counters.get(LOADS_DONE, 0) > hits

    # A busy machine's daemon may be too late for one lookup or several.
    until(is_served, "who asks for what is there is served")
