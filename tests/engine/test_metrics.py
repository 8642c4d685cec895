"""What the API server of `vllm serve` exports and publishes: metrics, token sources, KV events."""

import json
import re
from contextlib import closing
from pathlib import Path

import pytest
from vllm.distributed.kv_events import BlockStored

from hybridkv.client.control import ControlClient
from hybridkv.lab.models import bundled_environment
from tests.engine.server import Server, total_of
from tests.engine.subscriber import Subscriber
from tests.engine.support import arguments_of, prompt, stats
from tests.forked_daemon import ForkedDaemon
from tests.waiting import until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

MODEL, CHUNK, CHUNKS = "gemma3", 128, 3


def prefixes(stored: list[BlockStored]) -> set[tuple[int, ...]]:
    """The longest prefixes that the events tell of, put together by the parents' hashes."""
    tokens: dict[object, tuple[int, ...]] = {None: ()}
    inner: set[object] = set()
    for event in stored:
        assert (event.block_size, len(event.token_ids)) == (CHUNK, CHUNK * len(event.block_hashes))
        parent = event.parent_block_hash
        for at, name in enumerate(event.block_hashes):
            tokens[name] = tokens[parent] + tuple(event.token_ids[at * CHUNK : (at + 1) * CHUNK])
            inner.add(parent)
            parent = name
    return {tokens[name] for name in tokens.keys() - inner}


@pytest.mark.soak
def test_a_server_exports_what_was_served_from_where_and_tells_routers(tmp_path: Path) -> None:
    """A prompt is computed, loaded from RAM, and, after RAM lost it, loaded from the disk."""
    endpoint = f"ipc://{tmp_path}/events"
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint}
    text, second = prompt(1, CHUNKS * CHUNK + 20), prompt(2, CHUNKS * CHUNK + 20)
    disk = ("--disk", str(tmp_path / "disk"), "--disk-bytes", "1GiB")
    with (
        ForkedDaemon(str(tmp_path / "daemon.sock"), "64MiB", options=disk) as daemon,
        closing(Subscriber(endpoint)) as subscriber,
    ):
        arguments = arguments_of(MODEL, daemon.socket_path, extra={"load_policy": "always"})
        arguments += ["--kv-events-config", json.dumps(events)]
        with Server(arguments, tmp_path / "server.log", bundled_environment(MODEL)) as server:
            begin = server.metrics()

            def step() -> None:
                """Removals are heard, and events published, in steps."""
                server.complete([5, 6, 7], 1)
                subscriber.poll()

            def all_stored() -> bool:
                subscriber.poll()
                return (
                    sum(len(event.block_hashes) for event in subscriber.stored("CPU")) >= 2 * CHUNKS
                )

            server.complete(text)
            server.complete(second)
            until(all_stored, "every chunk is announced")
            stored = subscriber.stored("CPU")
            names = [name for event in stored for name in event.block_hashes]
            assert len(names) == len(set(names)) == 2 * CHUNKS
            engines_own = {
                name for event in subscriber.stored("GPU") for name in event.block_hashes
            }
            assert set(names) <= engines_own, "the hashes are those of the engine's own events"
            assert prefixes(stored) == {tuple(given[: CHUNKS * CHUNK]) for given in (text, second)}

            def written() -> bool:
                values = stats(daemon.socket_path)
                return (
                    values["tier_disk_objects_written"] >= values["objects_stored"]
                    and not values["writes_waiting"]
                )

            until(written, "everything is written to the disk")
            server.post("/reset_prefix_cache")
            server.complete(text)
            with ControlClient(daemon.socket_path) as control:
                control.clear_objects()

            def all_removed() -> bool:
                step()
                return set(subscriber.removed("CPU")) >= set(names)

            until(all_removed, "what was cleared is removed")
            below = subscriber.stored("STORAGE")
            assert prefixes(below) == prefixes(stored), "the disk has it"

            server.post("/reset_prefix_cache")
            server.complete(text)
            until(
                lambda: server.total("vllm:hybridkv_loads_total", result="loaded") == 2,
                "the last load is counted",
            )
            samples = server.metrics()
            log = server.log_path.read_text(errors="replace")

    def total(name: str, **labels: str) -> float:
        return total_of(samples, name, labels)

    tokens = CHUNKS * CHUNK
    assert total("vllm:external_prefix_cache_hits_total") == 2 * tokens
    by_source = "vllm:prompt_tokens_cached_by_source_total"
    assert (total(by_source, source="host"), total(by_source, source="disk")) == (tokens, tokens)
    assert total(by_source) == total("vllm:external_prefix_cache_hits_total") + total(
        "vllm:prefix_cache_hits_total"
    )
    by_tier = "vllm:hybridkv_loaded_tokens_by_tier_total"
    assert (total(by_tier, tier="ram"), total(by_tier, tier="disk")) == (tokens, tokens)
    assert total("vllm:hybridkv_loaded_tokens_total") == 2 * tokens
    assert total("vllm:hybridkv_lookups_total", result="hit") == 2
    assert total("vllm:hybridkv_lookups_total", result="miss") == 2
    assert total("vllm:hybridkv_lookups_total", result="declined", reason="too_short") >= 1
    assert total("vllm:hybridkv_events_total", event="lookups_promoted") == 1
    assert total("vllm:hybridkv_lookup_wait_seconds_count") == 4
    assert total("vllm:hybridkv_load_seconds_count") == 2
    assert total("vllm:hybridkv_load_bytes_total") > 0
    assert total("vllm:hybridkv_load_copy_seconds_total") > 0
    assert total("vllm:hybridkv_store_bytes_total") > 0
    assert total("vllm:hybridkv_store_copy_seconds_total") > 0
    assert total("vllm:hybridkv_daemon_connected") == 1
    assert total("vllm:hybridkv_breaker_open") == total("vllm:hybridkv_faults_total") == 0
    # Of both media, and what was read from the disk is in RAM again.
    assert total("vllm:hybridkv_kv_event_chunks_total", event="removed") == 3 * CHUNKS
    assert total("vllm:hybridkv_kv_event_chunks_total", event="stored") == 5 * CHUNKS
    assert total("vllm:hybridkv_loaded_tokens_total", engine="0", model_name="tiny") == 2 * tokens
    assert not [
        sample.name
        for sample in samples
        if sample.name.startswith("vllm:hybridkv_") and sample.value < 0
    ]
    counted = {sample.labels["event"] for sample in begin if "hybridkv_events" in sample.name}
    assert "daemon_losses" in counted, "rates need the first 0"
    noisy = [
        line
        for line in log.splitlines()
        if "hybridkv:" in line and not re.search("WARN|groups|connected|weights", line)
    ]
    assert not noisy, "per-transfer lines are for DEBUG (requirements B31)"
