"""Two command lines of a pair: by what the engines would not find each other's KV."""

from dataclasses import replace
from typing import Any

import pytest

from hybridkv.core.findings import Verdict
from hybridkv.core.settings import Settings
from hybridkv.lab.configuration import ConfigReport, OptionValue
from hybridkv.lab.pairs import EngineOfPair, pair_findings

OPTIONS: dict[str, OptionValue] = {
    "--block-size": 16,
    "--dtype": "bfloat16",
    "--kv-cache-dtype": "auto",
    "--max-model-len": 4096,
    "--model": "m",
    "--prefix-caching-hash-algo": "sha256",
    "--quantization": None,
    "--revision": None,
    "--tensor-parallel-size": 1,
    "PYTHONHASHSEED": None,
}
PREFILL = ConfigReport(identity="ab" * 32, role="kv_producer", options=OPTIONS)
DECODE = replace(PREFILL, role="kv_consumer")


def found(first: ConfigReport, second: ConfigReport, other_socket: str = "/a") -> list[str]:
    """The sentences of what is not as it should be."""
    pair = (EngineOfPair(first, "/a"), EngineOfPair(second, other_socket))
    findings = [*pair_findings(*pair)]
    return [f"{each.verdict} {each.sentence}" for each in findings if each.verdict != Verdict.OK]


def test_a_pair_that_shares_has_nothing_to_mend() -> None:
    assert found(PREFILL, DECODE) == []
    both = replace(PREFILL, role="kv_both")
    assert found(both, both) == found(both, DECODE) == found(PREFILL, both) == []


@pytest.mark.parametrize(
    ("name", "value", "works"),
    [
        ("--block-size", 32, "--block-size 16"),
        ("--dtype", "float32", "--dtype bfloat16"),
        ("--kv-cache-dtype", "fp8", "--kv-cache-dtype auto"),
        ("--max-model-len", 8192, "--max-model-len 4096"),
        ("--prefix-caching-hash-algo", "sha256_cbor", "--prefix-caching-hash-algo sha256"),
        ("--quantization", "fp8", "leaving --quantization out"),
        ("--tensor-parallel-size", 2, "--tensor-parallel-size 1"),
        ("PYTHONHASHSEED", "7", "unset PYTHONHASHSEED"),
    ],
)
def test_an_option_that_shapes_the_kv_is_named_with_what_works(
    name: str, value: OptionValue, works: str
) -> None:
    """What follows from it, such as other groups, is not named too."""
    other = replace(
        DECODE, identity="cd" * 32, options={**OPTIONS, name: value}, all_facts={"groups": "[2]"}
    )
    (sentence,) = found(PREFILL, other)
    assert sentence.startswith(f"FAIL {name} is ")
    assert f"{value} for the second engine" in sentence
    assert sentence.endswith(f"; {works} for both works")
    assert found(PREFILL, replace(other, identity=PREFILL.identity)) == [], "it shapes nothing"


@pytest.mark.parametrize(
    ("name", "first", "second", "works"),
    [
        ("hybrid_chunk_size", 256, 512, '"hybrid_chunk_size": 256 for both works'),
        ("hybrid_chunk_size", None, 512, "leaving hybrid_chunk_size out for both works"),
        ("share_tp", 4, None, '"share_tp": 4 for both works'),
        ("weights_identity", "v1", "v2", '"weights_identity": "v1" for both works'),
    ],
)
def test_a_setting_is_named_with_what_works(name: str, first: Any, second: Any, works: str) -> None:
    (sentence,) = found(
        replace(PREFILL, settings=Settings(**{name: first})),
        replace(DECODE, settings=Settings(**{name: second}), identity="cd" * 32),
    )
    assert sentence.endswith(works)


def test_a_variable_of_vllm_is_named() -> None:
    first = replace(PREFILL, all_facts={"environment.VLLM_X": '"1"'})
    (sentence,) = found(first, replace(DECODE, identity="cd" * 32))
    assert sentence.startswith("FAIL VLLM_X is 1 for the first and not set for the second engine")
    assert sentence.endswith("; VLLM_X=1 for both works")


def test_what_no_option_explains_is_shown_by_its_facts() -> None:
    first = replace(PREFILL, all_facts={"abi": '"0.32"', "same": "1"})
    second = replace(DECODE, identity="cd" * 32, all_facts={"abi": '"0.33"', "same": "1"})
    (sentence,) = found(first, second)
    assert 'differ in abi ("0.32" and "0.33")' in sentence
    assert "same" not in sentence.partition(";")[0]


@pytest.mark.parametrize(
    ("role", "works"), [("kv_producer", "kv_consumer"), ("kv_consumer", "kv_producer")]
)
def test_two_engines_of_one_role_are_a_warning(role: str, works: str) -> None:
    (sentence,) = found(replace(PREFILL, role=role), replace(DECODE, role=role))
    assert sentence.startswith("warn ")
    assert f'"kv_role":"{works}" for the one that' in sentence


def test_two_daemons_fail() -> None:
    (sentence,) = found(PREFILL, DECODE, "/b")
    assert sentence.startswith("FAIL the engines have two daemons, at /a and /b; ")
    assert sentence.endswith('"server":"unix:///a" for both works')


@pytest.mark.parametrize(("name", "works"), [("--model", "--model m"), ("--revision", "leaving")])
def test_other_weights_are_a_warning_before_they_are_read(name: str, works: str) -> None:
    other = replace(DECODE, options={**OPTIONS, name: "other"})
    (sentence,) = found(PREFILL, other)
    assert sentence.startswith(f"warn {name} is ")
    assert f"; {works}" in sentence
    named = Settings(weights_identity="v1")
    assert found(replace(PREFILL, settings=named), replace(other, settings=named)) == []


def test_an_engine_that_would_not_start_is_not_compared() -> None:
    (sentence,) = found(PREFILL, replace(DECODE, identity=""))
    assert sentence.startswith("warn identities are not compared")
