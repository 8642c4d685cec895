"""Our hits next to those of vLLM's own cache managers, over the same drawn set of stored objects.

vLLM's block pool gets exactly the blocks of the objects. Its block hashes do not depend on the
token after a block. So with a drafter, each of its hits needs one block more after its end in each
group of the drafter (`disable_eagle_block_drop` off). Ours need none.
"""

import dataclasses
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import pytest
from vllm import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_coordinator import HybridKVCacheCoordinator, get_kv_cache_coordinator
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.request import Request

from hybridkv.connector.scheduler.requests import TrackedRequest
from hybridkv.core.coverage import largest_hit, stored_blocks
from hybridkv.core.geometry import Geometry
from hybridkv.core.keys import HASH_BYTES
from hybridkv.vllm.layout import group_geometry
from tests.simulation.configs import block_hasher, config_of
from tests.simulation.layouts import KNOWS_DRAFT_LAYERS, LAYOUTS, WORD, Layout
from tests.simulation.node import ObjectName
from tests.simulation.world import draw

pytestmark = pytest.mark.engine

CASES = 60
NAMES = sorted(
    name
    for name, layout in LAYOUTS.items()
    if layout.is_served and layout.unit <= 128 and "scratch" not in {m.what for m in layout.members}
)
"""Layouts whose prompts are short enough to try many."""


@dataclass(frozen=True)
class Stored:
    """A stored object of one of the prompts."""

    prompt: int  # Which of the prompts it is of.
    gid: int
    chunk: int


