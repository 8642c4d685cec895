"""`hybridkv verify`: its prompts are long and unlike enough, and the engine is no larger."""

from dataclasses import replace
from pathlib import Path

import pytest

from hybridkv.lab.judging import ReferenceAnswers, Variety, variety_of
from hybridkv.lab.prompts import (
    ModelFiles,
    cut_prompts,
    engine_bounds,
    english,
    names_option,
    read_model_files,
    wanted_chunks,
)
from tests.layouts import LAYOUTS
from tests.unit.core.test_capacity import preview


def test_a_prompt_is_longer_than_two_windows() -> None:
    assert wanted_chunks(128, []) == wanted_chunks(128, [0, 256]) == 5
    assert wanted_chunks(128, [512]) * 128 == 1280
    assert wanted_chunks(256, [0, 4096]) * 256 == 10240


def test_prompts_of_a_text_begin_with_different_words() -> None:
    text = english(4000).split()
    prompts = cut_prompts(range(len(text)), 12, 300)
    assert {len(prompt) for prompt in prompts} == {300}
    assert len({tuple(prompt[:20]) for prompt in prompts}) == 12
    assert cut_prompts(range(10), 3, 4) == [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9]]
    assert cut_prompts(range(3), 2, 5) == [[0, 1, 2, 0, 1], [1, 2, 0, 1, 2]]


def test_the_users_own_bounds_win() -> None:
    bounds = engine_bounds(preview(LAYOUTS["gemma4"], 32768), 1000, 10)
    length, memory = bounds.arguments([], {})
    assert length == "--max-model-len=1000"
    assert memory.startswith("--kv-cache-memory-bytes=")
    assert bounds.arguments(["--max_model_len", "99"], {}) == [memory]
    for given in ("--kv_cache_memory_bytes=9", "--gpu-memory-utilization"):
        assert bounds.arguments([given], {}) == [length]
    assert bounds.arguments([], {"VLLM_CPU_KVCACHE_SPACE": "2"}) == [length]
    assert not names_option(["--max-model-length=1"], "--max-model-len")


def test_on_a_processor_without_short_arithmetic_an_engine_computes_in_float32() -> None:
    """With twice the memory, unless a layer is recurrent or the KV has another dtype anyway."""
    short = replace(preview(LAYOUTS["gemma4"], 1 << 24), kv_dtype="auto (bfloat16)")
    narrow = engine_bounds(short, 1 << 24, 1000, on_cpu=True, weights_bytes=100)
    wide = engine_bounds(short, 1 << 24, 1000, on_cpu=True, widen=True, weights_bytes=100)
    assert "--dtype=float32" in wide.arguments([], {})
    assert "--dtype=float32" not in narrow.arguments([], {})
    assert wide.kv_bytes == 2 * narrow.kv_bytes
    assert wide.ram_bytes == 2 * narrow.ram_bytes
    assert (narrow.weights_bytes, wide.weights_bytes) == (100, 200)
    for model in (
        replace(short, kv_dtype="auto (float32)"),
        replace(short, kv_dtype="fp8"),
        replace(preview(LAYOUTS["qwen3next"], 1024), kv_dtype="auto (bfloat16)"),
    ):
        assert not engine_bounds(model, 1024, 10, on_cpu=True, widen=True).is_single


def test_an_engine_on_a_cpu_does_not_compile_unless_the_user_says_how() -> None:
    model = preview(LAYOUTS["gemma4"], 1024)
    bounds = engine_bounds(model, 1024, 10, on_cpu=True)
    assert "--enforce-eager" in bounds.arguments([], {})
    for given in ("--no-enforce-eager", "--compilation_config={}", "-O3", "-O", "-cc.mode=3"):
        assert "--enforce-eager" not in bounds.arguments([given], {}), given
    assert "--enforce-eager" not in engine_bounds(model, 1024, 10).arguments([], {})


def test_the_daemon_holds_all_prompts_of_a_proof() -> None:
    """With a window of 4,096 tokens they are many times larger than those of a small model."""
    model = preview(LAYOUTS["gemma4"], 1 << 24)
    assert engine_bounds(model, 1024, 10).ram_bytes == 1 << 30
    few, many = (engine_bounds(model, 1 << 24, count).ram_bytes for count in (100, 1000))
    assert few > 1 << 30
    assert 9 < many / few < 11


def test_a_directory_says_how_large_its_weights_are(tmp_path: Path) -> None:
    assert read_model_files(tmp_path) == ModelFiles(0, is_quantized=True)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model-1.safetensors").write_bytes(bytes(5))
    (tmp_path / "model-2.safetensors").write_bytes(bytes(6))
    assert read_model_files(tmp_path) == ModelFiles(11, is_quantized=False)
    (tmp_path / "config.json").write_text('{"quantization_config": {}}')
    assert read_model_files(tmp_path).is_quantized


def test_a_model_with_a_short_context_gets_no_longer_one() -> None:
    assert engine_bounds(preview(LAYOUTS["gemma4"], 512), 1000, 10).max_model_len == 512


def test_memory_grows_with_what_must_be_kept_at_once() -> None:
    model = preview(LAYOUTS["gemma4"], 1 << 22)
    few, many = (engine_bounds(model, 1 << 22, count).kv_bytes for count in (4, 40))
    assert 9 < many / few < 11


@pytest.mark.parametrize(
    ("answers", "warning"),
    [
        ([[1, 2, 3, 4, 5]] * 4, "only 1 of 4 prompts"),
        ([[1, 2, 1, 2], [3], [4], [5]], "repeats 2 tokens"),
        ([[1, 2, 3, 4], [3], [4], [5]], ""),
    ],
)
def test_answers_that_prove_little_are_a_warning(answers: list[list[int]], warning: str) -> None:
    first, split, *alone = ({"tokens": tokens} for tokens in answers)
    reference = ReferenceAnswers(
        computed=first, local_hit={}, split_hit=split, alone=alone, noise=0.0, repeated=()
    )
    variety = variety_of(reference)
    assert warning in variety.warning
    assert bool(warning) == bool(variety.warning)
    assert variety == Variety(4, len({tuple(tokens) for tokens in answers}), len({*answers[0]}))
