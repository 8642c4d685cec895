"""The live audit on real engines: a wrong name of the weights ends at the first hit."""

from pathlib import Path

import pytest

from hybridkv.cli.main import main
from hybridkv.lab.daemon_process import DaemonProcess
from hybridkv.lab.models import WIDEN_SEED
from tests.engine.support import answer, engine, forget, prompt, stats
from tests.waiting import until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

CHUNKS = 3
CHUNK_TOKENS = {"qwen3": 128, "gemma3": 128, "qwen3next": 256}
STATES = ("--prefix-cache-retention-interval=256", "--max-num-batched-tokens=256")
"""With them a state stands at the end of each chunk."""
ARGUMENTS = {"qwen3next": STATES}
EXTRA: dict[str, object] = {"audit": "on", "weights_identity": "mine", "load_policy": "always"}
OTHER_WEIGHTS = {"HYBRIDKV_WIDEN": f"{WIDEN_SEED + 1}:0.08"}


def text_of(model: str) -> list[int]:
    return prompt(1, CHUNKS * CHUNK_TOKENS[model] + 20)


def store(model: str, daemon: DaemonProcess, log: Path) -> None:
    """An engine computes the prompt; what it stores outlives it."""
    arguments = ARGUMENTS.get(model, ())
    with engine(model, log, daemon.socket_path, *arguments, extra=EXTRA) as running:
        running.run(text_of(model), max_tokens=4)
        until(lambda: stats(daemon.socket_path)["objects"] >= CHUNKS, "the prompt is stored")


@pytest.mark.parametrize("model", CHUNK_TOKENS)
def test_an_engine_of_the_same_weights_passes_and_then_has_its_whole_hits(
    model: str, daemon: DaemonProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store(model, daemon, tmp_path / "a.log")
    chunk, arguments = CHUNK_TOKENS[model], ARGUMENTS.get(model, ())
    with engine(model, tmp_path / "b.log", daemon.socket_path, *arguments, extra=EXTRA) as running:
        (first,) = running.run(text_of(model), max_tokens=4)
        assert first["cached_tokens"] == (CHUNKS - 1) * chunk
        forget(running)
        (second,) = running.run(text_of(model), max_tokens=4)
        assert second["cached_tokens"] == CHUNKS * chunk
        assert second["tokens"] == first["tokens"]
    values = stats(daemon.socket_path)
    assert (values["audits_passed"], values.get("audits_differed", 0)) == (1, 0)
    assert values["leases"] == 0
    main(["stats", "--socket", daemon.socket_path])
    assert "audits_passed" in capsys.readouterr().out


@pytest.mark.parametrize("model", CHUNK_TOKENS)
def test_an_engine_with_other_weights_of_that_name_is_cut_off_at_its_first_hit(
    model: str, daemon: DaemonProcess, tmp_path: Path
) -> None:
    """Its later answers are those of an engine without a cache."""
    arguments = ARGUMENTS.get(model, ())
    with engine(model, tmp_path / "p.log", None, *arguments, environment=OTHER_WEIGHTS) as plain:
        (alone,) = plain.run(text_of(model), max_tokens=4)
    store(model, daemon, tmp_path / "a.log")
    log = tmp_path / "b.log"
    with engine(
        model, log, daemon.socket_path, *arguments, extra=EXTRA, environment=OTHER_WEIGHTS
    ) as running:
        running.run(text_of(model), max_tokens=4)
        until(lambda: stats(daemon.socket_path).get("audits_differed", 0) == 1, "it differs")
        forget(running)
        stored = stats(daemon.socket_path)["objects_stored"]
        (second,) = running.run(text_of(model), max_tokens=4)
        assert second["cached_tokens"] == 0
        assert answer(second) == answer(alone)
        assert stats(daemon.socket_path)["objects_stored"] == stored
    assert "the live audit of" in log.read_text(errors="replace")
