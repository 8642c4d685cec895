"""A release has what users run, and nothing that is for tests."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def contents() -> dict[str, str]:
    """Returns the texts of the files that go into the wheel, by their paths in it."""
    builder = pytest.importorskip("hatchling.builders.wheel").WheelBuilder(str(ROOT))
    return {
        file.distribution_path: Path(file.path).read_text()
        for file in builder.recurse_included_files()
    }


def test_the_wheel_has_no_shims_and_no_faults_on_purpose() -> None:
    """`scripts/wheel` looks at the wheel that it has installed, too."""
    files = contents()
    assert "hybridkv/lab/wide_weights.py" in files, "`verify` could not fail without it"
    assert [path for path in files if not path.startswith("hybridkv/")] == []
    assert [path for path in files if "shim" in path or "fault_injection" in path] == []


def test_the_wheel_is_one_plugin_of_vllm() -> None:
    """It registers the connector's name. A checkout's replacements of kernels are no part of it."""
    metadata = pytest.importorskip("hatchling.metadata.core")
    plugins = pytest.importorskip("hatchling.plugin.manager")
    project = metadata.ProjectMetadata(str(ROOT), plugins.PluginManager())
    plugin = {"hybridkv": "hybridkv.vllm.plugin:register"}
    assert project.core.entry_points.pop("vllm.general_plugins") == plugin
    assert project.core.entry_points.keys() == {"hybridkv.tiers"}
