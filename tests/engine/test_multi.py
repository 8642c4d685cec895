"""MultiConnector over several real connectors, on the real engine and behind vLLM's real server."""

import json
from pathlib import Path
from typing import Any

import pytest

from hybridkv.client.control import ControlClient
from hybridkv.lab.daemon_process import DaemonProcess
from hybridkv.lab.engine_process import EngineError, EngineProcess
from hybridkv.lab.models import bundled_arguments, bundled_environment, bundled_models
from tests.engine.forked import ForkedEngine
from tests.engine.server import Server
from tests.engine.support import LOOKUP_TIMEOUT_MS, answer, forget, prompt, stats
from tests.engine.test_tiers import is_written, serve
from tests.waiting import until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

CHUNK, CHUNKS = 128, 3
HIT = CHUNK * CHUNKS


def ours(socket_path: str, **extra: object) -> dict[str, Any]:
    """Returns the configuration of a HybridKVConnector as a child."""
    return {
        "kv_connector": "HybridKVConnector",
        "kv_connector_module_path": "hybridkv.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "server": f"unix://{socket_path}",
            "lookup_timeout_ms": LOOKUP_TIMEOUT_MS,
            "audit": "off",
            "load_policy": "always",
            **extra,
        },
    }


def multi(
    model: str, children: list[dict[str, Any]], *options: str, module: str = "hybridkv.connector"
) -> list[str]:
    """Returns vLLM's arguments of an engine with the MultiConnector of a module."""
    transfer = {
        "kv_connector": "MultiConnector",
        "kv_connector_module_path": module,
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": children},
    }
    arguments = [f"--model={bundled_models()[model]}", *bundled_arguments(model), *options]
    return [*arguments, "--kv-transfer-config", json.dumps(transfer)]


def engine(model: str, log: Path, arguments: list[str]) -> EngineProcess:
    return ForkedEngine(arguments, log, lambda text: None, bundled_environment(model))


def again(running: EngineProcess, text: list[int]) -> dict[str, Any]:
    """Ask the prompt again, with nothing of it in the engine's own cache."""
    forget(running)
    (result,) = running.generate(text, max_tokens=6)
    return result


def loaded(*daemons: DaemonProcess) -> list[float]:
    """Returns how many tokens were loaded out of each daemon."""
    return [stats(daemon.socket_path).get("tokens_loaded", 0) for daemon in daemons]


def clear(daemon: DaemonProcess, tiers: bool = False) -> None:
    with ControlClient(daemon.socket_path) as control:
        control.clear_objects(tiers)


def is_connected(running: EngineProcess, daemon: DaemonProcess) -> bool:
    """Whether the engine has noticed its new daemon, which it looks for in its steps."""
    running.generate(prompt(9, 10), max_tokens=1)
    return stats(daemon.socket_path)["sessions"] == 1


def test_two_daemons(tmp_path: Path) -> None:
    """The best by weight loads, both store, a slow one delays nobody, and either may be killed."""
    text = prompt(1, HIT + 20)
    url = f"disk://{tmp_path}/disk?bytes=1GiB"
    heavy, light = serve(tmp_path, "heavy", "--tier", url), serve(tmp_path, "light")
    slow = serve(tmp_path, "heavy", "--tier", f"inject+{url}&latency=3600&timeout=60")
    children = [
        ours(light.socket_path, name="light"),
        ours(heavy.socket_path, name="heavy", load_weight=2),
    ]
    arguments = multi("gemma3", children, module="tests.engine.unhurried")
    with light, heavy, engine("gemma3", tmp_path / "a.log", arguments) as running:
        running.generate(text, max_tokens=6)
        (oracle,) = running.generate(text, max_tokens=6)
        assert oracle["cached_tokens"] == HIT

        def served(expected: list[float], before: list[float], *daemons: DaemonProcess) -> None:
            result = again(running, text)
            assert result["cached_tokens"] == HIT
            assert answer(result) == answer(oracle)
            until(
                lambda: (
                    [now - then for now, then in zip(loaded(*daemons), before, strict=True)]
                    == expected
                ),
                f"{expected} of {[str(daemon.socket_path) for daemon in daemons]}",
            )

        is_written(heavy, "disk", objects=CHUNKS)
        everything = stats(heavy.socket_path)["objects"]

        def is_fed(daemon: DaemonProcess) -> bool:
            values = stats(daemon.socket_path)
            under_way = values.get("writes_waiting", 0) + values.get("tier_disk_jobs_running", 0)
            return values["objects"] == everything and not under_way

        until(lambda: is_fed(light), "both are fed")
        served([0, HIT], loaded(light, heavy), light, heavy)
        # A third of the hit at twice the weight is not worth it.
        clear(heavy, tiers=True)
        forget(running)
        running.generate(text[: CHUNK + 20], max_tokens=1)
        served([HIT, 0], loaded(light, heavy), light, heavy)
        # What was loaded from the one has gone to the other as well.
        served([0, HIT], loaded(light, heavy), light, heavy)
        until(lambda: is_fed(heavy), "all of it is on the disk")
        # The heavier one reads for an hour: no request waits for it, and no lookup is left in it.
        heavy.stop()
        slow.start()
        until(lambda: is_connected(running, slow), "the engine is back")
        clear(slow)
        served([HIT, 0], loaded(light, slow), light, slow)
        assert stats(slow.socket_path)["lookups_waiting"] == 0
        assert stats(slow.socket_path)["requests_lookup"] > 0
        slow.kill()
        served([HIT], loaded(light), light)
        light.kill()
        assert answer(again(running, text))[0] == answer(oracle)[0], "computed"
        light.start()
        until(lambda: is_connected(running, light), "the engine is back")
        served([HIT], [0.0], light)
        slow.__exit__()


