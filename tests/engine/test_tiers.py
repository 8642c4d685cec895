"""What outlives restarts and reaches other nodes through tiers below RAM, on the real engine."""

import json
from pathlib import Path
from typing import Any

import pytest

from hybridkv.cli.main import main
from hybridkv.client.control import ControlClient
from hybridkv.lab.daemon_process import DaemonProcess
from hybridkv.lab.engine_process import EngineProcess
from tests.engine.support import answer, engine, prompt, stats
from tests.forked_daemon import ForkedDaemon
from tests.programs.tiers.master import Master, needs_mooncake
from tests.waiting import until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

MODELS = {"gemma3": 128, "qwen3next": 256}
"""A sliding-window hybrid and a recurrent one, with the tokens of some whole chunks.

How many these are depends on the processor, without AVX-512 blocks are smaller.
"""
CHUNKS = 3
LOAD: dict[str, object] = {"load_policy": "always"}
"""Tiny models compute faster than any storage reads."""


def serve(directory: Path, name: str, *options: str) -> DaemonProcess:
    (directory / name).mkdir(mode=0o700, exist_ok=True)
    return ForkedDaemon(
        str(directory / name / "daemon.sock"), "64MiB", options=["--node", name, *options]
    )


def is_written(daemon: DaemonProcess, tier: str, objects: int = 1) -> None:
    def all_written() -> bool:
        values = stats(daemon.socket_path)
        there = values.get(f"tier_{tier}_objects_written", 0)
        return there >= max(objects, values["objects_stored"]) and not values["writes_waiting"]

    until(all_written, f"everything is written to {tier}")


def arena_gone(daemon: DaemonProcess) -> None:
    """Take the daemon's memory away, as a reboot does, and start it again."""
    daemon.kill()
    daemon.__exit__()
    daemon.start()


def hits(running: EngineProcess, text: list[int], oracle: dict[str, Any], chunk: int) -> None:
    running.reset_caches()
    (result,) = running.generate(text, max_tokens=6)
    assert result["cached_tokens"] == oracle["cached_tokens"] == CHUNKS * chunk
    assert answer(result) == answer(oracle)


def tokens_from(tier: str, daemon: DaemonProcess) -> float:
    """Returns how many tokens came up from a tier since the daemon began."""
    values = stats(daemon.socket_path)
    return values[f"chunks_hit_{tier}"] * values["tokens_hit"] / values["chunks_hit"]


@pytest.mark.parametrize("model", [pytest.param("gemma3", marks=pytest.mark.soak), "qwen3next"])
def test_restarts_a_reboot_and_a_second_node(model: str, tmp_path: Path) -> None:
    chunk = MODELS[model]
    text = prompt(1, CHUNKS * chunk + 20)
    disk = ("--disk", str(tmp_path / "disk"), "--disk-bytes", "1GiB")
    with (
        serve(tmp_path, "first", *disk) as daemon,
        serve(tmp_path, "second", *disk) as second_daemon,
    ):
        with engine(model, tmp_path / "a.log", daemon.socket_path, extra=LOAD) as running:
            running.generate(text, max_tokens=6)
            (oracle,) = running.generate(text, max_tokens=6)
            is_written(daemon, "disk")
            daemon.stop()
            daemon.start()
            until(lambda: is_back(running, daemon), "the engine is back")
            hits(running, text, oracle, chunk)
            arena_gone(daemon)
            until(lambda: is_back(running, daemon), "the engine is back")
            hits(running, text, oracle, chunk)
            assert tokens_from("disk", daemon) == CHUNKS * chunk, (
                "the daemon's reboot, under a living engine"
            )
        with engine(model, tmp_path / "b.log", daemon.socket_path, extra=LOAD) as running:
            hits(running, text, oracle, chunk)
        daemon.stop()
        daemon.start()
        with engine(model, tmp_path / "c.log", daemon.socket_path, extra=LOAD) as running:
            hits(running, text, oracle, chunk)
            with engine(model, tmp_path / "d.log", second_daemon.socket_path, extra=LOAD) as second:
                hits(second, text, oracle, chunk)
                assert tokens_from("disk", second_daemon) == CHUNKS * chunk
        arena_gone(daemon)
        with engine(model, tmp_path / "e.log", daemon.socket_path, extra=LOAD) as running:
            hits(running, text, oracle, chunk)
            assert tokens_from("disk", daemon) == CHUNKS * chunk
            values = stats(daemon.socket_path)
        assert not values.get("tier_disk_objects_damaged")
        assert not values["tier_disk_failures"]


