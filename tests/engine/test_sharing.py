"""Two real engines and one daemon; a daemon that hangs or dies under an engine."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hybridkv.cli.main import main
from hybridkv.client.control import ControlClient
from hybridkv.lab.daemon_process import DaemonProcess
from hybridkv.lab.engine_process import EngineProcess
from tests.engine.support import (
    answer,
    begin_storing,
    engine,
    forget,
    prompt,
    since_vllm,
    stats,
    stats_if_served,
)
from tests.waiting import until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

CHUNK = 128


@pytest.mark.parametrize(
    ("model", "chunk"), [pytest.param("gemma3", 128, marks=pytest.mark.soak), ("qwen3next", 256)]
)
def test_a_prompt_that_another_engine_computes_is_waited_for(
    daemon: DaemonProcess, tmp_path: Path, model: str, chunk: int
) -> None:
    """The one that waited answers as the other one's own hit does."""
    text, whole = prompt(1, 6 * chunk + 40), 6 * chunk
    path, step = daemon.socket_path, f"--max-num-batched-tokens={chunk}"
    extra = dict[str, object](load_policy="always")
    with (
        engine(model, tmp_path / "a.log", path, step, extra=extra) as first,
        engine(model, tmp_path / "b.log", path, step, extra=extra) as second,
    ):
        for running in (first, second):
            running.generate(prompt(2, 20), max_tokens=1)
        before = stats(path)
        first.begin_command("generate", prompts=[text], max_tokens=8)
        until(lambda: stats(path)["objects"] > before["objects"], "it has begun")
        # So that the lookup comes before the end, however slow this process is.
        os.kill(first.process.pid, signal.SIGSTOP)
        second.begin_command("generate", prompts=[text], max_tokens=8)
        until(lambda: stats(path)["lookups"] > before["lookups"] + 1, "both have asked")
        os.kill(first.process.pid, signal.SIGCONT)
        (computed,), (waited,) = first.end_command(), second.end_command()
        (own,) = first.generate(text, max_tokens=8)
        assert computed["cached_tokens"] == 0
        assert waited["cached_tokens"] == own["cached_tokens"] == whole
        assert answer(waited) == answer(own)
        assert not stats(path)["promises_broken"]


@pytest.mark.soak
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("third", range(3))
def test_who_promised_a_prompt_ends_in_the_middle(
    daemon: DaemonProcess, tmp_path: Path, third: int, how: signal.Signals
) -> None:
    """The other engine computes the rest, right, and soon."""
    chunks, path, step = 12, daemon.socket_path, f"--max-num-batched-tokens={CHUNK}"
    text = prompt(1, chunks * CHUNK + 40)
    with (
        engine("gemma3", tmp_path / "a.log", path, step) as first,
        engine("gemma3", tmp_path / "b.log", path, step) as second,
    ):
        for running in (first, second):
            running.generate(prompt(2, 2 * CHUNK), max_tokens=1)
        alone = second.generate(prompt(3, len(text)), max_tokens=1)[0]
        before = stats(path)["objects"]
        first.begin_command("generate", prompts=[text], max_tokens=1)
        until(lambda: stats(path)["objects"] >= before + third * chunks, "a part of it is stored")
        second.begin_command("generate", prompts=[text], max_tokens=8)
        os.kill(first.process.pid, how)
        (result,) = second.end_command()
        try:
            seconds = result["ttft_seconds"] - alone["ttft_seconds"]
            print(f"{result['cached_tokens']} tokens cached, {seconds:.3f} s more than alone")
            (own,) = second.generate(text, max_tokens=8)
            assert answer(result)[0] == answer(own)[0]
        finally:
            first.process.kill()
            first.process.wait()


