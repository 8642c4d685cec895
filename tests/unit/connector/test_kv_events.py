"""KV events: what they say of a prompt. That they are true, whatever happens: tests/simulation."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hybridkv.connector.metrics import (
    CHUNKS_ANNOUNCED,
    CHUNKS_NOT_KEPT,
    CHUNKS_NOT_SHOWN,
    CHUNKS_WITHDRAWN,
)
from hybridkv.connector.scheduler.kv_events import READ_BYTES, KVEventPublisher, PresentObjects
from hybridkv.connector.scheduler.requests import RequestLookup, TrackedRequest
from hybridkv.core.metrics import Metric
from hybridkv.core.settings import parse_settings
from hybridkv.vllm.hook_guard import fault
from hybridkv.wire.messages import Announced, Describe, Found, ReadAnnouncements, Removed, Subscribe
from tests.layouts import LAYOUTS
from tests.unit.connector.requests import make_role

pytestmark = pytest.mark.engine

GEOMETRY = LAYOUTS["gpu_blocks"]
"""Blocks of 16 tokens, chunks of 128; a sliding and a full group."""
BLOCK, CHUNK = 16, GEOMETRY.chunk_tokens
BLOCKS = CHUNK // BLOCK


def make_request(
    name: str, tokens: list[int], salt: str | None = None, adapter: str | None = None
) -> Any:
    """Tracked as the connector does, of a request of vLLM's."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    hash_fn = get_hash_fn_by_name("sha256")
    init_none_hash(hash_fn)
    hasher = get_request_block_hasher(BLOCK, hash_fn)
    lora = LoRARequest(adapter, 3, "/nowhere") if adapter is not None else None
    request = Request(
        name,
        tokens,
        SamplingParams(max_tokens=1),
        None,
        block_hasher=hasher,
        cache_salt=salt,
        lora_request=lora,
    )
    return TrackedRequest(request)


def make_events() -> tuple[Any, Counter[Metric]]:

    counters: Counter[Metric] = Counter()
    return KVEventPublisher(GEOMETRY, counters), counters


def store(events: Any, tracked: Any, *chunks: int) -> list[Any]:
    """Commit every group's objects of some chunks; returns the events."""

    present = [PresentObjects(index, chunks) for index in range(len(GEOMETRY.groups))]
    events.on_committed({tracked: present})
    fresh: list[Any] = events.take_new(0.0)
    return fresh


def names_of(tracked: Any, first: int, last: int) -> list[Any]:
    """The engine's own hashes of some blocks, as it publishes them."""
    from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

    return [maybe_convert_block_hash(name) for name in tracked.request.block_hashes[first:last]]


def key(tracked: Any, chunk: int) -> bytes:
    name: bytes = tracked.chunk_hashes(GEOMETRY, chunk, 1)
    return name


def test_an_event_has_the_engines_hashes_tokens_and_parent() -> None:
    events, counters = make_events()
    tokens = [*range(100, 100 + 3 * CHUNK + 5)]
    tracked = make_request("r", tokens, salt="s", adapter="tuned")
    (first,) = store(events, tracked, 0, 1)
    assert (first.medium, first.block_size, first.parent_block_hash) == ("CPU", BLOCK, None)
    assert (first.group_idx, first.kv_cache_spec_kind) == (None, None), "routers take any"
    assert first.block_hashes == names_of(tracked, 0, 2 * BLOCKS)
    assert first.token_ids == tokens[: 2 * CHUNK]
    assert (first.lora_id, first.lora_name) == (3, "tuned")
    assert first.extra_keys == [("tuned", "s"), *[("tuned",)] * (2 * BLOCKS - 1)]
    assert store(events, tracked, 0, 1) == [], "it is known"
    before, second = store(events, tracked, 2)
    assert (before.medium, before.block_hashes) == ("CPU", names_of(tracked, BLOCKS, 2 * BLOCKS)), (
        "vLLM's own events of windows may have made routers believe that it is elsewhere"
    )
    assert second.parent_block_hash == first.block_hashes[-1]
    assert second.token_ids == tokens[2 * CHUNK : 3 * CHUNK]
    assert counters == {CHUNKS_ANNOUNCED: 3}
    events.withdraw_all()
    (gone,) = events.take_new(0.0)
    assert (gone.medium, gone.group_idx) == ("CPU", None)
    assert sorted(gone.block_hashes) == sorted(names_of(tracked, 0, 3 * BLOCKS))
    assert counters[CHUNKS_WITHDRAWN] == 3


