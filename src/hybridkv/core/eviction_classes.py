"""Which objects of a prompt a hit is expected to need, and which seldom serve one.

A hit that ends at a boundary reads the windows before it, and no others. So a window inside a
prompt serves the few hits that end there. Hits are expected at the prompt's end, one chunk before
it (a chat template may change the end of a prompt in the next turn), and where prompts part
(core.junctions). Every SPACING_TOKENS are the windows for prompts that part where none did before::

    prompt  0         2,048      junction  4,096               end
    full    [PPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPPP]   P = prompt
    window  [uuuuuuiiiiuuuuuuPPPPuuuuuuiiiiuuuuuuuuuuuuuuuPPPPPP]   i = interior
    state   [                    i                             P]   u = unlikely

RAM evicts interior and unlikely objects first. Tiers below RAM are not given unlikely ones before a
hit has read them. So where prompts part anew, a hit of what tiers alone have may be shorter, by
fewer than SPACING_TOKENS. docs/decisions/0021 has the figures.
"""

from collections.abc import Iterable

from hybridkv.core.coverage import needed_chunks
from hybridkv.core.geometry import Geometry, Group
from hybridkv.core.junctions import has_junctions
from hybridkv.core.policies import EvictionClass

SPACING_TOKENS = 2048


def eviction_classes(
    geometry: Geometry,
    group: Group,
    chunks: range,
    prompt_chunks: int,
    junctions: Iterable[int] = (),
) -> bytes:
    """Returns the EvictionClass of the objects of `chunks`, a byte each.

    The prompt has `prompt_chunks` whole chunks, and parts from others after `junctions` chunks.
    What comes after the prompt is generated. Of chunks 0 to 31, 30 of which are a prompt that parts
    after 6, with windows of 4 chunks and 16 chunks in SPACING_TOKENS::

        uuPPPPuuuuuuiiiiuuuuuuuuuPPPPPgg

    Without a group of full attention nothing tells where prompts part, and no window is unlikely.
    """
    first, count = chunks.start, len(chunks)
    prompt_count = min(count, max(0, prompt_chunks - first))
    marks = [(prompt_chunks - 1, EvictionClass.PROMPT), (prompt_chunks, EvictionClass.PROMPT)]
    inside = EvictionClass.INTERIOR
    if group.window_tokens and has_junctions(geometry):
        inside = EvictionClass.UNLIKELY
        spacing = max(1, SPACING_TOKENS // geometry.chunk_tokens)
        # Windows of boundaries farther on do not reach back to these chunks.
        beyond = chunks.stop + group.window_tokens // geometry.chunk_tokens + 2
        spaced = range(first // spacing * spacing + spacing, min(prompt_chunks, beyond), spacing)
        marks = [
            *((boundary, EvictionClass.INTERIOR) for boundary in spaced),
            *((boundary, EvictionClass.PROMPT) for boundary in junctions),
            *marks,
        ]
    classes = bytearray([inside]) * prompt_count
    for boundary, eviction_class in marks:
        needed = needed_chunks(geometry, group, min(max(0, boundary), prompt_chunks))
        start = max(0, needed.start - first)
        stop = max(start, min(prompt_count, needed.stop - first))
        classes[start:stop] = bytes([eviction_class]) * (stop - start)
    return bytes(classes) + bytes([EvictionClass.GENERATED]) * (count - prompt_count)