def test_two_engines_at_the_same_time_share_one_daemon(
    daemon: DaemonProcess, tmp_path: Path
) -> None:
    """Both serve at once from their first step on, and each then hits what the other stored.

    A hit is compared with the other engine's own hit of the same length, windows included.
    """
    prompts = [prompt(seed, 3 * CHUNK + 40) for seed in (1, 2)]
    with (
        engine("gemma3", tmp_path / "a.log", daemon.socket_path) as first,
        engine("gemma3", tmp_path / "b.log", daemon.socket_path) as second,
    ):
        assert stats(daemon.socket_path)["sessions"] == 2
        for running, mine in ((first, prompts[0]), (second, prompts[1])):
            running.begin_command("generate", prompts=[mine], max_tokens=8)
        computed = [first.end_command()[0], second.end_command()[0]]
        assert [result["cached_tokens"] for result in computed] == [0, 0]
        own = [
            running.generate(mine, max_tokens=8)[0]
            for running, mine in ((first, prompts[0]), (second, prompts[1]))
        ]
        assert [result["cached_tokens"] for result in own] == [3 * CHUNK, 3 * CHUNK]
        assert stats(daemon.socket_path)["tokens_loaded"] == 0, "each engine's own prefix cache"
        until(lambda: stats(daemon.socket_path)["objects"] >= 2 * 9, "both prompts are stored")
        for running, text in ((first, prompts[1]), (second, prompts[0])):
            running.begin_command("generate", prompts=[text], max_tokens=8)
        crossed = [first.end_command()[0], second.end_command()[0]]
        assert [result["cached_tokens"] for result in crossed] == [3 * CHUNK, 3 * CHUNK]
        assert answer(crossed[0]) == answer(own[1])
        assert answer(crossed[1]) == answer(own[0])
    until(lambda: stats(daemon.socket_path)["sessions"] == 0, "sessions end with their engines")
    values = stats(daemon.socket_path)
    assert (values["leases"], values["bytes_writing"]) == (0, 0)


@pytest.mark.soak
def test_many_requests_while_the_daemon_is_stopped_killed_and_back(
    daemon: DaemonProcess, tmp_path: Path
) -> None:
    """Every answer is right. Once the daemon is back, so are hits, without an engine restart."""
    prompts = [prompt(seed, 2 * 256 + 100 + seed) for seed in range(4)]
    with engine(
        "qwen3next", tmp_path / "e.log", daemon.socket_path, extra={"lookup_timeout_ms": 1000}
    ) as running:

        def fresh(text: list[int]) -> dict[str, Any]:
            forget(running)
            (result,) = running.generate(text, max_tokens=6)
            return result

        alone = [fresh(text) for text in prompts]
        again = [fresh(text) for text in prompts]
        assert [result["cached_tokens"] for result in again] == [512] * 4

        assert daemon.process is not None
        daemon.process.send_signal(signal.SIGSTOP)
        for index, text in enumerate(prompts):
            result = fresh(text)
            assert result["cached_tokens"] == 0, "a daemon that hangs is a miss"
            assert answer(result) == answer(alone[index])
        daemon.process.send_signal(signal.SIGCONT)

        until(
            lambda: fresh(prompts[0])["cached_tokens"] == 512,
            "the engine asks again after the pause",
        )
        forget(running)
        lookups = stats(daemon.socket_path)["lookups"]
        running.begin_command("generate", prompts=prompts, max_tokens=60)
        until(
            lambda: stats(daemon.socket_path)["lookups"] > lookups,
            "the engine asks the daemon that dies",
        )
        daemon.kill()
        results = running.end_command()
        assert [len(result["tokens"]) for result in results] == [60] * 4
        assert all(result["finish_reason"] == "length" for result in results)

        daemon.start()
        for index, text in enumerate(prompts):

            def hits(index: int = index, text: list[int] = text) -> bool:
                # Nothing is stored before the worker and the write slots are there.
                # Each answer must be right.
                result = fresh(text)
                right = alone if result["cached_tokens"] == 0 else again
                assert answer(result) == answer(right[index])
                return bool(result["cached_tokens"] == 512)

            until(hits, "hits are back")


@pytest.mark.soak
def test_preemption_and_small_chunks_of_prefill(daemon: DaemonProcess, tmp_path: Path) -> None:
    """With preemption and prefill in pieces, answers are the same as without a connector."""
    tight = (
        "--num-gpu-blocks-override=25",
        "--max-model-len=1024",
        "--max-num-batched-tokens=192",
        "--max-num-seqs=4",
    )
    prompts = [prompt(seed, 300 + 50 * seed) for seed in range(4)]
    with engine("gemma3", tmp_path / "plain.log", None, *tight) as plain:
        expected = [answer(plain.generate(p, max_tokens=40)[0]) for p in prompts]
    with engine(
        "gemma3", tmp_path / "e.log", daemon.socket_path, *tight, extra={"checksum": "paranoid"}
    ) as running:
        for _ in range(2):
            results = running.generate(*prompts, max_tokens=40)
            assert [result["tokens"] for result in results] == [tokens for tokens, _ in expected]
            running.reset_caches()
    assert stats(daemon.socket_path)["tokens_loaded"] > 0
    assert stats(daemon.socket_path).get("loads_failed", 0) == 0