def test_everything_is_withdrawn_over_steps_but_what_is_announced_again() -> None:
    events, _ = make_events()
    tracked = make_request("r", [*range(100, 100 + 3 * CHUNK)])
    store(events, tracked, 0, 1, 2)
    events.withdraw_all()
    gone: list[Any] = []
    for _ in range(2):
        (event,) = events.take_new(0.0, blocks_max=3)
        gone += event.block_hashes
    assert len(gone) == 6
    present = [PresentObjects(index, [0]) for index in range(len(GEOMETRY.groups))]
    events.on_committed({tracked: present})
    stored, *removed = events.take_new(0.0)
    again = names_of(tracked, 0, BLOCKS)
    assert stored.block_hashes == again
    gone += [name for event in removed for name in event.block_hashes]
    assert {*gone} | {*again} == {*names_of(tracked, 0, 3 * BLOCKS)}
    assert not {*again} & {name for event in removed for name in event.block_hashes}
    assert events.take_new(0.0) == []


def test_a_chunk_is_announced_again_where_nothing_is_new() -> None:
    """A router finds by the number of the next event that it missed some."""
    events, _ = make_events()
    assert events.take_new(1e9) == [], "there is nothing to repeat"
    tracked = make_request("r", [*range(100, 100 + CHUNK)])
    present = [PresentObjects(index, [0]) for index in range(len(GEOMETRY.groups))]
    events.on_committed({tracked: present})
    stored = events.take_new(100.0)
    times = [now for now in range(100, 1500) if events.take_new(float(now))]
    assert times == [104, 112, 128, 160, 224, 352, 608, 1120], "ten minutes at most"
    assert events.take_new(1720.0) == stored
    events.withdraw_all()
    assert len(events.take_new(1721.0)) == 1
    assert not any(events.take_new(float(now)) for now in range(1721, 5000))


def below(tracked: Any, *places: tuple[int, int], in_tier: bool = True) -> Removed:
    """RAM has these objects, (chunk, group index) each, no more."""
    hashes = b"".join(key(tracked, chunk) for chunk, _ in places)
    return Removed(
        0, hashes, bytes(group for _, group in places), below=bytes([in_tier] * len(places))
    )


def test_what_only_a_tier_has_is_announced_as_storage() -> None:
    events, _ = make_events()
    tokens = [*range(100, 100 + 3 * CHUNK)]
    tracked = make_request("r", tokens, salt="s", adapter="tuned")
    (stored,) = store(events, tracked, 0, 1, 2)
    events.on_removed(below(tracked, (2, 0), (2, 1), (1, 1)))
    queued = events.take_new(0.0)
    summary = [(type(event).__name__, event.medium, event.block_hashes) for event in queued]
    first, second, third = (names_of(tracked, at * BLOCKS, (at + 1) * BLOCKS) for at in range(3))
    assert summary == [
        ("BlockStored", "CPU", second),  # Repeated, as the chunk before.
        ("BlockStored", "STORAGE", third),
        ("BlockRemoved", "CPU", third),
        ("BlockStored", "CPU", first),
        ("BlockStored", "STORAGE", second),
        ("BlockRemoved", "CPU", second),
    ]
    tracked.lookup = RequestLookup(tracked.chunk_hashes(GEOMETRY, 0, 3))
    events.on_found(tracked, Found(1, 1, 2, [b"\1\1\0", b"\1\1\0"], b""))
    _, stored, removed = events.take_new(0.0)
    assert (stored.medium, stored.block_hashes) == ("CPU", second), "it came up again"
    assert (removed.medium, removed.block_hashes) == ("STORAGE", second)
    events.on_removed(below(tracked, (2, 0), in_tier=False))
    (gone,) = events.take_new(0.0)
    assert (gone.medium, gone.block_hashes) == ("STORAGE", third), "the tier evicted it"
    events.on_removed(below(tracked, (0, 1), in_tier=False))
    (gone,) = events.take_new(0.0)
    assert gone.medium == "CPU"
    assert sorted(gone.block_hashes) == sorted(names_of(tracked, 0, 2 * BLOCKS))
    events.on_removed(below(tracked, (0, 0), (1, 0), (1, 1), (2, 1), in_tier=False))
    assert events.take_new(0.0) == []
    assert not events.blocks
    assert not events.kept_bytes


