"""Prefill on one node, decode on another, a tier between: what the second one waits for, and hits.

Two daemons stand for two nodes. Nothing but the tier is between them.
"""

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from hybridkv.lab.daemon_process import DaemonProcess
from hybridkv.lab.engine_process import EngineProcess
from hybridkv.lab.models import bundled_environment
from tests.engine.forked import ForkedEngine
from tests.engine.support import answer, arguments_of, prompt, stats
from tests.forked_daemon import ForkedDaemon
from tests.programs.tiers.servers import ValkeyServer
from tests.waiting import until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

CHUNKS = 6
CHUNK = 128
WAIT_SECONDS = 4.0
"""For a wait in vain. Tiny models compute faster than any storage reads, so it is a setting."""
COMPUTE_SECONDS_MAX = 10.0  # For a prompt alone, on any machine.


class Nodes:
    """Two daemons with one tier, and an engine on each, of which the second decodes."""

    def __init__(
        self,
        stack: contextlib.ExitStack,
        place: Path,
        tier: str,
        model: str,
        *options: str,
        wait_seconds: float = 30.0,
    ) -> None:
        self._stack = stack
        self._place = place
        self.daemons: list[DaemonProcess] = []
        self.engines: list[EngineProcess] = []
        url = self._tier_url(tier)
        extra: dict[str, object] = {"load_policy": "always", "load_timeout_seconds": wait_seconds}
        for name, role in (("first", "kv_producer"), ("second", "kv_consumer")):
            (place / name).mkdir(mode=0o700)
            path = str(place / name / "daemon.sock")
            daemon = ForkedDaemon(path, "64MiB", options=["--node", name, "--tier", url])
            self.daemons.append(stack.enter_context(daemon))
            arguments = arguments_of(model, path, *options, extra=extra, role=role)
            log = place / f"{name}.log"
            started: EngineProcess = ForkedEngine(
                arguments, log, lambda text: None, bundled_environment(model)
            )
            self.engines.append(stack.enter_context(started))
        for running in self.engines:
            running.generate(prompt(2, 20), max_tokens=1)

    def _tier_url(self, tier: str) -> str:
        if tier == "valkey":
            server = self._stack.enter_context(ValkeyServer(self._place))
            return f"valkey://127.0.0.1:{server.port}/0"
        return f"disk://{self._place}/tier?bytes=256MiB"

    def waits(self) -> tuple[float, float]:
        """The second node's waits for the first that brought something, and that did not."""
        values = stats(self.daemons[1].socket_path)
        return values["node_waits_kept"], values["node_waits_broken"]


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.mark.parametrize(
    ("tier", "model"),
    [
        ("disk", "gemma3"),
        pytest.param("valkey", "gemma3", marks=pytest.mark.soak),
        pytest.param("disk", "qwen3", marks=pytest.mark.soak),
        pytest.param("valkey", "qwen3", marks=pytest.mark.soak),
    ],
)
def test_a_decoder_that_is_asked_at_once_hits_all_that_is_stored(
    tier: str, model: str, tmp_path: Path, stack: contextlib.ExitStack
) -> None:
    nodes = Nodes(stack, tmp_path, tier, model)
    first, second = nodes.engines
    for seed in range(5, 8):
        text = prompt(seed, CHUNKS * CHUNK + 40)
        for running in (second, first):
            running.begin_command("generate", prompts=[text], max_tokens=8)
        (computed,), (waited,) = first.end_command(), second.end_command()
        (own,) = first.generate(text, max_tokens=8)
        assert computed["cached_tokens"] == 0
        assert waited["cached_tokens"] == own["cached_tokens"] == CHUNKS * CHUNK
        assert answer(waited) == answer(own)
        print(f"{waited['ttft_seconds'] - computed['ttft_seconds']:.3f} s after the first token")
    _, broken = nodes.waits()
    assert not broken


@pytest.mark.soak
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("model", ["gemma3", "qwen3"])
def test_a_prefiller_that_ends_in_the_middle_costs_a_bounded_wait(
    model: str, how: signal.Signals, tmp_path: Path, stack: contextlib.ExitStack
) -> None:
    step = f"--max-num-batched-tokens={CHUNK}"
    nodes = Nodes(stack, tmp_path, "disk", model, step, wait_seconds=WAIT_SECONDS)
    first, second = nodes.engines
    path, chunks = nodes.daemons[0].socket_path, 2 * CHUNKS
    text = prompt(5, chunks * CHUNK + 40)

    def written() -> float:
        return stats(path).get("tier_disk_objects_written", 0.0)

    before = written()
    second.begin_command("generate", prompts=[text], max_tokens=8)
    first.begin_command("generate", prompts=[text], max_tokens=8)
    until(lambda: written() > before + 2, "a part of it is written")
    os.kill(first.process.pid, how)
    (result,) = second.end_command()
    try:
        print(f"{result['cached_tokens']} tokens cached after {result['ttft_seconds']:.3f} s")
        assert result["cached_tokens"] < chunks * CHUNK
        assert result["ttft_seconds"] < WAIT_SECONDS + COMPUTE_SECONDS_MAX
        (own,) = second.generate(text, max_tokens=8)
        assert result["tokens"] == own["tokens"]
    finally:
        first.process.kill()
        first.process.wait()