@since_vllm(31, "its CPU build fails as it samples drafts, with a connector or without")
def test_drafts_that_are_rejected_are_never_stored(daemon: DaemonProcess, tmp_path: Path) -> None:
    """N-gram drafts, then a second turn: answers are as with the engine's own cache."""
    ngram = (
        '--speculative-config={"method":"ngram","num_speculative_tokens":3,'
        '"prompt_lookup_max":2,"prompt_lookup_min":1}'
    )
    text = prompt(5, 2 * CHUNK + 30)
    with engine("qwen3", tmp_path / "plain.log", None, ngram) as plain:
        (first,) = plain.generate(text, max_tokens=CHUNK)
        turn = [*text, *first["tokens"], *prompt(6, 20)]
        (own,) = plain.generate(turn, max_tokens=24)
    with engine(
        "qwen3", tmp_path / "e.log", daemon.socket_path, ngram, extra={"checksum": "paranoid"}
    ) as running:
        (again,) = running.generate(text, max_tokens=CHUNK)
        assert answer(again) == answer(first)
        running.reset_caches()
        (second,) = running.generate(turn, max_tokens=24)
    assert second["cached_tokens"] == own["cached_tokens"] == 3 * CHUNK, (
        "the last chunk holds generated tokens"
    )
    assert stats(daemon.socket_path)["tokens_loaded"] == 3 * CHUNK
    assert answer(second) == answer(own)


def test_auto_starts_a_daemon_and_starts_it_again_when_it_dies(tmp_path: Path) -> None:
    """With `server: "auto"` the daemon outlives the engine, and comes back when it is killed."""
    socket_path = str(tmp_path / "hybridkv" / "daemon.sock")
    environment = {"XDG_RUNTIME_DIR": str(tmp_path)}
    text = prompt(1, 3 * CHUNK + 20)

    def pid() -> int:
        with ControlClient(socket_path) as control:
            return control.welcome.pid

    def is_stored() -> bool:
        """Whether the daemon has the prompt. It starts beside the engine's first requests."""
        running.reset_caches()
        computed.extend(running.generate(text, max_tokens=6))
        return stats_if_served(socket_path).get("objects") == 3

    def is_hit() -> bool:
        running.reset_caches()
        (result,) = running.generate(text, max_tokens=6)
        assert result["tokens"] == computed[0]["tokens"]
        return bool(result["cached_tokens"] == 3 * CHUNK)

    def is_back() -> bool:
        running.generate(prompt(2, 10), max_tokens=1)
        return stats_if_served(socket_path).get("sessions") == 1

    def started(log: str) -> EngineProcess:
        extra: dict[str, object] = {"ram": "128MiB"}
        return engine("qwen3", tmp_path / log, "auto", extra=extra, environment=environment)

    computed: list[dict[str, Any]] = []
    with started("a.log") as running:
        until(is_stored, "the engine's daemon has the prompt")
    first = pid()
    with started("b.log") as running:
        assert pid() == first, "the second engine found the first one's daemon"
        until(is_hit, "the second engine hits what the first one stored")
        os.kill(first, signal.SIGKILL)
        Path(socket_path).unlink()
        until(is_back, "the engine started a new daemon")
        assert pid() != first
        assert stats(socket_path)["objects"] == 3, "it has the cache of the one that was killed"
        until(is_hit, "the engine hits again")
        assert stats(socket_path)["objects"] == 3, "nothing was stored under another identity"
    os.kill(pid(), signal.SIGINT)
    until(lambda: not Path(socket_path).exists(), "the daemon ends")


OLD_DAEMON = """
import sys
from hybridkv.wire import messages
messages.PROTOCOL_VERSION -= 1
from hybridkv.cli.main import main
sys.exit(main(["serve", "--socket", sys.argv[1], "--ram", "128MiB", "--metrics-port", "-1"]))
"""


def started(directory: Path, log: str) -> EngineProcess:
    """An engine with the user's own daemon, below a directory. It asks again soon."""
    extra: dict[str, object] = {"ram": "128MiB", "lookup_timeout_ms": 2000}
    environment = {"XDG_RUNTIME_DIR": str(directory)}
    return engine("qwen3", directory / log, "auto", extra=extra, environment=environment)


def is_hit(running: EngineProcess) -> bool:
    """Whether a prompt is loaded. It is stored where it is not."""
    running.reset_caches()
    (result,) = running.generate(prompt(1, 3 * CHUNK + 20), max_tokens=2)
    return bool(result["cached_tokens"] == 3 * CHUNK)


