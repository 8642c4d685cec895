"""What `plan`, `replay` and `doctor` say of a tier below RAM: from when on it pays."""

import argparse
import sys
from collections import Counter

from hybridkv.cli.arguments import option
from hybridkv.core.errors import HybridKVError
from hybridkv.core.findings import Finding, failure, ok, warn
from hybridkv.core.option_parsers import number
from hybridkv.core.sizes import format_size
from hybridkv.core.tier_urls import TierSpec
from hybridkv.lab.capacity import ConfigPreview
from hybridkv.lab.tier_bench import measure_tier
from hybridkv.lab.tier_requirements import (
    ReadCost,
    break_even_prefill,
    describe_cost,
    hit_shapes,
    needed_speed,
    read_cost,
)
from hybridkv.shm.slots import slot_bytes

MEASURED_BYTES = 128 << 20  # Of objects that are written to a tier and read from it.
SAMPLE_BYTES = 4 << 20  # Of an object where no model says how large its objects are.
SAMPLE_TOKENS = 8192  # Of a hit where nothing says how long prompts are.
PREFILL = option(
    "--prefill TOKENS_PER_SECOND",
    "how fast the engine computes a prompt, to say what a tier below RAM must deliver to pay",
)
_parse_prefill = number(1, 1e9, "12000", what="tokens a second")


def prefill_of(arguments: argparse.Namespace) -> float | None:
    """Returns --prefill in tokens a second. None = it was not given. Raises ConfigError."""
    given = arguments.prefill
    return None if given is None else _parse_prefill(given, "--prefill")


def describe_need(cost: ReadCost, prefill: float | None) -> str:
    """Returns what a tier must deliver to pay, for one prefill speed or for each 1,000 tokens/s."""
    if prefill is None:
        words = needed_speed(cost, 1000.0).speed_text
        return f"{words} for each 1,000 tokens/s of prefill (--prefill names yours)"
    return f"{needed_speed(cost, prefill).speed_text} at {prefill:,.0f} tokens/s of prefill"


def tier_finding(spec: TierSpec, preview: ConfigPreview | None, prefill: float | None) -> Finding:
    """Measure a tier with the objects of a hit of a model, and say whether it pays.

    Without a model the objects have SAMPLE_BYTES, and nothing is said of prefill.
    """
    shapes, cost = Counter({(SAMPLE_BYTES, 1): MEASURED_BYTES // SAMPLE_BYTES}), ReadCost()
    if preview is not None and (geometry := preview.geometry) is not None:
        chunks = max(1, geometry.whole_chunks(preview.max_model_len or SAMPLE_TOKENS))
        cost = read_cost(geometry, chunks * geometry.chunk_tokens, 0, slot_bytes)
        share = MEASURED_BYTES / cost.bytes
        of_hit = hit_shapes(geometry, chunks)
        shapes = Counter({shape: max(1, round(count * share)) for shape, count in of_hit.items()})
    size = format_size(MEASURED_BYTES)
    print(f"{spec.shown}: some {size} are written, read and removed ...", file=sys.stderr)
    try:
        speed = measure_tier(spec, shapes)
    except HybridKVError as error:
        return failure("tier", error)
    text = (
        f"{spec.shown} reads {speed.read_bytes_per_second / 1e9:.3g} GB/s,"
        f" writes {speed.write_bytes_per_second / 1e9:.3g} GB/s,"
        f" answers in {1e3 * speed.latency_seconds:.2g} ms"
    )
    if not cost.tokens:
        return ok("tier", f"{text}, with objects of {format_size(SAMPLE_BYTES)}")
    most = break_even_prefill(cost, speed.read_bytes_per_second, speed.latency_seconds)
    text += f"; a hit of {cost.tokens:,} tokens reads {describe_cost(cost)}"
    text += f", sooner than a prefill of fewer than {most:,.0f} tokens/s"
    if prefill is not None and prefill >= most:
        what = f"{text}, and yours computes {prefill:,.0f}: such hits are computed"
        return warn("tier", what, f"one that reads {needed_speed(cost, prefill).speed_text} works")
    return ok("tier", text)