def test_storage_events_say_what_those_of_ram_said() -> None:

    events, _ = make_events()
    tracked = make_request("r", [*range(100, 100 + 2 * CHUNK)], salt="s", adapter="tuned")
    (in_ram,) = store(events, tracked, 0, 1)
    events.on_removed(below(tracked, (0, 1)))
    storage, removed = events.take_new(0.0)
    assert (storage.medium, removed.medium, removed.group_idx) == ("STORAGE", "CPU", None)
    storage.medium = "CPU"
    assert storage == in_ram
    events.withdraw_all()
    (gone,) = events.take_new(0.0)
    assert (gone.medium, sorted(gone.block_hashes)) == ("STORAGE", sorted(in_ram.block_hashes))


def test_of_more_tokens_than_are_kept_the_rest_is_announced_in_ram_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hybridkv.connector.scheduler.kv_events.KEPT_BYTES_MAX", 5 * CHUNK)
    events, counters = make_events()
    tracked = make_request("r", [*range(2 * CHUNK)])
    (stored,) = store(events, tracked, 0, 1)
    assert len(stored.token_ids) == 2 * CHUNK
    assert counters[CHUNKS_NOT_KEPT] == 1
    events.on_removed(below(tracked, (1, 0), (0, 0)))
    assert [(event.medium, type(event).__name__) for event in events.take_new(0.0)] == [
        ("CPU", "BlockRemoved"),
        ("STORAGE", "BlockStored"),
        ("CPU", "BlockRemoved"),
    ]
    assert len(events.blocks) == 1


def test_chunks_that_are_too_many_are_counted_and_not_announced() -> None:
    """Those that only STORAGE cannot tell of are announced in RAM."""
    from hybridkv.connector.scheduler.announced import AnnouncedChunks

    events, counters = make_events()
    events.in_ram = AnnouncedChunks(GEOMETRY, chunks_max=2)
    events.anywhere = AnnouncedChunks(GEOMETRY, chunks_max=1)
    tracked = make_request("r", [*range(3 * CHUNK)])
    (stored,) = store(events, tracked, 0, 1, 2)
    assert stored.block_hashes == names_of(tracked, 0, 2 * BLOCKS)
    assert counters[CHUNKS_NOT_SHOWN] == 1
    assert counters[CHUNKS_NOT_KEPT] == 1
    events.on_removed(below(tracked, (1, 1), (0, 1)))
    assert [(event.medium, type(event).__name__) for event in events.take_new(0.0)] == [
        ("CPU", "BlockRemoved"),
        ("STORAGE", "BlockStored"),
        ("CPU", "BlockRemoved"),
    ]