@pytest.mark.soak
def test_next_to_vllms_own_example_connector(tmp_path: Path) -> None:
    """It loads within the step, into the only group. Without our daemon it serves alone."""
    text = prompt(1, HIT + 20)
    example = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "shared_storage_path": str(tmp_path / "example"),
            "load_weight": 0.5,
        },
    }
    with serve(tmp_path, "node") as daemon:
        children = [example, ours(daemon.socket_path)]
        with pytest.raises(
            EngineError, match="these child connectors do not support it: ExampleConnector"
        ):
            engine(
                "qwen3",
                tmp_path / "hma.log",
                multi("qwen3", children, "--no-disable-hybrid-kv-cache-manager"),
            ).__enter__()
        with engine("qwen3", tmp_path / "a.log", multi("qwen3", children)) as running:
            running.generate(text, max_tokens=6)
            (oracle,) = running.generate(text, max_tokens=6)
            result = again(running, text)
            assert answer(result) == answer(oracle)
            assert result["cached_tokens"] == oracle["cached_tokens"] == HIT
            until(lambda: loaded(daemon) == [HIT], "the heavier one served")
            daemon.kill()
            result = again(running, text)
            assert answer(result) == answer(oracle)
            assert result["cached_tokens"] == HIT


def by_connector(server: Server) -> dict[str, dict[str, float]]:
    """Returns the values of samples by name and by connector, "" where there is no such label."""
    values: dict[str, dict[str, float]] = {}
    for sample in server.metrics():
        assert sample.labels.get("engine", "0") == "0"
        of_name = values.setdefault(sample.name, {})
        key = sample.labels.get("connector", "")
        of_name[key] = of_name.get(key, 0.0) + sample.value
    return values


@pytest.mark.soak
def test_the_servers_metrics(tmp_path: Path) -> None:
    """The choices stand on vLLM's own /metrics, and add up to what vLLM counted."""
    with serve(tmp_path, "one") as first_daemon, serve(tmp_path, "two") as second_daemon:
        children = [
            ours(first_daemon.socket_path),
            ours(second_daemon.socket_path, load_weight=1.5),
        ]
        arguments, environment = multi("gemma3", children), bundled_environment("gemma3")
        with Server(arguments, tmp_path / "server.log", environment) as server:

            def complete(seed: int) -> list[int]:
                return server.complete(prompt(seed, HIT + 20), 3)

            first = [complete(seed) for seed in (1, 2)]
            until(
                lambda: stats(second_daemon.socket_path)["objects_stored"] >= 2 * CHUNKS,
                "both prompts are stored",
            )
            server.post("/reset_prefix_cache")
            assert complete(1) == first[0]
            second_daemon.kill()
            server.post("/reset_prefix_cache")
            assert [complete(seed) for seed in (1, 2)] == first

            def is_shown() -> bool:
                return (
                    by_connector(server)["vllm:kv_connector_mc_queries_total"]["HybridKVConnector"]
                    == 5
                )

            until(is_shown, "five requests are counted")
            shown = by_connector(server)
            tokens = shown["vllm:kv_connector_mc_hit_tokens_total"]
            assert tokens == {"HybridKVConnector": 2 * HIT, "HybridKVConnector-2": HIT}
            assert sum(tokens.values()) == shown["vllm:external_prefix_cache_hits_total"][""]
            assert shown["vllm:kv_connector_mc_hits_total"] == {
                "HybridKVConnector": 2,
                "HybridKVConnector-2": 1,
            }
            misses = {"HybridKVConnector": 2, "HybridKVConnector-2": 4}
            assert shown["vllm:kv_connector_mc_misses_total"] == misses
            assert shown["vllm:kv_connector_mc_queries_total"] == dict.fromkeys(misses, 5)
            assert shown["vllm:kv_connector_mc_pending_loads"] == dict.fromkeys(misses, 0)
            assert min(shown["vllm:prompt_tokens_by_source_total"].values()) >= 0
            assert shown["vllm:hybridkv_loaded_tokens_total"] == tokens, (
                "each child's own statistics say the same"
            )
            assert (
                server.total("vllm:prompt_tokens_cached_by_source_total", source="host") == 3 * HIT
            )
            assert (
                server.total(
                    "vllm:prompt_tokens_cached_by_source_total", source="external_unspecified"
                )
                == 0
            )
