"""Engines of other tensor parallel sizes load what each other stored, with `share_tp`.

Tokens of an engine that loads are those of an engine of the same size that computed, and of the
other size. Log-probabilities are close: another size adds up in another order. That the loaded
bytes are those that were stored is checked by "paranoid", which compares blocks with slots.
"""

import json
import shutil
from itertools import islice, takewhile
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hybridkv.cli.main import main
from hybridkv.lab.daemon_process import DaemonProcess
from hybridkv.lab.engine_process import EngineProcess
from hybridkv.lab.models import BFLOAT16_MODELS, bundled_models
from tests.engine.support import engine, is_served, prompt, since_vllm, stats
from tests.waiting import until

pytestmark = [
    pytest.mark.engine,
    pytest.mark.soak,
    pytest.mark.timeout(1200),
    since_vllm(32, "share_tp is refused"),
]

CHUNK, CHUNKS, TOKENS = 128, 3, 12
WIDTHS, EMBEDDING_WIDTH = {"float32": 0.1, "bfloat16": 0.05}, 0.005
"""Standard deviations of the weights. With them greedy tokens vary, also where the embedding is the
last layer too, and roundings to bfloat16 do not grow to another answer."""


class Closeness(NamedTuple):
    """What the answer of an engine must have in common with that of another size."""

    tokens: int
    """The first tokens that must be equal. In bfloat16 a rounding may choose another expert, and
    sizes differ from the first token on, with a connector or without."""
    logprob: float
    """The most that the log-probability of a token may differ while tokens are equal."""


CLOSE = {"float32": Closeness(TOKENS, 1e-4), "bfloat16": Closeness(0, 0.5)}
"""By the data type."""


def dtype_of(model: str) -> str:
    """Return the data type in which a bundled model is served."""
    return "bfloat16" if model in BFLOAT16_MODELS else "float32"


def save_checkpoint(model: str, directory: Path) -> None:
    """Save random weights of a bundled model, which every tensor parallel size reads the same."""
    torch.manual_seed(20261127)
    width = WIDTHS[dtype_of(model)]
    config = AutoConfig.from_pretrained(bundled_models()[model])
    random_model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in random_model.parameters():
            if parameter.dim() > 1:
                is_embedding = parameter is random_model.get_input_embeddings().weight
                parameter.normal_(0.0, EMBEDDING_WIDTH if is_embedding else width)
    random_model.save_pretrained(directory)
    shutil.copy(bundled_models()[model] / "config.json", directory / "config.json")


def started(
    model: str,
    ranks: int,
    directory: Path,
    server: str,
    *,
    audit: str = "off",
    share_tp: int | None = 2,
) -> EngineProcess:
    """Return an engine of `ranks` tensor parallel ranks on the checkpoint in `directory`."""
    extra: dict[str, object] = {
        "weights_identity": "tiny",
        "checksum": "paranoid",
        "load_policy": "always",
        "audit": audit,
    }
    if share_tp is not None:
        extra["share_tp"] = share_tp
    log = directory / f"{ranks}-{audit}.log"
    options = f"--model={directory}", "--load-format=auto", f"--tensor-parallel-size={ranks}"
    return engine(model, log, server, *options, extra=extra)


def equal_tokens(first: dict[str, Any], second: dict[str, Any]) -> int:
    """Return how many tokens of two answers are equal before the first that differs."""
    pairs = zip(first["tokens"], second["tokens"], strict=True)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def distance(first: dict[str, Any], second: dict[str, Any]) -> float:
    """Return the largest difference of log-probabilities while the tokens before are equal."""
    steps = zip(map(dict, first["logprobs"]), map(dict, second["logprobs"]), strict=True)
    largest: float = max(
        abs(ours[token] - theirs[token])
        for ours, theirs in islice(steps, equal_tokens(first, second) + 1)
        for token in ours.keys() & theirs.keys()
    )
    return largest


@pytest.mark.parametrize("model", ["qwen3", "gemma3", "deepseekv2"])
def test_each_size_loads_what_the_other_one_stored(
    model: str, daemon: DaemonProcess, tmp_path: Path
) -> None:
    """Of a prompt that one size stored, the other one computes only the end."""
    if not is_served(model):
        pytest.skip("vLLM turns prefix caching off for MLA here")
    save_checkpoint(model, tmp_path)
    prompts = {ranks: prompt(ranks, CHUNKS * CHUNK + 40) for ranks in (1, 2)}
    for storing, loading in ((1, 2), (2, 1)):
        with started(model, storing, tmp_path, daemon.socket_path) as running:
            (stored,) = running.generate(prompts[storing], max_tokens=TOKENS)
            assert stored["cached_tokens"] == 0
        tokens_before = stats(daemon.socket_path).get("tokens_loaded", 0)
        with started(model, loading, tmp_path, daemon.socket_path) as running:
            (loaded,) = running.generate(prompts[storing], max_tokens=TOKENS)
        assert loaded["cached_tokens"] == CHUNKS * CHUNK
        values = stats(daemon.socket_path)
        assert values["tokens_loaded"] - tokens_before == CHUNKS * CHUNK
        assert values.get("loads_failed", 0) == 0
        assert len(set(loaded["tokens"])) > 3, "the answer says something"
        close = CLOSE[dtype_of(model)]
        assert stored["tokens"][0] in dict(loaded["logprobs"][0]), "it is among the likeliest"
        assert equal_tokens(loaded, stored) >= close.tokens
        assert distance(loaded, stored) <= close.logprob


@pytest.mark.parametrize("model", ["qwen3", "gemma3", "deepseekv2"])
@pytest.mark.parametrize(("storing", "loading"), [(1, 2), (2, 1)])
def test_the_live_audit_passes_what_another_size_computed(
    model: str, storing: int, loading: int, daemon: DaemonProcess, tmp_path: Path
) -> None:
    """It would cut the engine off, and the first hit of every start is audited by default."""
    if not is_served(model):
        pytest.skip("vLLM turns prefix caching off for MLA here")
    save_checkpoint(model, tmp_path)
    text = prompt(5, CHUNKS * CHUNK + 40)
    with started(model, storing, tmp_path, daemon.socket_path) as running:
        running.generate(text, max_tokens=2)
    with started(model, loading, tmp_path, daemon.socket_path, audit="on") as running:
        (result,) = running.generate(text, max_tokens=2)
        assert result["cached_tokens"] == (CHUNKS - 1) * CHUNK, "the last chunk is audited"

        def is_audited() -> bool:
            # The verdict comes with a step's report, and without a request there is no step.
            running.generate(prompt(6, 20), max_tokens=2)
            values = stats(daemon.socket_path)
            assert values.get("audits_differed", 0) == 0
            return values.get("audits_passed", 0) == 1

        until(is_audited, "the audit passes")
        running.reset_caches()
        (result,) = running.generate(text, max_tokens=2)
        assert result["cached_tokens"] == CHUNKS * CHUNK
    assert stats(daemon.socket_path).get("audits_differed", 0) == 0


def test_explain_names_the_size_where_engines_do_not_share(
    daemon: DaemonProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_checkpoint("qwen3", tmp_path)
    text = prompt(7, CHUNKS * CHUNK + 40)
    for ranks in (1, 2):
        with started("qwen3", ranks, tmp_path, daemon.socket_path, share_tp=None) as running:
            (result,) = running.generate(text, max_tokens=1)
            assert result["cached_tokens"] == 0
    assert main(["explain", "verify-1", "--socket", daemon.socket_path, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    (difference,) = [value for name, value in facts.items() if name.startswith("also_under")]
    assert "parallel_config.tensor_parallel_size: 2 here, 1 there" in difference