@needs_mooncake
@pytest.mark.soak
@pytest.mark.parametrize("model", MODELS)
def test_a_second_node_through_mooncake(model: str, tmp_path: Path) -> None:
    """The first node's daemon gives the memory. Its engines and its arena may be gone."""
    chunk = MODELS[model]
    text = prompt(1, CHUNKS * chunk + 20)
    master = Master(tmp_path / "master.log", "300ms")
    try:
        giving = ("--tier", master.url(size=256 << 20, timeout=5))
        with (
            serve(tmp_path, "first", *giving) as daemon,
            serve(tmp_path, "second", "--tier", master.url(timeout=5)) as second_daemon,
        ):
            with engine(model, tmp_path / "a.log", daemon.socket_path, extra=LOAD) as running:
                running.generate(text, max_tokens=6)
                (oracle,) = running.generate(text, max_tokens=6)
                is_written(daemon, "mooncake")
                clear(daemon.socket_path)
                hits(running, text, oracle, chunk)
                assert tokens_from("mooncake", daemon) == CHUNKS * chunk
            with engine(
                model, tmp_path / "b.log", second_daemon.socket_path, extra=LOAD
            ) as running:
                hits(running, text, oracle, chunk)
                assert tokens_from("mooncake", second_daemon) == CHUNKS * chunk
    finally:
        master.kill()


def is_back(running: EngineProcess, daemon: DaemonProcess) -> bool:
    """Whether an engine has noticed its new daemon, which it looks for in its steps."""
    running.generate(prompt(9, 10), max_tokens=1)
    return stats(daemon.socket_path)["sessions"] == 1


@pytest.mark.soak
def test_windows_in_a_tier_are_those_of_ends_and_of_where_prompts_part(tmp_path: Path) -> None:
    """Its hits are those of RAM, which has all windows, with the same answers to the last bit."""
    document = prompt(1, 7 * 128 + 4)
    texts = [[*document, *prompt(seed, 6 * 128)] for seed in (2, 3, 4)]
    extra: dict[str, object] = {**LOAD, "checksum": "paranoid"}
    with (
        serve(tmp_path, "ram") as daemon,
        engine("gemma3", tmp_path / "r.log", daemon.socket_path, extra=extra) as running,
    ):
        from_ram = []
        for text in (texts[0], texts[2], texts[0]):
            from_ram += running.generate(text, max_tokens=6)
            running.reset_caches()
    disk = ("--disk", str(tmp_path / "disk"), "--disk-bytes", "1GiB")
    with (
        serve(tmp_path, "first", *disk) as daemon,
        engine("gemma3", tmp_path / "e.log", daemon.socket_path, extra=extra) as running,
    ):
        seen, left_out = [], []
        for text in (*texts, texts[0]):
            seen += running.generate(text, max_tokens=6)
            until(lambda: not stats(daemon.socket_path)["writes_waiting"], "all is written")
            left_out.append(stats(daemon.socket_path).get("tier_disk_bytes_left_out", 0))
            arena_gone(daemon)
            until(lambda: is_back(running, daemon), "the engine is back")
            running.reset_caches()
        values = stats(daemon.socket_path)
    hits = [result["cached_tokens"] for result in seen]
    assert hits == [0, 0, 7 * 128, from_ram[2]["cached_tokens"]]
    assert [answer(result) for result in seen[2:]] == [answer(result) for result in from_ram[1:]]
    assert not values["tier_disk_failures"]
    assert all(left_out[:3]), "of each of the prompts that were computed"


