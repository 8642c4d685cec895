"""Which windows inside prompts tiers are given: `python -m benchmarks.windows TRACE...`.

Replays traces over a tier without bound, alone (`tier`: RAM has lost everything before each prompt,
as after a restart or on another node), over RAM of a part of all objects (`1/4`), or over a tier
that forgets what was used least recently (`lru`, as a Valkey of that part). Prints the tokens hit,
those lost against a tier that is given all windows, and the bytes written.
"""

import argparse
import sys
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from hybridkv.core import eviction_classes
from hybridkv.core.coverage import needed_chunks
from hybridkv.core.geometry import Geometry, Group, GroupKind
from hybridkv.core.policies import EvictionClass
from hybridkv.core.state_boundaries import StateRule
from hybridkv.lab.replay import (
    ReplayHits,
    ReplayModel,
    ReplayObject,
    TracePrompt,
    TraceReplay,
    read_trace,
)

BLOCK_TOKENS = {"mooncake-conversation": 512}  # Of a trace; of others 16.
NEVER = 1 << 30  # A spacing that no prompt reaches.


class Layers(NamedTuple):
    """The KV bytes of a token in a model's layers of full attention, and in those of windows."""

    full_bytes: int
    window_bytes: int
    window_tokens: int
    kind: GroupKind = GroupKind.SLIDING

    def model(self, block_tokens: int) -> ReplayModel:
        groups = (
            Group(0, GroupKind.FULL, 16, (16 * self.full_bytes,)),
            Group(1, self.kind, 16, (16 * self.window_bytes,), self.window_tokens),
        )
        return ReplayModel(Geometry(groups, 128, 16, 16), StateRule(), block_tokens)


MODELS = {
    "gemma3-1b": Layers(4 * 1024, 22 * 1024, 512),
    "gemma3-27b": Layers(10 * 8192, 52 * 8192, 1024),
    "gpt-oss-20b": Layers(12 * 2048, 12 * 2048, 128),
    "gemma2-9b": Layers(21 * 8192, 21 * 8192, 4096),
    "llama4-scout": Layers(12 * 4096, 36 * 4096, 8192, GroupKind.CHUNKED_LOCAL),
}


class Rule(NamedTuple):
    """Which windows are written."""

    name: str
    spacing_tokens: int = eviction_classes.SPACING_TOKENS
    with_junctions: bool = True


ALL = Rule("all", 1, with_junctions=False)
RULES = (
    ALL,
    Rule("ends", NEVER, with_junctions=False),
    Rule("ends, junctions", NEVER),
    Rule("ends, every 2,048", with_junctions=False),
    Rule("ends, junctions, every 4,096", 4096),
    Rule("ends, junctions, every 2,048"),
    Rule("ends, junctions, every 1,024", 1024),
)