def test_a_fault_withdraws_what_was_announced(tmp_path: Path) -> None:
    """As where vLLM's own functions refuse a request; what the daemon says goes on being heard."""

    counters: Counter[Metric] = Counter()
    settings = parse_settings({"server": f"unix://{tmp_path}/none.sock"})
    side = make_role(settings, GEOMETRY, b"n" * 32, counters, publishes_events=True)
    events = side.events
    tracked = make_request("r", [*range(2 * CHUNK)])
    (stored,) = store(events, tracked, 0)
    broken = make_request("s", [*range(CHUNK)])
    broken.request = SimpleNamespace(num_tokens=CHUNK, block_hashes=[b"h" * 32] * BLOCKS)
    present = [PresentObjects(index, (0,)) for index in (0, 1)]
    side.events.update(lambda events: events.on_committed({broken: present}))
    assert counters[fault("kv_events")] == 1
    (gone,) = side.on_step_end()
    assert set(stored.block_hashes) <= set(gone.block_hashes)
    assert side.on_step_end() == side.final_events() == []
    side.close()


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        (None, False),
        (SimpleNamespace(enable_kv_cache_events=False), False),
        (SimpleNamespace(enable_kv_cache_events=True), True),
    ],
)
def test_events_are_made_where_vllm_publishes_them(config: Any, wanted: bool) -> None:
    from hybridkv.connector.connector import wants_events

    assert wants_events(SimpleNamespace(kv_events_config=config)) is wanted


def test_nothing_is_named_by_a_token_that_is_not_computed() -> None:
    """A session may take back the last sampled token; its hash would be another prompt's."""
    from hybridkv.vllm.hashing import ChunkHashChain

    tracked = make_request("r", list(range(2 * CHUNK - 1)))
    tracked.chain = ChunkHashChain(tracked.request, CHUNK)
    tracked.request.append_output_token_ids([7])
    events, _ = make_events()
    assert len(store(events, tracked, 0)) == 1
    corrected = make_request("r", [*range(2 * CHUNK - 1), 8])
    tracked.request._all_token_ids[-1] = 8
    assert tracked.chunk_hashes(GEOMETRY, 1, 1) == ChunkHashChain(corrected.request, CHUNK).names(
        1, 1
    )


def announcement(told: list[Any], *chunks: int, mask: bytes = b"\1", **changed: Any) -> Announced:
    """What the daemon announces of some chunks that an engine described to it."""
    (described,) = [message for message in told if isinstance(message, Describe)]
    names = [described.hashes[at * 32 : at * 32 + 32] for at in chunks]
    fields = {
        "id": 1,
        "hashes": b"".join(names),
        "parents": b"".join(described.parents[at * 32 : at * 32 + 32] for at in chunks),
        "descriptions": [described.descriptions[at] for at in chunks],
        "masks": [mask * len(chunks)] * len(GEOMETRY.groups),
        "more": False,
    }
    return Announced(**{**fields, **changed})


def described_by(tracked: Any, *chunks: int) -> tuple[list[Any], list[Any]]:
    """An engine that stored chunks: its events, and what it tells the daemon."""
    events, _ = make_events()
    stored = store(events, tracked, *chunks)
    return stored, events.take_requests(is_idle=False)


def test_another_engine_announces_what_the_first_one_stored() -> None:
    tracked = make_request("r", [*range(100, 100 + 3 * CHUNK)], salt="s", adapter="tuned")
    stored, told = described_by(tracked, 0, 1, 2)
    events, _ = make_events()
    assert events.take_requests(is_idle=False) == [ReadAnnouncements(1, READ_BYTES)]
    assert events.take_requests(is_idle=False) == [], "it waits for the answer"
    events.on_announced(announcement(told, 0, 1, more=True))
    assert events.has_more
    (first,) = events.take_new(0.0)
    assert events.take_requests(is_idle=False) == [ReadAnnouncements(1, READ_BYTES)], (
        "nothing is described again"
    )
    events.on_announced(announcement(told, 2))
    _, second = events.take_new(0.0)
    assert not events.has_more
    assert second.parent_block_hash == first.block_hashes[-1]
    for name in ("block_hashes", "token_ids", "extra_keys"):
        setattr(first, name, [*getattr(first, name), *getattr(second, name)])
    assert [first] == stored
    assert store(events, tracked, 0, 1, 2) == [], "it knows them"
    events.on_announced(announcement(told, 0, 1, 2))
    assert events.take_new(0.0) == [], "once"
    removed = below(tracked, *((chunk, group) for chunk in (2, 1, 0) for group in (1, 0)))
    events.on_removed(Removed(0, removed.hashes, removed.groups, below=bytes(6)))
    gone = [name for event in events.take_new(0.0) for name in event.block_hashes]
    assert sorted(gone) == sorted(first.block_hashes)
    assert (len(events.blocks), events.kept_bytes) == (0, 0)


