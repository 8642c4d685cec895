"""Where a user's own daemon listens, by what the environment says."""

import os
from pathlib import Path

import pytest

from hybridkv.client.control import runtime_directory


def test_only_a_directory_of_ones_own_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sudo, cron and services inherit the name of another user's directory, or of none."""
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    assert runtime_directory() == ""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert runtime_directory() == str(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "gone"))
    assert runtime_directory() == ""
    if os.geteuid() == 0:
        os.chown(tmp_path, 65534, 65534)
    others = tmp_path if os.geteuid() == 0 else Path("/")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(others))
    assert runtime_directory() == ""
