"""The names of chunks cover the content of media, whatever vLLM names the media by."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.multimodal.inputs import (
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    MultiModalSharedField,
    PlaceholderRange,
)

from hybridkv.connector.scheduler.requests import TrackedRequest
from hybridkv.core.geometry import Geometry, Group, GroupKind
from hybridkv.core.keys import HASH_BYTES
from hybridkv.vllm import media
from hybridkv.vllm.media import MediaContents, RequestMedia, digest_media, media_refusal

CAT, DOG = torch.arange(12.0), torch.arange(12.0) + 1
HASH = "0" * 64  # A label that a client chose in the form of vLLM's hashes.
ENDS = [8, 16, 24, 32]


def item(**values: Any) -> MultiModalKwargsItem:
    field = MultiModalSharedField(batch_size=1)
    return MultiModalKwargsItem(
        {name: MultiModalFieldElem(value, field) for name, value in values.items()}
    )


def picture(pixels: Any, label: str = HASH, at: int = 10) -> MultiModalFeatureSpec:
    data = None if pixels is None else item(pixels=pixels)
    return MultiModalFeatureSpec(data, "image", label, PlaceholderRange(at, 4))


def of(contents: MediaContents, *features: MultiModalFeatureSpec) -> RequestMedia:
    return RequestMedia(SimpleNamespace(mm_features=[*features]), contents)


def names(request: RequestMedia) -> list[bytes]:
    hashes = request.cover_hashes(bytes(HASH_BYTES * len(ENDS)), ENDS)
    return [hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES)]


def test_a_chunk_is_named_by_the_content_of_the_media_up_to_its_end() -> None:
    one, same, other = (names(of(MediaContents(), picture(value))) for value in (CAT, CAT, DOG))
    assert one == same
    assert one[0] == other[0] == bytes(HASH_BYTES), "no medium begins before the chunk's end"
    assert all(mine != theirs for mine, theirs in zip(one[1:], other[1:], strict=True))
    second = names(of(MediaContents(), picture(CAT), picture(DOG, "b", 20)))
    assert second[:2] == one[:2]
    assert second[2] != one[2]


@pytest.mark.parametrize("other", [DOG, CAT.view(3, 4), CAT.to(torch.bfloat16), [CAT], CAT[:6]])
def test_contents_that_differ_in_anything_have_other_digests(other: Any) -> None:
    assert digest_media(picture(other)) not in (b"", digest_media(picture(CAT)))
    assert digest_media(picture(CAT)) == digest_media(picture(CAT.clone(), "another", at=3))


@pytest.mark.parametrize(
    "data",
    [None, item(), item(pixels=None), item(address=64, monotonic_id=7, signature=[1, 2])],
    ids=["absent", "empty", "cached by workers", "an address in shared memory"],
)
def test_a_medium_without_values_is_unknown(data: Any) -> None:
    feature = MultiModalFeatureSpec(data, "image", HASH, PlaceholderRange(10, 4))
    request = of(MediaContents(), feature)
    assert not request.is_known()
    assert "--mm-processor-cache-type lru works" in request.why_unknown()
    again = of(MediaContents(), feature)
    assert names(request)[1:] != names(again)[1:], "nobody finds such names"


def test_an_identifier_that_names_two_contents_names_none_in_this_engine() -> None:
    """Its own caches go by the identifier, and may hold what the other content gave."""
    contents = MediaContents()
    assert of(contents, picture(CAT)).is_known()
    changed = of(contents, picture(DOG))
    assert not changed.is_known()
    assert "named another content" in changed.why_unknown()
    assert not of(contents, picture(CAT)).is_known()
    assert of(contents, picture(DOG, "another")).is_known()


def test_a_content_that_was_not_seen_may_be_in_the_caches_of_the_engine() -> None:
    contents = MediaContents()
    contents.on_untracked_request(SimpleNamespace(mm_features=[picture(None)], resumable=False))
    assert not of(contents, picture(CAT)).is_known()
    assert of(contents, picture(CAT, "another")).is_known()
    contents.on_untracked_request(SimpleNamespace(mm_features=[], resumable=True))
    session = of(contents, picture(CAT, "a third"))
    assert not session.is_known()
    assert "a session" in session.why_unknown()


def test_a_later_turn_of_a_session_adds_media() -> None:
    features = [picture(CAT)]
    request = RequestMedia(SimpleNamespace(mm_features=features), MediaContents())
    assert request.is_known()
    features.append(picture(None, "b", at=20))
    before = names(of(MediaContents(), picture(CAT)))
    assert not request.is_known()
    assert names(request)[:2] == before[:2]


def test_the_memory_of_identifiers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media, "MEDIA_MAX", 2)
    contents = MediaContents()
    for label in "ab":
        assert of(contents, picture(CAT, label)).is_known()
    late = of(contents, picture(CAT, "c"))
    assert not late.is_known()
    assert "2 other media" in late.why_unknown()
    assert of(contents, picture(CAT, "a")).is_known()


@pytest.mark.parametrize(
    ("multimodal", "prefix_cache", "transfer", "said"),
    [
        (None, False, None, ""),
        (4.0, False, None, ""),
        (0, True, None, ""),
        (0, False, None, "does not hash media"),
        (4.0, True, object(), "--ec-transfer-config"),
    ],
)
def test_engines_whose_media_have_no_names(
    multimodal: float | None, prefix_cache: bool, transfer: object, said: str
) -> None:
    settings = None if multimodal is None else SimpleNamespace(mm_processor_cache_gb=multimodal)
    refusal = media_refusal(
        SimpleNamespace(
            model_config=SimpleNamespace(multimodal_config=settings),
            ec_transfer_config=transfer,
            cache_config=SimpleNamespace(enable_prefix_caching=prefix_cache),
        )
    )
    assert said in refusal
    assert bool(said) == bool(refusal)
    assert of(MediaContents(refusal), picture(CAT)).is_known() == (not said)


def test_the_names_of_a_request_cover_its_media() -> None:
    """Its chunks and tails from the medium on, and the chunk before a medium that is looked at."""
    group = Group(0, GroupKind.FULL, 8, (8,))
    made = [*map(named, (CAT, DOG))]
    for lookahead, differ in ((0, [False, True, True, True]), (1, [True] * 4)):
        geometry = replace(Geometry((group,), 8, 8, 8, 1, 1), lookahead_tokens=lookahead)
        both = [request.chunk_hashes(geometry, 0, 4) for request in made]
        split = [[hashes[at : at + 32] for at in range(0, 128, 32)] for hashes in both]
        assert [a != b for a, b in zip(*split, strict=True)] == differ
    tails = [request.tail_hashes([bytes(32)] * 2, [8, 9]) for request in made]
    assert tails[0][:32] == tails[1][:32]
    assert tails[0][32:] != tails[1][32:]


def named(pixels: torch.Tensor) -> TrackedRequest:
    feature = picture(pixels, at=8)
    request = SimpleNamespace(
        mm_features=[feature],
        block_hashes=[bytes([number]) * HASH_BYTES for number in range(5)],
        all_token_ids=[*range(40)],
        lora_request=None,
        cache_salt=None,
        prompt_embeds=None,
    )
    return TrackedRequest(request, media=RequestMedia(request, MediaContents()))
