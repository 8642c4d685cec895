"""What `hybridkv serve` refuses before it serves: one sentence each, and nothing is left behind."""

from pathlib import Path

import pytest

from hybridkv.cli.main import main
from hybridkv.core.errors import ConfigError
from hybridkv.core.paths import check_node_name
from hybridkv.server import place


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The sentence."""
    assert main(["serve", *words]) == 2
    said = capsys.readouterr().err
    assert said.startswith("hybridkv: ")
    assert said.count("\n") == 1
    assert "works" in said
    return said


@pytest.mark.parametrize("name", ["", ".", "..", "rack1/gpu7", "../../x", "/", "a\0b", "\udcff", "x" * 201])
def test_a_node_is_one_component_of_a_path(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "--socket", str(tmp_path / "run/d.sock"), "--disk", str(tmp_path / "disk"), "--node", name)
    assert said.startswith("hybridkv: node")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("host", ["gpu7", "rack1/gpu7", "..", "", "\udcff\0 ü", "h" * 255])
def test_the_node_that_is_not_named_can_be_used(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: host)
    assert check_node_name(place.node_name(Path("/run/d.sock"))).startswith("gpu7-" if host == "gpu7" else "")
    assert place.node_name(Path("/run/d.sock")) != place.node_name(Path("/run/e.sock"))


def test_a_plain_name_is_kept() -> None:
    assert check_node_name("gpu7.rack1 [a]") == "gpu7.rack1 [a]"
    with pytest.raises(ConfigError, match='"gpu7" works'):
        check_node_name("a/b")
