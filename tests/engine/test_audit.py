"""The live audit on real engines: a wrong name of the weights ends at the first hit."""

import os
from pathlib import Path

import pytest
import torch

from hybridkv.cli.main import main
from hybridkv.lab.daemon_process import DaemonProcess
from hybridkv.lab.models import WIDEN_ENV, WIDEN_SEED
from tests.avx2 import CPU_ENV
from tests.engine.support import answer, engine, forget, prompt, stats
from tests.waiting import until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

STORED_TOKENS = 768
"""Tokens of the prompt that are stored: whole chunks of each model on every processor."""
HAS_AVX512 = torch.cpu._is_avx512_supported() and CPU_ENV not in os.environ
STATE_TOKENS = 256 if HAS_AVX512 else 128
STATES = (
    f"--prefix-cache-retention-interval={STATE_TOKENS}",
    f"--max-num-batched-tokens={STATE_TOKENS}",
    "--max-num-seqs=16",
)
"""vLLM's arguments by which a state stands at the end of each chunk."""
ARGUMENTS = {"qwen3next": STATES}
TEXT = prompt(1, STORED_TOKENS + 20)
EXTRA: dict[str, object] = {"audit": "on", "weights_identity": "mine", "load_policy": "always"}
OTHER_WEIGHTS = {WIDEN_ENV: f"{WIDEN_SEED + 1}:0.08"}


def models(*of_the_soak: str) -> list[object]:
    """Returns the models as parameters.

    Those of `of_the_soak` are only of the soak, since each takes two or three engines.
    """
    every = "qwen3", "gemma3", "qwen3next"
    marks = {True: [pytest.mark.soak], False: []}
    return [pytest.param(model, marks=marks[model in of_the_soak]) for model in every]


def store(model: str, daemon: DaemonProcess, log: Path) -> None:
    """Let an engine compute the prompt, and end: its objects outlive it."""
    arguments = ARGUMENTS.get(model, ())
    with engine(model, log, daemon.socket_path, *arguments, extra=EXTRA) as running:
        running.generate(TEXT, max_tokens=4)
        forget(running)
        (again,) = running.generate(TEXT, max_tokens=4)
        assert again["cached_tokens"], "the prompt is stored"


@pytest.mark.parametrize("model", models("qwen3", "gemma3", "qwen3next"))
def test_an_engine_of_the_same_weights_passes_and_then_has_its_whole_hits(
    model: str, daemon: DaemonProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store(model, daemon, tmp_path / "a.log")
    arguments = ARGUMENTS.get(model, ())
    with engine(model, tmp_path / "b.log", daemon.socket_path, *arguments, extra=EXTRA) as running:
        (first,) = running.generate(TEXT, max_tokens=4)
        assert 0 < first["cached_tokens"] < STORED_TOKENS
        forget(running)
        (second,) = running.generate(TEXT, max_tokens=4)
        assert second["cached_tokens"] == STORED_TOKENS
        assert second["tokens"] == first["tokens"]
    values = stats(daemon.socket_path)
    # The first hit of each engine.
    assert (values["audits_passed"], values.get("audits_differed", 0)) == (2, 0)
    assert values["leases"] == 0
    main(["stats", "--socket", daemon.socket_path])
    assert "audits_passed" in capsys.readouterr().out


@pytest.mark.parametrize("model", models("qwen3next", "gemma3"))
def test_an_engine_with_other_weights_of_that_name_is_cut_off_at_its_first_hit(
    model: str, daemon: DaemonProcess, tmp_path: Path
) -> None:
    """Its later answers are those of an engine without a cache."""
    arguments = ARGUMENTS.get(model, ())
    with engine(model, tmp_path / "p.log", None, *arguments, environment=OTHER_WEIGHTS) as plain:
        (alone,) = plain.generate(TEXT, max_tokens=4)
    store(model, daemon, tmp_path / "a.log")
    log = tmp_path / "b.log"
    with engine(
        model, log, daemon.socket_path, *arguments, extra=EXTRA, environment=OTHER_WEIGHTS
    ) as running:
        running.generate(TEXT, max_tokens=4)
        until(lambda: stats(daemon.socket_path).get("audits_differed", 0) == 1, "it differs")
        forget(running)
        stored = stats(daemon.socket_path)["objects_stored"]
        (second,) = running.generate(TEXT, max_tokens=4)
        assert second["cached_tokens"] == 0
        assert answer(second) == answer(alone)
        assert stats(daemon.socket_path)["objects_stored"] == stored
    assert "the live audit of" in log.read_text(errors="replace")