@pytest.mark.soak
def test_what_a_slow_tier_would_take_longer_to_give_is_computed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tier is slowed on purpose. `explain` says what was weighed, the switch forces either."""
    text = prompt(1, CHUNKS * 128 + 20)
    url = f"disk://{tmp_path}/disk?bytes=1GiB"
    with (
        serve(tmp_path, "fast", "--tier", url) as daemon,
        engine("gemma3", tmp_path / "a.log", daemon.socket_path) as running,
    ):
        (oracle,) = running.generate(text, max_tokens=4)
        is_written(daemon, "disk")
    with serve(
        tmp_path, "slow", "--tier", f"inject+{url}&rate=150KiB&write=off&timeout=60"
    ) as daemon:

        def ask(log: str, policy: str, times: int) -> list[dict[str, Any]]:
            """The answers of an engine of known prefill speed, each from a daemon of empty RAM."""
            results = []
            with engine(
                "gemma3", tmp_path / log, daemon.socket_path, extra={"load_policy": policy}
            ) as running:
                for seed in range(3):
                    running.generate(prompt(100 + seed, 512), max_tokens=1)
                for _ in range(times):
                    until(
                        lambda: not stats(daemon.socket_path)["tier_disk_jobs_running"],
                        "nothing comes up any more",
                    )
                    clear(daemon.socket_path)
                    running.reset_caches()
                    results += running.generate(text, max_tokens=4)
            return results

        computed = ask("b.log", "faster", 2)
        assert [result["cached_tokens"] for result in computed] == [0, 0]
        assert all(result["tokens"] == oracle["tokens"] for result in computed)
        assert main(["explain", "verify-5", "--socket", daemon.socket_path]) == 0
        output = capsys.readouterr().out
        assert "computing" in output, output
        assert [result["cached_tokens"] for result in ask("c.log", "never", 1)] == [0]
        assert [result["cached_tokens"] for result in ask("d.log", "always", 1)] == [CHUNKS * 128]


def clear(socket_path: str) -> None:
    """Empty RAM, and leave the tiers."""
    with ControlClient(socket_path) as control:
        control.clear_objects()


def test_a_tier_that_hangs_costs_the_hit_and_nothing_else(tmp_path: Path) -> None:
    """The tier's calls never return: requests are computed, and the daemon ends when told to."""
    text, second_text = prompt(1, CHUNKS * 128 + 20), prompt(2, CHUNKS * 128 + 20)
    url = f"disk://{tmp_path}/disk?bytes=1GiB"
    extra = {**LOAD, "load_timeout_seconds": 2}
    with serve(tmp_path, "node", "--tier", url) as daemon:
        hanging = serve(tmp_path, "node", "--tier", f"inject+{url}&latency=3600&timeout=1")
        with engine("gemma3", tmp_path / "a.log", daemon.socket_path, extra=extra) as running:
            (oracle,) = running.generate(text, max_tokens=6)
            is_written(daemon, "disk")
            daemon.kill()
            daemon.__exit__()
            hanging.start()
            until(lambda: is_back(running, hanging), "the engine is back")
            for _ in range(2):
                running.reset_caches()
                (result,) = running.generate(text, max_tokens=6)
                assert result["cached_tokens"] == 0
                assert result["tokens"] == oracle["tokens"]
                clear(hanging.socket_path)
            until(
                lambda: stats(hanging.socket_path)["tier_disk_breaker_open"] == 1,
                "it is left alone",
            )
            (first,) = running.generate(second_text, max_tokens=6)

            def is_hit() -> bool:
                running.reset_caches()
                (result,) = running.generate(second_text, max_tokens=6)
                assert result["tokens"] == first["tokens"]
                return bool(result["cached_tokens"] == CHUNKS * 128)

            until(is_hit, "RAM goes on")
        assert hanging.stop() == 0
        hanging.__exit__()


@pytest.mark.soak
def test_what_is_forgotten_is_computed_and_the_rest_is_a_hit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = "qwen3next"
    chunk = MODELS[model]
    forgotten, kept = (prompt(number, CHUNKS * chunk + 20) for number in (1, 2))
    with (
        serve(
            tmp_path, "first", "--disk", str(tmp_path / "disk"), "--disk-bytes", "1GiB"
        ) as daemon,
        engine(model, tmp_path / "a.log", daemon.socket_path, extra=LOAD) as running,
    ):
        running.generate(forgotten, max_tokens=6)
        families = listed_families(daemon, capsys)
        assert len(families) == 1
        running.generate(kept, max_tokens=6)
        (first,) = running.generate(forgotten, max_tokens=6)
        (second,) = running.generate(kept, max_tokens=6)
        is_written(daemon, "disk")
        running.reset_caches()
        where = ["--socket", daemon.socket_path]
        assert main(["forget", "--family", families.pop(), *where]) == 0
        (computed,) = running.generate(forgotten, max_tokens=6)
        assert computed["cached_tokens"] == 0
        assert answer(computed) == answer(first)
        hits(running, kept, second, chunk)


def listed_families(daemon: DaemonProcess, capsys: pytest.CaptureFixture[str]) -> set[str]:
    """The families that RAM holds."""
    capsys.readouterr()
    assert main(["ls", "--families", "--json", "--socket", daemon.socket_path]) == 0
    groups = json.loads(capsys.readouterr().out)["groups"]
    return {group["family"] for group in groups if "RAM" in group["places"]}
