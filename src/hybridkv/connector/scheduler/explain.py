"""What became of one request, and what an identity is made of, for `hybridkv explain`."""

import hashlib
import json
from collections.abc import Mapping

from hybridkv.core.coverage import lacking
from hybridkv.core.geometry import Geometry
from hybridkv.core.keys import HASH_BYTES
from hybridkv.wire.messages import FACT_MAX, Decline, Found, GroupPresence, RequestExplanation


def explain_request(
    geometry: Geometry,
    prompt_tokens: int,
    asked: bytes,
    found: Found | None,
    local_tokens: int | None,
    loaded: tuple[int, int],
    stored: int,
    why: tuple[str, str],
) -> RequestExplanation:
    """The explanation of a request that ended.

    `asked` are the hashes of the lookup (empty: none was sent), `loaded` is (tokens, bytes),
    `stored` counts objects. `why` is the counter of the last decline or failure, "" where there was
    none, and a detail for people.
    """
    declined, detail = why
    return RequestExplanation(
        prompt_tokens,
        stored,
        geometry.chunk_tokens,
        len(asked) // HASH_BYTES,
        asked[:HASH_BYTES],
        None if found is None else found.chunks,
        len(found.masks[0]) if found is not None and found.masks else 0,
        [] if found is None else _presence(geometry, found, len(asked) // HASH_BYTES),
        {} if found is None else found.tiers,
        "" if found is None else found.why,
        local_tokens,
        *loaded,
        Decline(declined) if declined else None,
        detail[:FACT_MAX],
    )


def describe_identity(facts: Mapping[str, object]) -> dict[str, str]:
    """An identity's facts as short JSON texts; a long one is replaced by its hash."""
    texts = {name: json.dumps(fact, sort_keys=True) for name, fact in facts.items()}
    return {
        name: text
        if len(text) <= FACT_MAX
        else f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"
        for name, text in texts.items()
    }


def _presence(geometry: Geometry, found: Found, chunks: int) -> list[GroupPresence]:
    lacks: dict[int, int] = {}
    if found.chunks < chunks:
        missing = lacking(geometry, found.masks, found.chunks + 1)
        lacks = {group.gid: chunk for group, chunk in missing}
    return [
        GroupPresence(group.gid, group.kind, mask.count(1), lacks.get(group.gid))
        for group, mask in zip(geometry.groups, found.masks, strict=True)
    ]