def test_a_daemon_of_another_version_is_told_to_end(tmp_path: Path) -> None:
    socket_path = tmp_path / "hybridkv" / "daemon.sock"
    with subprocess.Popen([sys.executable, "-c", OLD_DAEMON, str(socket_path)]) as old:
        until(socket_path.is_socket, "the other version serves")
        with started(tmp_path, "a.log") as running:
            assert old.wait() == 0, "it was told to end"
            until(lambda: is_hit(running), "one of this version serves")
    assert f"pid {old.pid}, since " in (tmp_path / "a.log").read_text()
    with ControlClient(str(socket_path)) as control:
        os.kill(control.welcome.pid, signal.SIGINT)
    until(lambda: not socket_path.exists(), "the daemon ends")


@pytest.mark.soak
def test_a_daemon_that_hangs_is_a_miss_until_it_goes_on(tmp_path: Path) -> None:
    """An engine that starts meanwhile waits some seconds for it."""
    socket_path = tmp_path / "hybridkv" / "daemon.sock"
    with started(tmp_path, "a.log") as running:
        until(lambda: is_hit(running), "the engine's daemon has the prompt")
    with ControlClient(str(socket_path)) as control:
        pid = control.welcome.pid
    os.kill(pid, signal.SIGSTOP)
    try:
        with started(tmp_path, "b.log") as running:
            assert not is_hit(running), "it hangs"
            os.kill(pid, signal.SIGCONT)
            until(lambda: is_hit(running), "the engine finds it again")
    finally:
        os.kill(pid, signal.SIGCONT)
        os.kill(pid, signal.SIGINT)
    assert f"(pid {pid}, since " in (tmp_path / "b.log").read_text()
    until(lambda: not socket_path.exists(), "the daemon ends")


def test_explain_says_what_was_loaded_and_why_not(
    daemon: DaemonProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = prompt(1, 3 * CHUNK + 20)

    def explained(request_id: str) -> dict[str, str]:
        assert main(["explain", request_id, "--socket", daemon.socket_path, "--json"]) == 0
        facts: dict[str, str] = json.loads(capsys.readouterr().out)
        return facts

    with engine("qwen3", tmp_path / "e.log", daemon.socket_path) as running:
        running.generate(text, max_tokens=2)
        computed = explained("verify-1")
        running.reset_caches()
        running.generate(text, max_tokens=2)
        loaded = explained("verify-2")
        running.generate(prompt(2, 20), max_tokens=2)
        short = explained("verify-3")
    assert computed["looked_up"] == f"3 chunks of {CHUNK} tokens"
    assert computed["not_more_because"] == "group 0 (full) lacks chunk 0"
    assert computed["stored"] == "3 objects"
    assert loaded["loaded"].startswith(f"{3 * CHUNK} tokens, ")
    assert loaded["found"].startswith("a hit of 3 chunks")
    assert short["nothing_loaded_because"] == "the prompt has no whole chunk before its last token"
    with engine("qwen3", tmp_path / "f.log", daemon.socket_path, "--dtype=bfloat16") as running:
        running.generate(text, max_tokens=2)
        other_facts = explained("verify-1")
    (elsewhere,) = (fact for name, fact in other_facts.items() if name.startswith("also_under"))
    assert 'model_config.dtype: "torch.bfloat16" here, "torch.float32" there' in elsewhere
    assert main(["explain", "nobody", "--socket", daemon.socket_path]) == 1
    assert "the latest are: verify-" in capsys.readouterr().err


def test_a_killed_engine_leaves_nothing_but_its_objects(
    daemon: DaemonProcess, tmp_path: Path
) -> None:
    """kill -9 while requests run: leases and write slots are back, and the next engine hits."""
    prompts = [prompt(seed, 3 * CHUNK + 20) for seed in range(4)]
    with engine("qwen3", tmp_path / "a.log", daemon.socket_path) as running:
        computed = running.generate(prompts[0], max_tokens=4)
        running.reset_caches()
        begin_storing(running, daemon.socket_path, prompts)
        assert stats(daemon.socket_path)["sessions"] == 1
        os.kill(running.process.pid, signal.SIGKILL)
        until(
            lambda: stats(daemon.socket_path)["sessions"] == 0, "the session ends with its process"
        )
        left = stats(daemon.socket_path)
        assert (left["leases"], left["bytes_writing"], left["connections"]) == (0, 0, 1)
    with engine("qwen3", tmp_path / "b.log", daemon.socket_path) as running:
        (hit,) = running.generate(prompts[0], max_tokens=4)
    assert hit["cached_tokens"] == 3 * CHUNK
    assert hit["tokens"] == computed[0]["tokens"]
