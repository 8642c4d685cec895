"""What became of one request, in words, for `hybridkv explain`."""

import hashlib
import json
from collections.abc import Mapping

from hybridkv.core.coverage import lacking
from hybridkv.core.geometry import Geometry
from hybridkv.core.keys import HASH_BYTES
from hybridkv.core.sizes import format_size
from hybridkv.wire.messages import FACT_MAX, Found

FIRST_CHUNK = "first_chunk"
"""The fact by which the daemon finds the prefix under other identities."""


def tell(
    geometry: Geometry,
    prompt_tokens: int,
    asked: bytes,
    found: Found | None,
    local_tokens: int | None,
    loaded: tuple[int, int],
    stored: int,
    why: str,
) -> dict[str, str]:
    """Facts by name, in the order in which they happened.

    `asked` are the hashes of the lookup (empty: none was sent), `loaded` is (tokens, bytes), `stored` counts objects,
    `why` is the last decline or failure, "" where there was none.
    """
    facts = {"prompt": f"{prompt_tokens} tokens"}
    chunks = len(asked) // HASH_BYTES
    if asked:
        facts["looked up"] = f"{chunks} chunks of {geometry.chunk_tokens} tokens"
        facts[FIRST_CHUNK] = asked[:HASH_BYTES].hex()
    if found is not None:
        present = (
            f"group {group.gid} ({group.kind}) {mask.count(1)} of {len(mask)}"
            for group, mask in zip(geometry.groups, found.masks, strict=True)
        )
        facts["found"] = f"a hit of {found.chunks} chunks; objects there: {', '.join(present)}"
        if found.tiers:
            given = (f"{count} chunks from {name}" for name, count in found.tiers.items())
            facts["came up"] = ", ".join(given)
        if found.why:
            facts["not read from below RAM because"] = found.why
        lacks = lacking(geometry, found.masks, found.chunks + 1) if found.chunks < chunks else []
        if lacks:
            named = (f"group {group.gid} ({group.kind}) lacks chunk {chunk}" for group, chunk in lacks)
            facts["not more because"] = ", ".join(named)
    if local_tokens is not None:
        facts["engine's own cache"] = f"{local_tokens} tokens"
    if loaded[0]:
        facts["loaded"] = f"{loaded[0]} tokens, {format_size(loaded[1])}"
    elif why or found is not None:
        facts["nothing loaded because"] = why or "the engine's own cache reached as far, or nothing was found"
    facts["stored"] = f"{stored} objects"
    return {name: fact[:FACT_MAX] for name, fact in facts.items()}


def describe(facts: Mapping[str, object]) -> dict[str, str]:
    """An identity's facts as short texts; a long one is named by its hash."""
    texts = {name: json.dumps(fact, sort_keys=True) for name, fact in facts.items()}
    return {
        name: text if len(text) <= FACT_MAX else f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"
        for name, text in texts.items()
    }
