"""Identity and the circuit breaker."""

import subprocess
import sys

from hybridkv.core.breaker import FAILURES_TO_OPEN, PAUSE_SECONDS, Breaker
from hybridkv.core.keys import (
    HASH_BYTES,
    adapter_hashes,
    fingerprint,
    lookahead_hashes,
    pack_hashes,
    tenant_of,
)

FACTS = {"model": "m", "groups": [[0, "full", 128]], "dtype": "bf16", "epoch": 0}


def test_every_fact_counts_and_their_order_does_not() -> None:
    same = fingerprint(FACTS)
    assert fingerprint(dict(reversed(FACTS.items()))) == same
    others = {fingerprint({**FACTS, key: "changed"}) for key in FACTS}
    assert len(others | {same}) == len(FACTS) + 1


def test_the_fingerprint_is_the_same_in_every_process() -> None:
    """Requirements B18, D15: no PYTHONHASHSEED is ever needed."""
    code = f"from hybridkv.core.keys import fingerprint; print(fingerprint({FACTS!r}).hex())"
    for seed in ("1", "2"):
        process = subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert process.stdout.strip() == fingerprint(FACTS).hex()


def test_hashes_of_another_length_become_ours() -> None:
    whole = [bytes([number]) * 32 for number in range(3)]
    assert pack_hashes(whole) == b"".join(whole)
    short = [bytes([number]) * 8 for number in range(4)]
    packed = pack_hashes(short)
    assert len({packed[at : at + 32] for at in range(0, len(packed), 32)}) == 4
    assert pack_hashes([b"a" * 31, b"b" * 33]) != b"a" * 31 + b"b" * 33, (
        "a right sum of wrong lengths"
    )
    assert pack_hashes([]) == b""


def test_the_breaker_opens_probes_and_closes() -> None:
    breaker = Breaker()
    for number in range(FAILURES_TO_OPEN):
        assert breaker.allows(float(number))
        breaker = breaker.on_failure(float(number))
    opened_at = float(FAILURES_TO_OPEN - 1)
    assert breaker.is_open
    assert not breaker.allows(opened_at + PAUSE_SECONDS / 2)
    probe_at = opened_at + PAUSE_SECONDS
    assert breaker.allows(probe_at)
    assert not breaker.on_request(probe_at).allows(probe_at), "one probe in a pause"
    assert breaker.on_failure(probe_at).is_open
    assert not breaker.on_success().is_open


def test_any_salt_has_a_tenant() -> None:
    """Also one that no encoding takes (a client's JSON may have half of a surrogate pair)."""
    salts = ["a", "b", "u\ud800", "u\udfff", "\ud83d\ude00", "\U0001f600"]
    assert len({tenant_of(salt) for salt in salts}) == len(salts)
    assert tenant_of(None) == tenant_of("") == 0


def test_names_that_look_ahead_differ_by_the_token_and_by_what_it_depends_on() -> None:
    """An image is the same token at each place, and another image other bytes."""
    plain = [bytes([number]) * HASH_BYTES for number in (1, 2)]

    def named(tokens: list[int], extras: list[object] | None = None) -> list[bytes]:
        whole = lookahead_hashes(b"".join(plain), tokens, extras or [])
        return [whole[at : at + HASH_BYTES] for at in range(0, len(whole), HASH_BYTES)]

    assert named([7, 8]) == named([7, 8], [None, None])
    first, second = named([7, 8])
    assert named([7, 9]) == [first, named([0, 9])[1]]
    assert second != named([7, 9])[1]
    images = [named([7, 8], [("image", 1), None])[0], named([7, 8], [("image", 2), None])[0]]
    assert len({first, second, *images, *plain}) == 6
    assert named([7, 8], [("image", 1), None])[1] == second
    adapter = bytes(range(HASH_BYTES))
    assert adapter_hashes(first + second, adapter) not in (first + second, b"".join(plain))
