"""Tiers of other packages: how they are found, and what their faults are."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from hybridkv.core.errors import ConfigError
from hybridkv.core.keys import KEY_BYTES
from hybridkv.core.tier_urls import TierSpec, parse_tier
from hybridkv.tiers.conformance.samples import make_sample, pages, read
from hybridkv.tiers.contract import MissingError, ReadRequest, Tier, TierError, WriteRequest
from hybridkv.tiers.encoded import EncodedTier
from hybridkv.tiers.factory import make_tier
from hybridkv.tiers.foreign import ForeignTier

HERE = __name__


class PlugInTier(Tier):
    """A right tier, in memory. The options `forget` and `fail` make it a wrong one."""

    def __init__(self, spec: TierSpec) -> None:
        self.options = spec.known_options("raises", "name")
        if "raises" in self.options:
            raise RuntimeError(self.options["raises"])
        self.name = self.options.get("name", spec.kind)
        self.node = spec.node
        self.records: dict[bytes, bytes] = {}
        self.numbers: dict[str, Any] = {}

    def open(self) -> None:
        """There is nothing to connect to."""

    def peek(self, key: bytes) -> bool | None:
        raise AssertionError("the loop must not call another package's code")

    def has_other_writers(self) -> bool:
        raise AssertionError("the loop must not call another package's code")

    def find(self, keys: Sequence[bytes]) -> list[bool]:
        return [key in self.records for key in keys]

    def get(self, items: Sequence[ReadRequest]) -> list[TierError | None]:
        errors: list[TierError | None] = []
        for item in items:
            record = self.records.get(item.key)
            errors.append(None if record else MissingError("it is not there"))
            if record:
                item.pieces[0][:] = record[: len(item.pieces[0])]
        return errors

    def put(self, items: Sequence[WriteRequest]) -> list[TierError | None]:
        for item in items:
            self.records[item.key] = b"".join(item.pieces)
        return [None] * len(items)

    def discard(self, keys: Sequence[bytes], damaged: bool = False) -> None:
        for key in keys:
            self.records.pop(key, None)

    def keys(self) -> Iterator[bytes]:
        return iter(list(self.records))

    def gauges(self) -> Mapping[str, float]:
        return self.numbers

    def close(self) -> None:
        """Nothing is open."""


class WrongTier(PlugInTier):
    """What it returns has not the form of the contract."""

    answers: Any = ()

    def find(self, keys: Sequence[bytes]) -> list[bool]:
        found: list[bool] = self.answers
        return found

    def get(self, items: Sequence[ReadRequest]) -> list[TierError | None]:
        errors: list[TierError | None] = self.answers
        return errors

    put = get  # type: ignore[assignment]


class Unrelated:
    """No tier."""


def made(url: str) -> Tier:
    return make_tier(parse_tier(url, "tier"), "here")


def wrapped(tier_class: type[PlugInTier] = PlugInTier) -> tuple[ForeignTier, PlugInTier]:
    """Returns a tier as the daemon has it, and the one inside."""
    spec = parse_tier("mine://place", "tier", "here")
    inner = tier_class(spec)
    return ForeignTier(inner), inner


def test_a_class_of_the_url_is_a_tier_under_its_scheme() -> None:
    tier = made(f"mine://place?class={HERE}:PlugInTier")
    assert isinstance(tier, EncodedTier)
    assert tier.name == "mine"
    sample = make_sample(1)
    assert tier.put([sample.write_request()]) == [None]
    assert isinstance(read(tier, make_sample(2)), MissingError)
    assert tier.find([sample.key]) == [True]


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("mine://place", "no installed package registers the scheme 'mine'"),
        ("dsk:///place", "did you mean 'disk'"),
        (f"disk:///place?class={HERE}:PlugInTier", "'disk' is registered by hybridkv"),
        (f"mine://place?class={HERE}:Absent", "cannot be loaded"),
        ("mine://place?class=no_such_module:Tier", "PYTHONPATH works"),
        (f"mine://place?class={HERE}:Unrelated", "no subclass"),
        (f"mine://place?class={HERE}:made", "no subclass"),
        (f"mine://place?class={HERE}:PlugInTier&raises=some+fault", "RuntimeError: some fault"),
        (f"mine://place?class={HERE}:PlugInTier&speed=1", "unknown option 'speed'"),
        (f"mine://place?class={HERE}:PlugInTier&name=my+tier", "self.name = spec.kind works"),
        (f"mine://place?class={HERE}:PlugInTier&name=", "self.name = spec.kind works"),
        ("mine://place?class=PlugInTier", "class=my_package.tier:MyTier works"),
        ("mine://place?class=a:b:c", "class=my_package.tier:MyTier works"),
        ("mine://place?class=", "class=my_package.tier:MyTier works"),
    ],
)
def test_what_cannot_be_made_is_one_sentence(url: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        made(url)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def install(place: Path, package: str, scheme: str, value: str) -> None:
    """Put on a path what an installer leaves of a package with one entry point."""
    metadata = place / f"{package}-1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(f"[hybridkv.tiers]\n{scheme} = {value}\n")


def test_an_installed_package_registers_its_scheme(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "kv_mine", "mine", f"{HERE}:PlugInTier")
    install(tmp_path, "kv_broken", "broken", "no_such_module:Tier [fast]")
    monkeypatch.syspath_prepend(tmp_path)
    assert made("mine://place").name == "mine"
    with pytest.raises(ConfigError, match=r"pip install 'kv_broken\[fast\]' works"):
        made("broken://place")


def test_a_scheme_of_two_packages_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "kv_mine", "disk", f"{HERE}:PlugInTier")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="'disk' is registered by hybridkv and kv_mine"):
        made(f"disk://{tmp_path}/kv")


def test_the_node_is_the_daemons() -> None:
    tier = make_tier(parse_tier(f"mine://place?class={HERE}:PlugInTier", "tier"), "node-7")
    inner = tier._tier._tier  # type: ignore[attr-defined] # noqa: SLF001
    assert inner.node == "node-7"


def test_the_loop_calls_none_of_its_code() -> None:
    tier, inner = wrapped()
    inner.numbers = {"bytes": 5}
    assert tier.peek(bytes(KEY_BYTES)) is None
    assert tier.has_other_writers()
    assert tier.gauges() == {}
    tier.tend()
    assert tier.gauges() == {"bytes": 5.0}
    inner.numbers = {"bytes": 6}
    assert tier.gauges() == {"bytes": 5.0}


def test_gauges_that_are_no_numbers_are_left_out() -> None:
    tier, inner = wrapped()
    inner.numbers = {"bytes": -1, "bytes_max": math.nan, "objects": "many", "own": 1}
    tier.open()
    assert tier.gauges() == {}


@pytest.mark.parametrize("answers", [[], [None, None], ["well"], [7], [TierError]])
def test_answers_of_another_form_are_an_error(answers: list[Any]) -> None:
    tier, inner = wrapped(WrongTier)
    inner.answers = answers  # type: ignore[attr-defined]
    sample = make_sample(1)
    for call in (
        lambda: tier.find([sample.key]),
        lambda: tier.use([sample.key]),
        lambda: tier.get([ReadRequest(sample.key, [pages(4096)])]),
        lambda: tier.put([sample.write_request()]),
    ):
        with pytest.raises(TierError, match="WrongTier"):
            call()
