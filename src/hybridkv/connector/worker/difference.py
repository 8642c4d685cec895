"""How far the numbers of an object are from those that were computed again.

An object's part is cut into *pieces* of PIECE numbers that stand side by side in a block: some
numbers of one token, in most layouts. The error of a piece is the length of the difference, divided
by the length of what is stored. Two numbers say how far a layer is off:

- the *typical* error, the median of all pieces. Rounding alone keeps it small on every device.
  Other weights make it large.
- the *high* error, which a sixteenth of the pieces exceeds. It is large where one block is another
  block. A few tokens that another expert computed are far off, and do not raise it.

Rounding grows with each layer, and how much depends on the model. So the bounds of the first layer
are hardly above the last bit, which finds other weights. The bounds of later layers are just below
the errors of another prompt.

docs/decisions/0016-a-live-audit.md has the measurements behind the bounds.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from hybridkv.core.audit import AuditOutcome, AuditVerdict, worst

PIECE = 32
HIGH_QUANTILE = 15 / 16
FLOOR = 0.1
"""The least length by which an error is divided, as a share of the layer's root mean square.

The error of numbers that are nearly zero says nothing.
"""

Bytes = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.float32]


class Depth(StrEnum):
    """The work that comes before the numbers of a layer, with which rounding grows."""

    FIRST = "first"  # Keys and values of the first layer: an embedding, a norm and a product.
    FIRST_STATE = "first_state"  # A recurrent state of the first layer: all tokens before it, too.
    LATER = "later"  # The numbers depend on all layers before theirs.


@dataclass(frozen=True, slots=True)
class Bounds:
    """The largest errors that rounding makes."""

    typical: float
    high: float


BOUNDS: Mapping[str, Mapping[Depth, Bounds]] = {
    "float32": {
        Depth.FIRST: Bounds(1e-4, 0.1),
        Depth.FIRST_STATE: Bounds(1e-3, 0.1),
        Depth.LATER: Bounds(0.05, 1.1),
    },
    "float16": {
        Depth.FIRST: Bounds(0.002, 0.1),
        Depth.FIRST_STATE: Bounds(0.01, 0.1),
        Depth.LATER: Bounds(0.3, 1.1),
    },
    "bfloat16": {
        Depth.FIRST: Bounds(0.01, 0.1),
        Depth.FIRST_STATE: Bounds(0.05, 0.25),
        Depth.LATER: Bounds(0.7, 1.1),
    },
    "float8_e4m3fn": {
        Depth.FIRST: Bounds(0.1, 0.25),
        Depth.FIRST_STATE: Bounds(0.1, 0.25),
        Depth.LATER: Bounds(0.7, 1.1),
    },
}
"""By the name of the data type. Numbers of other types are not compared."""


@dataclass(frozen=True, slots=True)
class NumberRange:
    """Numbers of one type that stand side by side in each block of a layer."""

    start_bytes: int
    stop_bytes: int
    dtype: str  # A key of BOUNDS.


@dataclass(frozen=True, slots=True)
class LayerNumbers:
    """The numbers in a layer's blocks. Without `ranges` nobody knows where they are."""

    name: str
    block_bytes: int
    ranges: tuple[NumberRange, ...]
    depth: Depth = Depth.LATER


def bounds_of(
    groups: Iterable[Iterable[LayerNumbers]], is_on_cpu: bool = True
) -> Mapping[Depth, Bounds]:
    """Return the bounds of a model: those of its coarsest data type.

    A recurrent state of float32 is made of what layers of bfloat16 computed, and is no better known
    than that. Elsewhere than on a CPU, kernels may round float32 to a mantissa of 10 bits (TF32).
    """
    layers = (layer for group in groups for layer in group)
    dtypes = {numbers.dtype for layer in layers for numbers in layer.ranges}
    if not is_on_cpu or not dtypes:
        dtypes.add("float16")
    return max((BOUNDS[dtype] for dtype in dtypes), key=lambda bounds: bounds[Depth.FIRST].typical)


@dataclass(frozen=True, slots=True)
class Errors:
    """The errors of numbers, relative to those that are stored. See above for the two."""

    typical: float
    high: float