class Case:
    """Prompts, objects of theirs that are stored, and a prompt that is looked up."""

    def __init__(self, layout: Layout, seed: int) -> None:
        rng = self._rng = random.Random(f"{layout.name} {seed}")
        shape = draw(random.Random(0), layout, 0).shape
        self.configs = {}
        for is_dropped in (False, True):
            dropping_shape = dataclasses.replace(shape, is_block_dropped=is_dropped)
            config = config_of(dropping_shape, "/nowhere", "engine")
            self.configs[is_dropped] = layout.config(config, 2, worker=False)
        kv_config = self.configs[False]
        self.unit, self.hash_tokens = layout.unit, kv_config.hash_block_size
        self.geometry = Geometry(
            tuple(
                group_geometry(gid, kv_config.kv_cache_groups[gid].kv_cache_spec, (WORD,))
                for gid in kv_config.prefix_cacheable_group_ids
            ),
            layout.unit * rng.choice((1, 1, 2)),
            layout.unit,
            self.hash_tokens,
            lookahead_tokens=layout.drafting.lookahead if layout.drafting else 0,
        )
        self.is_drafted = bool(layout.drafting and layout.drafting.lookahead)
        stem = rng.choices(range(2, 9), k=self.geometry.chunk_tokens * 6)
        self.prompts = [self._prompt(stem) for _ in range(rng.choice((1, 1, 3)))]
        self.asked = self._prompt(rng.choice([stem, *self.prompts]))
        share = rng.choice((0.6, 0.9, 0.97, 1.0))
        self.stored = [
            Stored(number, group.gid, chunk)
            for number, tokens in enumerate(self.prompts)
            for chunk in range(self._chunks(tokens))
            for group in self.geometry.groups
            if rng.random() < share
        ]

    def _prompt(self, stem: list[int]) -> list[int]:
        """A beginning of `stem`, which may end near a chunk's end, and something of its own."""
        rng, chunk = self._rng, self.geometry.chunk_tokens
        near = rng.randrange(1, len(stem) // chunk + 2) * chunk + rng.choice((-1, 0, 0, 1))
        kept = rng.choice((near, rng.randrange(1, len(stem) + 1), len(stem)))
        return stem[:kept] + rng.choices(range(2, 9), k=rng.choice((1, 1, chunk // 2, chunk)))

    def _chunks(self, tokens: list[int]) -> int:
        """Returns how many chunks of a prompt have a name."""
        known = len(tokens) - self.geometry.lookahead_tokens
        return known // self.geometry.chunk_tokens

    def names(self, tokens: list[int]) -> list[bytes]:
        """The chunk hashes of a prompt."""
        tracked, count = TrackedRequest(self.request(tokens)), self._chunks(tokens)
        named = tracked.chunk_hashes(self.geometry, 0, count)
        return [named[at : at + HASH_BYTES] for at in range(0, len(named), HASH_BYTES)]

    def request(self, tokens: list[int], hasher: Any = None) -> Request:
        """vLLM's request of these tokens."""
        hasher = hasher or block_hasher(self.hash_tokens)
        params = SamplingParams(max_tokens=1)
        return Request("asked", tokens, params, None, block_hasher=hasher)

    @property
    def limit(self) -> int:
        """Tokens that a hit may have at most."""
        return len(self.asked) - 1

    @cached_property
    def matching(self) -> list[Stored]:
        """The stored objects whose tokens, with those they depend on, are the asked prompt's."""
        chunk, ahead = self.geometry.chunk_tokens, self.geometry.lookahead_tokens
        return [
            stored
            for stored in self.stored
            if self.asked[: (end := (stored.chunk + 1) * chunk + ahead)]
            == self.prompts[stored.prompt][:end]
        ]

    @cached_property
    def hit(self) -> int:
        """Tokens of our hit, which depends on names alone."""
        asked, named = self.names(self.asked), [self.names(tokens) for tokens in self.prompts]
        present = {
            ObjectName(stored.gid, named[stored.prompt][stored.chunk]) for stored in self.stored
        }
        chunks = min(self.limit // self.geometry.chunk_tokens, len(asked))
        masks = [
            bytes(ObjectName(group.gid, name) in present for name in asked[:chunks])
            for group in self.geometry.groups
        ]
        return largest_hit(self.geometry, masks, chunks) * self.geometry.chunk_tokens

    def longest(self, may_end: Callable[[int], bool], step: int) -> int:
        """The largest multiple of `step` at which a hit may end."""
        ends = range(self.limit // step * step, 0, -step)
        return next((end for end in ends if may_end(end)), 0)

    def vllm(
        self,
        objects: Iterable[Stored],
        is_dropped: bool = False,
        hasher: Any = None,
        ahead: int = 0,
    ) -> "VllmHits":
        """vLLM's managers over the blocks of these objects."""
        found = VllmHits(self, is_dropped, hasher, ahead)
        for number, tokens in enumerate(self.prompts):
            mine = [stored for stored in objects if stored.prompt == number]
            found.add(self.request(tokens, hasher), mine)
        return found


class PresentBlock(NamedTuple):
    """A block that vLLM's pool has, by its name."""

    gid: int
    block_hash: bytes


class VllmHits:
    """vLLM's coordinator of all groups over a block pool."""

    def __init__(self, case: Case, is_dropped: bool, hasher: Any, ahead: int) -> None:
        self._case, config = case, case.configs[is_dropped]
        blocks = sum(len(tokens) for tokens in case.prompts) * len(config.kv_cache_groups)
        config.num_blocks = blocks // case.hash_tokens + 2
        self._request = case.request(case.asked, hasher)
        lookahead = {"num_hash_lookahead_tokens": ahead} if ahead else {}
        self.coordinator = get_kv_cache_coordinator(
            kv_cache_config=config,
            max_model_len=4096,
            max_in_flight_tokens=4096,
            use_eagle=case.is_drafted and is_dropped,
            enable_caching=True,
            enable_kv_cache_events=False,
            dcp_world_size=1,
            pcp_world_size=1,
            scheduler_block_size=case.unit,
            hash_block_size=case.hash_tokens,
            **lookahead,
        )
        self.pool: BlockPool = self.coordinator.block_pool
        self.present: set[PresentBlock] = set()

    def add(self, request: Request, objects: list[Stored]) -> None:
        """The blocks of a prompt's objects."""
        geometry = self._case.geometry
        for group in geometry.groups:
            for stored in objects:
                if stored.gid != group.gid:
                    continue
                for number in stored_blocks(geometry, group, stored.chunk):
                    (block,) = self.pool.get_new_blocks(1)
                    table = [self.pool.null_block] * number + [block]
                    self.pool.cache_full_blocks(
                        request,
                        table,
                        num_cached_blocks=number,
                        num_full_blocks=number + 1,
                        block_size=group.tokens_per_block,
                        kv_cache_group_id=group.gid,
                    )
                    end = (number + 1) * group.tokens_per_block // self._case.hash_tokens
                    block_hash = bytes(request.block_hashes[end - 1])
                    self.present.add(PresentBlock(group.gid, block_hash))

    def tokens(self, limit: int) -> int:
        """Tokens of the longest hit that is not above the limit."""
        found: int = self.coordinator.find_longest_cache_hit(self._request.block_hashes, limit)[1]
        return found

    def may_end(self, end: int) -> bool:
        """Whether a hit may end at `end`."""
        return self.tokens(end) == end

    @cached_property
    def dropping(self) -> set[int]:
        """The groups from which vLLM drops a block after a hit."""
        coordinator = self.coordinator
        if not isinstance(coordinator, HybridKVCacheCoordinator):
            return set(coordinator.eagle_group_ids)
        return {
            gid
            for group in coordinator.attention_groups
            if group.use_eagle and not isinstance(group.spec, MambaSpec)
            for gid in group.group_ids
        }

    @property
    def rounds_twice(self) -> bool:
        """Whether vLLM may round a hit down before it drops a block, and once more after that.

        It does where a run of blocks begins the prompt and is shorter than a window.
        """
        return any(
            group.gid in self.dropping
            and group.window_tokens
            and group.tokens_per_block < self._case.unit
            for group in self._case.geometry.groups
        )

    def is_proven(self, end: int) -> bool:
        """Whether the block after `end` is there in each group from which vLLM drops one."""
        case, hashes = self._case, self._request.block_hashes
        is_hybrid = isinstance(self.coordinator, HybridKVCacheCoordinator)
        known = len(hashes) * case.hash_tokens if is_hybrid else case.limit
        for group in case.geometry.groups:
            next_end = end + group.tokens_per_block
            if group.gid not in self.dropping:
                continue
            name = bytes(hashes[next_end // case.hash_tokens - 1]) if next_end <= known else b""
            if PresentBlock(group.gid, name) not in self.present:
                return False
        return True


@pytest.mark.parametrize("name", NAMES)
def test_a_hit_is_that_of_vllms_managers_over_the_same_objects(name: str) -> None:
    """The objects have the prompt's names. With a drafter, a name depends on the next token."""
    hits = 0
    for seed in range(CASES):
        case = Case(LAYOUTS[name], seed)
        chunk = case.geometry.chunk_tokens
        theirs = case.vllm(case.matching)
        assert case.hit == case.longest(theirs.may_end, chunk), seed
        if chunk == case.unit:
            assert case.hit == theirs.tokens(case.limit) // chunk * chunk, seed
        if not case.geometry.lookahead_tokens:
            assert case.hit == case.longest(case.vllm(case.stored).may_end, chunk), seed
        hits += case.hit > 0
    assert hits > CASES // 10


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("eagle")])
def test_a_hit_is_longer_than_vllms_by_what_it_drops(name: str) -> None:
    """vLLM's hit ends at the last place after which each group of a drafter has a block."""
    longer = 0
    for seed in range(CASES):
        case = Case(LAYOUTS[name], seed)
        whole, dropping = case.vllm(case.stored), case.vllm(case.stored, is_dropped=True)

        def may_end(end: int, whole: VllmHits = whole, dropping: VllmHits = dropping) -> bool:
            return whole.may_end(end) and dropping.is_proven(end)

        dropped, longest = dropping.tokens(case.limit), case.longest(may_end, case.unit)
        assert dropped == longest or (dropping.rounds_twice and dropped < longest), seed
        if len(case.prompts) == 1 and case.geometry.chunk_tokens == case.unit:
            assert case.hit >= dropped, seed
            longer += case.hit > dropped
    assert longer


@pytest.mark.skipif(not KNOWS_DRAFT_LAYERS, reason="vLLM 0.33 has block hashes that look ahead")
@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("eagle")])
def test_a_hit_is_that_of_vllms_own_names_that_look_ahead(name: str) -> None:
    """vLLM 0.33 has them where no connector is configured."""
    hits = 0
    for seed in range(CASES):
        case = Case(LAYOUTS[name], seed)
        sha256 = get_hash_fn_by_name("sha256")
        ahead: dict[str, Any] = {"num_hash_lookahead_tokens": 1}
        hasher = get_request_block_hasher(case.hash_tokens, sha256, **ahead)
        theirs = case.vllm(case.stored, hasher=hasher, ahead=1)
        assert case.hit == case.longest(theirs.may_end, case.geometry.chunk_tokens), seed
        hits += case.hit > 0
    assert hits > CASES // 10