class TieredReplay(TraceReplay):
    """The cache of a node with a tier below RAM."""

    def __init__(
        self, model: ReplayModel, rule: Rule, ram_bytes: int = 0, tier_bytes: int | None = None
    ) -> None:
        """`ram_bytes` 0: the tier alone answers. `tier_bytes` None: it has no bound."""
        super().__init__(model, ram_bytes or 1 << 20)
        self._rule, self._has_ram, self._tier_bytes = rule, bool(ram_bytes), tier_bytes
        self.tier: OrderedDict[tuple[int, bytes], int] = OrderedDict()
        """The bytes of what the tier has, by group and name, what was used last at the end."""
        self._held_bytes = 0
        self.written_bytes = 0

    def store_object(self, stored: ReplayObject, eviction_class: EvictionClass) -> None:
        """Write the object to the tier where the rule says so, and store it in RAM."""
        if eviction_class is not EvictionClass.UNLIKELY:
            self._write(stored)
        if self._has_ram:
            super().store_object(stored, eviction_class)

    def _write(self, stored: ReplayObject) -> None:
        key = stored.group_index, stored.chunk_hash
        if key in self.tier:
            return
        self.tier[key] = stored.size_bytes
        self.written_bytes += stored.size_bytes
        self._held_bytes += stored.size_bytes
        while self._tier_bytes is not None and self._held_bytes > self._tier_bytes:
            self._held_bytes -= self.tier.popitem(last=False)[1]

    def serve(self, prompt: TracePrompt) -> ReplayHits:
        """Look the prompt up in RAM and in the tier, then store it. Returns its hit."""
        model, geometry = self._model, self._model.geometry
        hashes = model.hashes(prompt)
        objects = model.stored_objects(prompt, len(hashes))
        find = self._namespace.find_slot
        masks = [
            bytes(bool(find(name, index)) or (index, name) in self.tier for name in hashes)
            for index in range(len(geometry.groups))
        ]
        chunks = model.chunks_hit(prompt, masks)
        for index, group in enumerate(geometry.groups):
            for chunk in reversed(needed_chunks(geometry, group, chunks)):
                before = hashes[chunk - 1] if chunk else b""
                read = ReplayObject(index, hashes[chunk], before, objects[index].get(chunk, 0))
                if read.size_bytes:
                    self._read(read)
        junctions = self._branches.junctions(
            geometry, masks, b"".join(hashes), chunks, self._namespace.goes_on
        )
        junctions = junctions if self._rule.with_junctions else []
        self._store_prompt(prompt, hashes, masks, objects, junctions)
        return model.hit(prompt, masks)

    def _read(self, read: ReplayObject) -> None:
        """A hit reads the object, which comes into RAM, and is written if it was not before."""
        if (read.group_index, read.chunk_hash) in self.tier:
            self.tier.move_to_end((read.group_index, read.chunk_hash))
        self._write(read)
        if self._has_ram:
            slot = self._namespace.find_slot(read.chunk_hash, read.group_index)
            if slot is None:
                super().store_object(read, EvictionClass.PROMPT)
                slot = self._namespace.find_slot(read.chunk_hash, read.group_index)
            if slot is not None:
                self.store.pin((slot,))
                self.store.unpin((slot,))


class Outcome(NamedTuple):
    """The hits of a trace, and what was written for them."""

    hits: ReplayHits
    written_bytes: int


def outcome(
    model: ReplayModel,
    prompts: Sequence[TracePrompt],
    rule: Rule,
    ram_bytes: int = 0,
    tier_bytes: int | None = None,
) -> Outcome:
    """Returns what a trace hits by a rule."""
    # The rule of `hybridkv` has no setting. This is a process of its own.
    eviction_classes.SPACING_TOKENS = rule.spacing_tokens
    cache = TieredReplay(model, rule, ram_bytes, tier_bytes)
    with cache:
        hits = sum(map(cache.serve, prompts), ReplayHits())
        return Outcome(hits, cache.written_bytes)


def print_rules(trace: Path, name: str, settings: Sequence[str]) -> None:
    """Prints a table for one trace and model."""
    block_tokens = BLOCK_TOKENS.get(trace.stem, 16)
    model = MODELS[name].model(block_tokens)
    prompts = read_trace(trace, block_tokens)
    everything = outcome(model, prompts, ALL)
    print(f"{trace.stem}, {name}: {everything.written_bytes / 2**30:.1f} GiB", flush=True)
    for setting in settings:
        label, _, share = setting.rpartition(" ")
        part = everything.written_bytes // int(share.removeprefix("1/")) if share != "tier" else 0
        of_all = everything
        for rule in RULES:
            ram_bytes, tier_bytes = (0, part) if label == "lru" else (part, None)
            of_rule = outcome(model, prompts, rule, ram_bytes, tier_bytes)
            of_all = of_rule if rule is ALL else of_all
            lost = 1 - of_rule.hits.tokens_hit / of_all.hits.tokens_hit
            spared = 1 - of_rule.written_bytes / of_all.written_bytes
            print(
                f"  {setting:8} {rule.name:30} hit {of_rule.hits.rate:6.2%}, lost {lost:6.2%}, "
                f"written {of_rule.written_bytes / 2**30:7.1f} GiB, spared {spared:5.1%}",
                flush=True,
            )


def main() -> int:
    """Print the tables of all traces, models and settings that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("traces", type=Path, nargs="+")
    parser.add_argument("--models", nargs="+", default=["gemma3-1b"], choices=MODELS)
    parser.add_argument("--settings", nargs="+", default=["tier", "1/4", "lru 1/4"])
    arguments = parser.parse_args()
    for trace in arguments.traces:
        for name in arguments.models:
            print_rules(trace, name, arguments.settings)
    return 0


if __name__ == "__main__":
    sys.exit(main())