def compare(
    layers: Sequence[LayerNumbers],
    bounds: Mapping[Depth, Bounds],
    count: int,
    stored: Bytes,
    computed: Bytes,
) -> AuditVerdict:
    """Return the verdict on one part of an object of `count` stored blocks: [layer][block][bytes].

    Layers with the same bytes pass whatever their numbers are. INCONCLUSIVE where a layer has other
    bytes and its numbers are not known.
    """
    verdicts: list[AuditVerdict] = []
    at = 0
    for layer in layers:
        stop = at + count * layer.block_bytes
        verdicts.append(
            _compare_layer(layer, bounds[layer.depth], count, stored[at:stop], computed[at:stop])
        )
        at = stop
    return whole_verdict(verdicts)


def whole_verdict(verdicts: Sequence[AuditVerdict]) -> AuditVerdict:
    """Return the verdict on a whole from those on all its pieces.

    It differs where a piece does, and is INCONCLUSIVE where a piece is. Nothing at all passes.
    """
    is_known = all(verdict.outcome is not AuditOutcome.INCONCLUSIVE for verdict in verdicts)
    verdict = worst([AuditVerdict(AuditOutcome.PASSED), *verdicts])
    if is_known or verdict.outcome is AuditOutcome.DIFFERED:
        return verdict
    return AuditVerdict(AuditOutcome.INCONCLUSIVE)


def _compare_layer(
    layer: LayerNumbers, bounds: Bounds, count: int, stored: Bytes, computed: Bytes
) -> AuditVerdict:
    if np.array_equal(stored, computed):
        return AuditVerdict(AuditOutcome.PASSED)
    verdicts: list[AuditVerdict] = []
    shape = count, layer.block_bytes
    for numbers in layer.ranges:
        span = slice(numbers.start_bytes, numbers.stop_bytes)
        stored_span = np.ascontiguousarray(stored.reshape(shape)[:, span])
        computed_span = np.ascontiguousarray(computed.reshape(shape)[:, span])
        errors = errors_of(
            numbers_of(stored_span, numbers.dtype), numbers_of(computed_span, numbers.dtype)
        )
        error, error_max = errors.typical, bounds.typical
        if errors.high / bounds.high > error / error_max:
            error, error_max = errors.high, bounds.high
        outcome = AuditOutcome.PASSED if error <= error_max else AuditOutcome.DIFFERED
        verdicts.append(AuditVerdict(outcome, layer.name, error, error_max))
    return worst(verdicts)


def numbers_of(blocks: Bytes, dtype: str) -> Numbers:
    """Return the numbers of some blocks as float32: [block, number]."""
    if dtype == "float32":
        return blocks.view(np.float32)
    if dtype == "float16":
        return blocks.view(np.float16).astype(np.float32)
    if dtype == "bfloat16":
        return (blocks.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return _FLOAT8[blocks]


def errors_of(stored: Numbers, computed: Numbers) -> Errors:
    """Return the errors of the numbers of some blocks, [block, number] each.

    A NaN or an infinity that only one of the two has is infinitely far off.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        difference = computed - stored
    is_same = stored.view(np.uint32) == computed.view(np.uint32)
    difference[is_same] = 0.0
    difference[~np.isfinite(difference)] = np.inf
    lengths = _lengths(np.where(np.isfinite(stored), stored, 0.0))
    floor = FLOOR * float(np.sqrt(np.mean(np.square(lengths, dtype=np.float64))))
    with np.errstate(over="ignore"):
        off = _lengths(difference)
    base = np.maximum(lengths, max(floor, float(np.finfo(np.float32).tiny)))
    errors = off / base
    typical, high = np.quantile(errors, (0.5, HIGH_QUANTILE), method="higher")
    return Errors(float(typical), float(high))


def _lengths(numbers: Numbers) -> npt.NDArray[np.float64]:
    """Return the length of each piece. The last one of a block may have fewer numbers."""
    size = numbers.shape[1]
    if size % PIECE:
        numbers = np.pad(numbers, ((0, 0), (0, -size % PIECE)))
    pieces = numbers.reshape(-1, PIECE).astype(np.float64)
    lengths: npt.NDArray[np.float64] = np.sqrt(np.einsum("ij,ij->i", pieces, pieces))
    return lengths


def _float8() -> Numbers:
    """Return the number of each byte of float8_e4m3fn: sign, 4 bits of exponent, 3 of mantissa."""
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    normal = (8 + mantissa) * 2.0 ** (exponent - 10.0)
    numbers = np.where(exponent > 0, normal, mantissa * 2.0**-9.0)
    numbers[(codes & 127) == 127] = np.nan
    return np.where(codes & 128, -numbers, numbers).astype(np.float32)


_FLOAT8 = _float8()
