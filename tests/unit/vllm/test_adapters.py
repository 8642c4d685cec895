"""LoRA adapters are told apart by files, and only by those that the engine must have loaded."""

import os
import time
from pathlib import Path

import pytest
from vllm.lora.request import LoRARequest

from hybridkv.vllm.adapters import RECHECK_SECONDS, Adapter, Adapters
from tests.waiting import DEADLINE_SECONDS

LATER = 2**62


def settled(adapters: Adapters, request: LoRARequest, now: float = 0.0) -> Adapter:
    adapter = adapters.of(request, now)
    deadline = time.monotonic() + DEADLINE_SECONDS
    while adapter.identity is None and not adapter.refused:
        assert time.monotonic() < deadline
    return adapter


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "adapter_config.json").write_text('{"r": 8}')
    (tmp_path / "adapter_model.safetensors").write_bytes(bytes(3 << 20))
    return tmp_path


def test_every_byte_counts(directory: Path) -> None:
    request = LoRARequest("a", 1, str(directory))
    seen = {settled(Adapters(LATER), request).identity, settled(Adapters(LATER), request).identity}
    assert len(seen) == 1
    for name, at in (("adapter_model.safetensors", 1_500_000), ("adapter_config.json", 3)):
        with (directory / name).open("r+b") as file:
            file.seek(at)
            file.write(b"1")
        seen.add(settled(Adapters(LATER), request).identity)
    (directory / "README.md").write_text("no weight")
    seen.add(settled(Adapters(LATER), request).identity)
    assert len(seen) == 3
    assert None not in seen


def test_files_that_changed_after_the_start_are_refused(directory: Path) -> None:
    changed = settled(Adapters(1), LoRARequest("a", 1, str(directory)))
    assert "changed after the engine started" in changed.refused
    os.utime(directory / "adapter_model.safetensors", ns=(0, 0))
    os.utime(directory / "adapter_config.json", ns=(0, 0))
    assert settled(Adapters(1), LoRARequest("a", 1, str(directory))).refused, (
        "the time of change cannot be set back"
    )


def test_files_that_change_while_the_engine_runs_end_it(directory: Path) -> None:
    adapters, request = Adapters(LATER), LoRARequest("a", 1, str(directory))
    first = settled(adapters, request)
    assert adapters.of(request, RECHECK_SECONDS / 2) is first
    with (directory / "adapter_model.safetensors").open("r+b") as file:
        file.write(b"1")
    adapters.of(request, RECHECK_SECONDS * 2)
    deadline = time.monotonic() + DEADLINE_SECONDS
    while first.identity is not None:
        assert time.monotonic() < deadline
    assert "changed" in settled(adapters, request, RECHECK_SECONDS * 4).refused


@pytest.mark.parametrize("path", ["nowhere", "adapter_config.json", "empty"])
def test_what_cannot_be_read_is_refused(directory: Path, path: str) -> None:
    (directory / "empty").mkdir()
    adapter = settled(Adapters(LATER), LoRARequest("a", 1, str(directory / path)))
    assert adapter.refused
    assert adapter.identity is None


def test_an_adapter_that_was_replaced_under_its_name_is_refused_for_ever(directory: Path) -> None:
    adapters = Adapters(LATER)
    assert settled(adapters, LoRARequest("a", 1, str(directory))).identity
    assert adapters.of(LoRARequest("a", 1, str(directory), load_inplace=True), 0.0).refused
    assert adapters.of(LoRARequest("a", 1, str(directory)), 0.0).refused
    assert settled(adapters, LoRARequest("b", 2, str(directory))).identity


def test_an_adapter_that_is_replaced_in_place_names_nothing_any_more(directory: Path) -> None:
    """A request that is under way goes on with the new weights."""
    adapters = Adapters(LATER)
    old, other = (
        settled(adapters, LoRARequest(name, number, str(directory)))
        for name, number in (("a", 1), ("b", 2))
    )
    assert old.identity is not None
    adapters.of(LoRARequest("a", 1, "/elsewhere", load_inplace=True), 0.0)
    assert old.identity is None
    assert "in place" in old.refused
    assert other.identity is not None
