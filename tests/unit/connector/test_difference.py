"""How far numbers are off: what rounding makes passes, and what other weights make does not."""

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from hybridkv.connector.worker.difference import (
    BOUNDS,
    PIECE,
    Depth,
    LayerNumbers,
    NumberRange,
    bounds_of,
    compare,
    errors_of,
    numbers_of,
)
from hybridkv.core.audit import AuditOutcome

pytestmark = pytest.mark.engine

BLOCKS, NUMBERS = 8, 20 * PIECE
EPSILON = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7, "float8_e4m3fn": 2.0**-3}
FLOAT32 = BOUNDS["float32"]
Bytes = npt.NDArray[np.uint8]


def random_numbers(seed: int) -> torch.Tensor:
    return torch.randn(BLOCKS, NUMBERS, generator=torch.Generator().manual_seed(seed))


def bytes_of(numbers: torch.Tensor, dtype: str) -> Bytes:
    """Return the bytes of numbers of this type, as an object has them."""
    raw = numbers.to(getattr(torch, dtype)).contiguous().view(torch.uint8)
    copied: Bytes = raw.numpy().reshape(-1).copy()
    return copied


def layer(dtype: str, name: str = "layer") -> LayerNumbers:
    size = NUMBERS * getattr(torch, dtype).itemsize
    return LayerNumbers(name, size, (NumberRange(0, size, dtype),))


@pytest.mark.parametrize("dtype", BOUNDS)
def test_numbers_are_read_as_torch_reads_them(dtype: str) -> None:
    raw = bytes_of(3 * random_numbers(1), dtype).reshape(BLOCKS, -1)
    expected = torch.from_numpy(raw).view(getattr(torch, dtype)).float().numpy()
    assert np.array_equal(numbers_of(raw, dtype), expected)


