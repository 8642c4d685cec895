"""Real engines that draft: what a hit restores of the drafter, and whose KV it may be."""

import json
import shutil
from pathlib import Path

import pytest

from hybridkv.lab.daemon_process import DaemonProcess
from hybridkv.lab.models import bundled_models
from tests.engine.drafted import run_turns
from tests.engine.support import engine, forget, prompt, since_vllm, stats

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

CHUNK = 128
TOKENS = 24


def draft_model(directory: Path) -> str:
    """vLLM's argument for a draft model in a directory."""
    given = {"method": "draft_model", "model": str(directory), "num_speculative_tokens": 2}
    return f"--speculative-config={json.dumps(given)}"


@pytest.mark.parametrize(
    "model",
    [
        *("qwen3_draft", "llama_eagle"),
        *(
            pytest.param(model, marks=pytest.mark.soak)
            for model in ("gemma3_eagle", "llama_eagle3")
        ),
    ],
)
def test_a_hit_drafts_what_was_drafted_before_and_ends_where_the_next_token_differs(
    model: str, daemon: DaemonProcess, tmp_path: Path
) -> None:
    """The oracle of a hit is the engine's own, at full length and of the same prompt."""
    text = prompt(1, 4 * CHUNK + 40)
    divergent = [*text[: 3 * CHUNK], text[3 * CHUNK] + 1, *prompt(2, CHUNK)]
    with engine(model, tmp_path / "e.log", daemon.socket_path) as running:
        (first,) = running.generate(text, max_tokens=TOKENS)
        assert first["drafts"], "nothing was drafted, so nothing is compared"
        if model == "qwen3_draft":
            assert max(first["step_tokens"]) == 3, "a copy of the target is right"
        forget(running)
        (hit,) = running.generate(text, max_tokens=TOKENS)
        assert hit["cached_tokens"] == 4 * CHUNK
        assert stats(daemon.socket_path)["tokens_loaded"] == 4 * CHUNK
        assert hit["drafts"] == first["drafts"]
        assert hit["step_tokens"] == first["step_tokens"]
        forget(running)
        (parted,) = running.generate(divergent, max_tokens=TOKENS)
        shared = 3 if model == "qwen3_draft" else 2
        assert parted["cached_tokens"] == shared * CHUNK
        forget(running)
        (again,) = running.generate(divergent, max_tokens=TOKENS)
        assert again["cached_tokens"] == len(divergent) // CHUNK * CHUNK
        for key in ("tokens", "drafts", "step_tokens"):
            assert again[key] == parted[key], key
    assert stats(daemon.socket_path).get("loads_failed", 0) == 0


@pytest.mark.soak
def test_prompts_in_parts_are_stored_as_far_as_the_drafter_is_right(
    daemon: DaemonProcess, tmp_path: Path
) -> None:
    """The V1 runner makes the drafter's KV at a step's end from the prompt's last token."""
    text, steps = prompt(1, 4 * CHUNK + 40), "--max-num-batched-tokens=192"
    with engine("llama_eagle", tmp_path / "e.log", daemon.socket_path, steps) as running:
        hits = []
        for _ in range(3):
            (result,) = running.generate(text, max_tokens=4)
            hits.append(result["cached_tokens"])
            forget(running)
    assert hits[0] == 0
    assert hits[1] == CHUNK, "the first step ends at 192"
    assert hits[2] == 2 * CHUNK, "the step that began at 128 ends at 320"


@pytest.mark.soak
def test_another_draft_model_is_another_identity(daemon: DaemonProcess, tmp_path: Path) -> None:
    """Its configuration counts, although its weights and its path are the same."""
    directory = shutil.copytree(bundled_models()["qwen3"], tmp_path / "draft")
    text = prompt(1, 2 * CHUNK + 40)
    values = json.loads((directory / "config.json").read_text())
    hits = []
    for theta in (1e6, 5e5, 1e6):
        (directory / "config.json").write_text(json.dumps({**values, "rope_theta": theta}))
        log_path, drafter = tmp_path / "e.log", draft_model(directory)
        with engine("qwen3", log_path, daemon.socket_path, drafter) as running:
            (result,) = running.generate(text, max_tokens=4)
            hits.append(result["cached_tokens"])
    assert hits == [0, 0, 2 * CHUNK]


@pytest.mark.soak
@since_vllm(32, "recurrent states under speculation were proven on vLLM 0.32")
@pytest.mark.parametrize(
    "model", ["qwen3next_ngram", "qwen35_ngram", "qwen3next_mtp", "qwen35_mtp"]
)
def test_recurrent_states_of_drafted_tokens_are_those_of_the_engines_own_hits(
    model: str, daemon: DaemonProcess, tmp_path: Path
) -> None:
    """Prompts that end around a block's end, which is then reached by drafts right and wrong."""
    block = 256
    turns = run_turns(model, tmp_path, daemon.socket_path, block)
    assert turns.differences() == []
    assert turns.accepted_tokens() == 3, "all drafts of a step are right"
    hits = turns.hits()
    assert block in hits, "a state that drafts led to is restored"
    assert stats(daemon.socket_path)["tokens_loaded"] == sum(hits)
    assert stats(daemon.socket_path).get("loads_failed", 0) == 0
