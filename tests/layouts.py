"""Group layouts of real models, as vLLM resolves them, with small blocks."""

import dataclasses

from hybridkv.core.geometry import Geometry, Group, GroupKind, derive_chunk_tokens

K = GroupKind


def make(
    alignment: int,
    hashing: int,
    *groups: tuple[GroupKind, int, int],
    chunk: int | None = None,
    ranks: int = 1,
    replicated: tuple[int, ...] = (),
) -> Geometry:
    """Returns a geometry of groups (kind, tokens per block, window).

    A layer of attention has 96 or 32 bytes a token, and a state 512 or 64 bytes.
    """
    all_groups = tuple(
        Group(
            gid,
            kind,
            block,
            (3 * block, block) if kind is not K.RECURRENT else (512, 64),
            window,
            replicated=gid in replicated,
        )
        for gid, (kind, block, window) in enumerate(groups)
    )
    return Geometry(
        all_groups,
        chunk or derive_chunk_tokens(all_groups, alignment, hashing),
        alignment,
        hashing,
        ranks,
    )


def wide(geometry: Geometry, *factors: int) -> Geometry:
    """The geometry with each group's blocks larger, so that slots take one to several pages."""
    groups = tuple(
        dataclasses.replace(group, layer_bytes=tuple(size * factor for size in group.layer_bytes))
        for group, factor in zip(geometry.groups, factors, strict=True)
    )
    return dataclasses.replace(geometry, groups=groups)


LAYOUTS = {
    "qwen3": make(128, 128, (K.FULL, 128, 0)),
    "mistral_swa": make(128, 128, (K.SLIDING, 128, 512)),
    "gemma3": make(128, 128, (K.SLIDING, 128, 256), (K.SLIDING, 128, 256), (K.FULL, 128, 0)),
    "gemma4": make(256, 128, (K.SLIDING, 256, 512), (K.FULL, 128, 0)),
    "llama4": make(128, 128, (K.CHUNKED_LOCAL, 128, 512), (K.FULL, 128, 0)),
    "qwen3next": make(256, 256, (K.RECURRENT, 256, 0), (K.RECURRENT, 256, 0), (K.FULL, 256, 0)),
    "falconh1": make(640, 640, (K.FULL, 640, 0), (K.RECURRENT, 640, 0)),
    "deepseekv4": make(
        256,
        4,
        (K.SLIDING, 64, 128),
        (K.SLIDING, 64, 128),
        (K.FULL, 256, 0),
        (K.SLIDING, 4, 128),
        (K.SLIDING, 8, 128),
    ),
    "gpu_blocks": make(16, 16, (K.SLIDING, 16, 100), (K.FULL, 16, 0)),
    "odd_window": make(
        32, 16, (K.SLIDING, 32, 33), (K.CHUNKED_LOCAL, 16, 80), (K.FULL, 16, 0), chunk=96
    ),
    "two_ranks": make(128, 128, (K.FULL, 128, 0), (K.SLIDING, 128, 256), ranks=2),
    "two_ranks_mla": make(
        128, 128, (K.FULL, 128, 0), (K.SLIDING, 128, 256), ranks=2, replicated=(0,)
    ),
}
