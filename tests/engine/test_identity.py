"""The identity matrix (testing anchors, 10): each single change is a miss, no change is a hit."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.request import Request

from hybridkv.core.keys import HASH_BYTES
from hybridkv.lab.daemon_process import DaemonProcess
from hybridkv.lab.models import BUNDLED_ENVIRONMENT
from hybridkv.vllm.hashing import ChunkHashChain, hash_facts
from tests.engine.forked import lines_of
from tests.engine.identities import BASE, CHANGES, TOKENS

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

HITS = {
    "same, asked for twice": TOKENS // 128 * 128,
    "that salt again": TOKENS // 128 * 128,
    "seed, of which the weights are independent": TOKENS // 128 * 128,
    "nothing": TOKENS // 128 * 128,
    "own hashes, again": TOKENS // 128 * 128,
}
SOME = [BASE, "cache_salt", "weights", "nothing"]


def loaded(daemon: DaemonProcess, *names: str, hash_seed: str | None = None) -> dict[str, int]:
    """Tokens that each engine loads, one after the other."""
    environment = {**os.environ, **BUNDLED_ENVIRONMENT, "VLLM_LOGGING_LEVEL": "WARNING"}
    environment.pop("PYTHONHASHSEED", None)
    if hash_seed is not None:
        environment["PYTHONHASHSEED"] = hash_seed
    found = {}
    for name in names:
        log = Path(daemon.socket_path).with_name("engine.log")
        words = [daemon.socket_path, name]
        lines = lines_of("tests.engine.identities", words, log, environment)
        (report,) = (json.loads(line) for line in lines if line.startswith("{"))
        found[name] = report["loaded"]
    return found


@pytest.mark.parametrize(
    "changes",
    [pytest.param(list(CHANGES), marks=pytest.mark.soak), SOME],
    ids=["every one", "some"],
)
def test_every_single_change_is_a_miss_and_no_change_is_a_hit(
    daemon: DaemonProcess, changes: list[str]
) -> None:
    """Also across restarts: every line is an engine of its own. PYTHONHASHSEED is unset here."""
    assert loaded(daemon, *changes) == {name: HITS.get(name, 0) for name in changes}


@pytest.mark.soak
def test_a_set_pythonhashseed_is_part_of_the_identity_and_needed_by_nobody(
    daemon: DaemonProcess,
) -> None:
    assert loaded(daemon, BASE, "own hashes", hash_seed=None) == {BASE: 0, "own hashes": 0}
    with_seed = loaded(daemon, BASE, "nothing", "own hashes", hash_seed="0")
    assert with_seed[BASE] == 0, "vLLM's own hashes start from the seed"
    assert with_seed["nothing"] == HITS["nothing"], "the same seed again"
    assert with_seed["own hashes"] == HITS["nothing"], "ours need none"
    assert loaded(daemon, "nothing", hash_seed="0") == {"nothing": HITS["nothing"]}, (
        "across a restart"
    )
    assert loaded(daemon, "nothing", hash_seed="1") == {"nothing": 0}


def test_engines_that_hash_differently_do_not_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    unset = hash_facts("sha256")
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    facts = [unset, hash_facts("sha256"), hash_facts("sha256_cbor"), hash_facts("xxhash")]
    assert len({tuple(hash_fact) for hash_fact in facts}) == 4
    assert hash_facts("xxhash") == hash_facts("xxhash_cbor"), (
        "our hashes, whatever the engine's are"
    )


def request(
    tokens: list[int], salt: str | None = None, image: str | None = None, at: int = 10
) -> Request:
    features = None
    if image is not None:
        features = [MultiModalFeatureSpec(None, "image", image, PlaceholderRange(at, 20))]
    return Request(
        "r", tokens, SamplingParams(max_tokens=1), None, mm_features=features, cache_salt=salt
    )


def test_our_own_names_cover_tokens_order_salt_and_images() -> None:
    tokens = list(range(1, 33)) * 8
    base = ChunkHashChain(request(tokens), 64).names(0, 4)
    assert len(base) == 4 * HASH_BYTES
    grown = ChunkHashChain(request(tokens), 64)
    assert b"".join(grown.names(at, 1) for at in range(4)) == base, (
        "the same however they are asked for"
    )
    others = [
        request([9, *tokens[1:]]),
        request(tokens, salt="a"),
        request(tokens, salt="b"),
        request(tokens, image="i"),
        request(tokens, image="j"),
        request(tokens, image="i", at=11),
    ]
    names = [base, *(ChunkHashChain(changed, 64).names(0, 4) for changed in others)]
    assert len({name[:HASH_BYTES] for name in names}) == len(names)
    assert len({name[-HASH_BYTES:] for name in names}) == len(names), (
        "a change in the first chunk changes all"
    )
    late = ChunkHashChain(request([*tokens[:-1], 9]), 64).names(0, 4)
    assert late[: 3 * HASH_BYTES] == base[: 3 * HASH_BYTES]
    assert late[3 * HASH_BYTES :] != base[3 * HASH_BYTES :]


class Watched(list[int]):
    """A request's tokens, and how many of them were looked at."""

    seen = 0

    def __getitem__(self, at: Any) -> Any:
        self.seen += len(range(*at.indices(len(self)))) if isinstance(at, slice) else 1
        return super().__getitem__(at)


def test_our_own_names_are_made_as_far_as_they_are_needed_and_once() -> None:
    """B14, B15: for one request there is one chain, which grows."""
    watched = request(list(range(1, 33)) * 8)
    watched.all_token_ids = Watched(watched.all_token_ids)
    chain = ChunkHashChain(watched, 64)
    chain.names(0, 2)
    assert watched.all_token_ids.seen == 2 * 64
    chain.names(0, 2)
    chain.names(1, 1)
    assert watched.all_token_ids.seen == 2 * 64
    chain.names(3, 1)
    assert watched.all_token_ids.seen == 4 * 64