def test_what_only_a_tier_has_is_announced_as_storage_at_once() -> None:
    tracked = make_request("r", [*range(100, 100 + 2 * CHUNK)])
    (stored,), told = described_by(tracked, 0, 1)
    events, _ = make_events()
    events.on_announced(announcement(told, 0, 1, mask=b"\2"))
    (event,) = events.take_new(0.0)
    assert (event.medium, event.block_hashes) == ("STORAGE", stored.block_hashes)
    events.on_announced(announcement(told, 0))
    assert [(each.medium, len(each.block_hashes)) for each in events.take_new(0.0)] == [
        ("CPU", BLOCKS),
        ("STORAGE", BLOCKS),
    ]


def test_a_chunk_is_announced_with_what_a_hit_needs_before_it() -> None:
    """Its parents come first, and a window's object or a state may come later."""
    tracked = make_request("r", [*range(100, 100 + 3 * CHUNK)])
    (stored,), told = described_by(tracked, 0, 1, 2)
    events, _ = make_events()
    events.on_announced(announcement(told, 1, 2))
    assert events.take_new(0.0) == [], "what comes before it is not known"
    no_window = [b"\0", b"\1"]
    events.on_announced(announcement(told, 0, masks=no_window))
    assert [event.block_hashes for event in events.take_new(0.0)] == []
    events.on_announced(announcement(told, 2))
    (event,) = events.take_new(0.0)
    assert event.block_hashes == stored.block_hashes


def test_what_is_no_description_is_passed_over_and_counted() -> None:
    tracked = make_request("r", [*range(100, 100 + CHUNK)])
    _, told = described_by(tracked, 0)
    for content in (b"", b"\xc0", announcement(told, 0).descriptions[0][:-1]):
        events, counters = make_events()
        events.on_announced(announcement(told, 0, descriptions=[content]))
        assert events.take_new(0.0) == []
        assert counters == {CHUNKS_NOT_KEPT: 1}
    events.on_announced(announcement(told, 0, parents=b"p" * 32))
    assert events.take_new(0.0) == [], "its own words say that it is the first"


def test_after_a_reset_or_too_many_removals_all_is_announced_anew() -> None:
    """AllBlocksCleared makes a router forget what the daemon has too."""
    tracked = make_request("r", [*range(100, 100 + CHUNK)])
    _, told = described_by(tracked, 0)
    events, _ = make_events()
    lost: tuple[Callable[[], None], ...] = (
        lambda: events.on_reset(True, 0.0),
        lambda: events.on_removed(Removed(0, b"", b"", everything=True)),
    )
    for number, lose in enumerate(lost, 1):
        events.on_announced(announcement(told, 0, id=number))
        assert len(events.take_new(0.0)) == 1
        events.take_requests(is_idle=False)
        events.on_reset(False, 0.0)
        assert not events.take_new(0.0)
        lose()
        (gone,) = events.take_new(0.0)
        assert len(gone.block_hashes) == BLOCKS
        events.on_announced(announcement(told, 0, id=number))
        assert events.take_new(0.0) == [], "it was sent before"
        asked = events.take_requests(is_idle=False)
        assert asked == [Subscribe(), ReadAnnouncements(number + 1, READ_BYTES)]


def test_tokens_that_are_no_numbers_of_32_bits_are_not_described() -> None:
    tracked = make_request("r", [*range(CHUNK - 1), 1 << 40])
    (_,), told = described_by(tracked, 0)
    assert told == [ReadAnnouncements(1, READ_BYTES)]