def test_every_byte_of_float8_is_read_as_torch_reads_it() -> None:
    raw = np.arange(256, dtype=np.uint8).reshape(1, -1)
    expected = torch.from_numpy(raw).view(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(numbers_of(raw, "float8_e4m3fn"), expected, equal_nan=True)


@pytest.mark.parametrize("dtype", BOUNDS)
def test_rounding_passes(dtype: str) -> None:
    """Every number is off by an epsilon of its type, this way or that."""
    numbers = random_numbers(1)
    signs = random_numbers(2).sign()
    stored = bytes_of(numbers, dtype)
    computed = bytes_of(numbers * (1 + EPSILON[dtype] * signs), dtype)
    assert not np.array_equal(stored, computed)
    verdict = compare([layer(dtype)], BOUNDS[dtype], BLOCKS, stored, computed)
    assert verdict.outcome is AuditOutcome.PASSED
    assert 0 < verdict.error < verdict.error_max


@pytest.mark.parametrize("dtype", BOUNDS)
def test_other_numbers_differ(dtype: str) -> None:
    stored, computed = (bytes_of(random_numbers(seed), dtype) for seed in (1, 2))
    verdict = compare([layer(dtype)], BOUNDS[dtype], BLOCKS, stored, computed)
    assert verdict.outcome is AuditOutcome.DIFFERED
    assert verdict.error > 1


@pytest.mark.parametrize("dtype", BOUNDS)
def test_one_other_block_of_eight_differs(dtype: str) -> None:
    """As after a scatter to a wrong block: most numbers are right."""
    numbers, others = random_numbers(1), random_numbers(2)
    computed = numbers.clone()
    computed[3] = others[3]
    verdict = compare(
        [layer(dtype)], BOUNDS[dtype], BLOCKS, bytes_of(numbers, dtype), bytes_of(computed, dtype)
    )
    assert verdict.outcome is AuditOutcome.DIFFERED


@pytest.mark.parametrize("dtype", BOUNDS)
def test_a_few_tokens_that_other_experts_computed_pass(dtype: str) -> None:
    numbers, others = random_numbers(1), random_numbers(2)
    computed = numbers.clone()
    computed[2, : 6 * PIECE] = others[2, : 6 * PIECE]  # 6 of 160 pieces.
    verdict = compare(
        [layer(dtype)], BOUNDS[dtype], BLOCKS, bytes_of(numbers, dtype), bytes_of(computed, dtype)
    )
    assert verdict.outcome is AuditOutcome.PASSED


def test_all_layers_have_the_bounds_of_the_coarsest_type() -> None:
    """A state of float32 is made of what layers of bfloat16 computed."""
    groups = [[layer("float32")], [layer("bfloat16"), LayerNumbers("unknown", 8, ())]]
    assert bounds_of(groups) == BOUNDS["bfloat16"]
    assert bounds_of(groups[:1]) == FLOAT32
    assert bounds_of(groups[:1], is_on_cpu=False) == BOUNDS["float16"]
    assert bounds_of([]) == BOUNDS["float16"]


@pytest.mark.parametrize(
    ("depth", "outcome"),
    [
        (Depth.FIRST, AuditOutcome.DIFFERED),
        (Depth.FIRST_STATE, AuditOutcome.PASSED),
        (Depth.LATER, AuditOutcome.PASSED),
    ],
)
def test_the_first_layer_is_held_to_little_more_than_the_last_bit(
    depth: Depth, outcome: AuditOutcome
) -> None:
    """Norms that are off by 3 %."""
    numbers, held = random_numbers(1), dataclasses.replace(layer("bfloat16"), depth=depth)
    stored, computed = bytes_of(numbers, "bfloat16"), bytes_of(numbers * 1.03, "bfloat16")
    verdict = compare([held], BOUNDS["bfloat16"], BLOCKS, stored, computed)
    assert verdict.outcome is outcome


def test_the_layer_that_is_farthest_off_is_named() -> None:
    layers = [layer("float32", name) for name in "abc"]
    numbers = [random_numbers(seed) for seed in range(3)]
    computed = [numbers[0], numbers[1] * 1.5, numbers[2] * 1.01]
    stored_part, computed_part = (
        np.concatenate([bytes_of(layer_numbers, "float32") for layer_numbers in part])
        for part in (numbers, computed)
    )
    verdict = compare(layers, FLOAT32, BLOCKS, stored_part, computed_part)
    assert (verdict.outcome, verdict.layer) == (AuditOutcome.DIFFERED, "b")
    assert verdict.error == pytest.approx(0.5, rel=1e-3)


def test_numbers_of_two_types_in_one_block_are_each_read_as_their_own() -> None:
    """A recurrent layer's states: one after the other, and padding after both."""
    first, second = random_numbers(1), random_numbers(2)
    sizes = 2 * NUMBERS, 4 * NUMBERS
    ranges = (NumberRange(0, sizes[0], "bfloat16"), NumberRange(sizes[0], sum(sizes), "float32"))
    mixed = LayerNumbers("mixed", sum(sizes) + 16, ranges)

    def part(bfloats: torch.Tensor, floats: torch.Tensor, padding: int) -> Bytes:
        columns = [bytes_of(bfloats, "bfloat16"), bytes_of(floats, "float32")]
        blocks = [column.reshape(BLOCKS, -1) for column in columns]
        rest = np.full((BLOCKS, 16), padding, np.uint8)
        return np.concatenate([*blocks, rest], axis=1).reshape(-1)

    stored = part(first, second, 0)
    near = compare([mixed], BOUNDS["bfloat16"], BLOCKS, stored, part(first * 1.01, second, 255))
    assert near.outcome is AuditOutcome.PASSED
    far = compare([mixed], BOUNDS["bfloat16"], BLOCKS, stored, part(first, second * 3, 0))
    assert far.outcome is AuditOutcome.DIFFERED


def test_bytes_that_are_no_known_numbers_are_compared_as_bytes_alone() -> None:
    unknown = LayerNumbers("unknown", 64, ())
    bits = np.zeros(64, np.uint8)
    assert compare([unknown], FLOAT32, 1, bits, bits.copy()).outcome is AuditOutcome.PASSED
    assert compare([unknown], FLOAT32, 1, bits, bits + 1).outcome is AuditOutcome.INCONCLUSIVE


def test_bytes_that_are_no_known_numbers_say_nothing_of_the_other_layers() -> None:
    """A layer that passes does not speak for one that could not be compared."""
    unknown = LayerNumbers("unknown", 64, ())
    bits, part = np.zeros(64, np.uint8), bytes_of(random_numbers(1), "float32")
    stored, computed = np.append(part, bits), np.append(part, bits + 1)
    assert (
        compare([layer("float32")], FLOAT32, BLOCKS, part, part.copy()).outcome
        is AuditOutcome.PASSED
    )
    padded = LayerNumbers("padded", 64 // BLOCKS, ())
    verdict = compare([layer("float32"), padded], FLOAT32, BLOCKS, stored, computed)
    assert verdict.outcome is AuditOutcome.INCONCLUSIVE
    assert compare([unknown], FLOAT32, 1, bits, bits + 1).outcome is AuditOutcome.INCONCLUSIVE


def test_other_layers_that_differ_are_told_next_to_one_that_is_not_known() -> None:
    unknown = LayerNumbers("unknown", 64 // BLOCKS, ())
    bits, parts = np.zeros(64, np.uint8), [bytes_of(random_numbers(s), "float32") for s in (1, 2)]
    stored, computed = np.append(parts[0], bits), np.append(parts[1], bits + 1)
    verdict = compare([layer("float32"), unknown], FLOAT32, BLOCKS, stored, computed)
    assert (verdict.outcome, verdict.layer) == (AuditOutcome.DIFFERED, "layer")


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_no_number_is_far_off_where_the_other_is_one(value: float) -> None:
    stored: Any = np.ones((1, 2 * PIECE), np.float32)
    computed = stored.copy()
    computed[0, ::2] = value
    assert errors_of(stored, computed).typical == np.inf
    assert errors_of(computed, stored).typical == np.inf
    assert errors_of(computed, computed.copy()).high == 0


def test_zeros_do_not_divide() -> None:
    zeros = np.zeros((1, 2 * PIECE), np.float32)
    assert errors_of(zeros, zeros.copy()).high == 0
    assert errors_of(zeros, zeros + 1).typical > 1e6


def test_next_to_nothing_is_not_far_off() -> None:
    """Half of the pieces are a thousandth of the others, and off by as much as they are."""
    stored = np.ones((4, 2 * PIECE), np.float32)
    stored[:, PIECE:] = 1e-3
    computed = stored.copy()
    computed[:, PIECE:] = -1e-3
    assert errors_of(stored, computed).high < 0.05
