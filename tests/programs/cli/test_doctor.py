"""`hybridkv doctor`: this machine and its daemon; tests/engine/test_doctor.py has vLLM's part."""

import json
import os
from pathlib import Path

import pytest

from hybridkv.cli import main, tier_findings
from hybridkv.cli.plan import host_findings, logout_finding, split_pair
from hybridkv.client.control import ControlClient
from hybridkv.core.daemon_settings import DaemonSettings
from hybridkv.core.errors import ConfigError
from hybridkv.core.findings import Finding, Verdict, fail, ok
from hybridkv.core.settings import Settings
from hybridkv.core.tier_urls import parse_tier
from hybridkv.lab.configuration import ConfigReport, serve_command
from hybridkv.lab.daemon_process import DaemonProcess
from hybridkv.wire.messages import ReportStale
from tests.layouts import LAYOUTS
from tests.unit.core.test_capacity import preview
from tests.unit.daemon.harness import engine_hello
from tests.unit.daemon.tierclient import stats
from tests.waiting import until


def host(settings: Settings) -> dict[str, Finding]:
    answer = ConfigReport(settings=settings, preview=preview(LAYOUTS["gemma4"], 4096))
    return {finding.check: finding for finding in host_findings(answer)}


def at(socket_path: Path | str, ram_bytes: int | None = None) -> Settings:
    return Settings(server=f"unix://{socket_path}", daemon=DaemonSettings(ram_bytes=ram_bytes))


@pytest.mark.parametrize(
    ("line", "arguments", "variables"),
    [
        ("vllm serve m --seed 1", "m --seed 1", {}),
        ("serve m", "m", {}),
        ("m serve", "m serve", {}),
        ("--model vllm", "--model vllm", {}),
        ("/opt/vllm/bin/vllm serve m", "m", {}),
        ("python3 -m vllm.entrypoints.openai.api_server --model m", "--model m", {}),
        ("/usr/bin/python -m vllm.entrypoints.cli.main serve m", "m", {}),
        ("A=1 B=x=y nohup vllm serve m C=3", "m C=3", {"A": "1", "B": "x=y"}),
        ("env HF_HUB_OFFLINE= uv run vllm serve m", "m", {"HF_HUB_OFFLINE": ""}),
    ],
)
def test_a_whole_command_line_may_be_pasted(
    line: str, arguments: str, variables: dict[str, str]
) -> None:
    assert serve_command(line.split()) == (arguments.split(), variables)


def test_a_remedy_can_be_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is on one line below the table, however long it is."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    remedy = f"--kv-transfer-config '{json.dumps({'key': 'x' * 300})}' works"
    monkeypatch.setattr(
        "hybridkv.lab.configuration.inspect_arguments",
        lambda *_, **__: ConfigReport([fail("connector", "there is none", remedy)]),
    )
    assert main.main(["doctor", "--", "vllm", "serve", "m"]) == 1
    assert f"connector: {remedy}" in capsys.readouterr().out.splitlines()


def test_a_running_daemon_is_asked(daemon: DaemonProcess) -> None:
    found = host(at(daemon.socket_path))
    assert {check: finding.verdict for check, finding in found.items()} == dict.fromkeys(
        ("socket", "daemon", "arena", "memory", "room"), Verdict.OK
    )
    assert "64MiB of memory" in found["daemon"].what
    assert found["room"].what.startswith("64MiB hold ")


def test_engines_whose_weights_cannot_be_read_are_a_warning(daemon: DaemonProcess) -> None:
    hello = engine_hello(LAYOUTS["qwen3"])
    with ControlClient(daemon.socket_path, hello=hello) as engine:
        engine.tell(ReportStale(False, unread=7))
        until(lambda: stats(daemon.socket_path)["engines_unread"] == 1, "the daemon heard it")
        found = host(at(daemon.socket_path))["daemon's engines"]
    assert found.verdict is Verdict.WARN
    assert found.what.startswith("1 engines share with no other")


def test_no_daemon_at_a_socket_of_ones_own_is_a_warning_that_says_how_to_start_one(
    tmp_path: Path,
) -> None:
    found = host(at(tmp_path / "none.sock"))["daemon"]
    assert found.verdict is Verdict.WARN
    assert found.remedy.startswith('start one: "hybridkv serve --socket')


def test_another_users_daemon_fails(
    other_users_socket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = host(at(other_users_socket))
    assert found["daemon"].verdict is Verdict.FAIL
    assert "another user" in found["daemon"].what
    assert found["socket"].verdict is Verdict.FAIL
    assert found["daemon"].remedy == '"auto" works'
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert host(Settings())["daemon"].verdict is Verdict.OK, "the remedy is tried"


def test_more_memory_than_there_is_fails(tmp_path: Path) -> None:
    found = host(at(tmp_path / "none.sock", 100 << 40))["memory"]
    assert found.verdict is Verdict.FAIL
    assert found.remedy.endswith("works")


@pytest.mark.parametrize("failed", [False, True])
def test_the_exit_status_says_whether_anything_failed(
    failed: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    findings = [
        ok("vllm", "0.32.0"),
        *([fail("chunk", "it is [odd]", "hybrid_chunk_size 256 works")] if failed else []),
    ]
    monkeypatch.setattr(
        "hybridkv.lab.configuration.inspect_arguments",
        lambda *_, **__: ConfigReport(list(findings), identity="ab" * 32),
    )
    assert main.main(["doctor", "--json", "--", "vllm", "serve", "m"]) == failed
    document = json.loads(capsys.readouterr().out)
    assert document["ok"] is not failed
    assert document["identity"] == "ab" * 32
    assert [check["check"] for check in document["checks"]][:1] == ["vllm"]
    assert main.main(["doctor", "--", "vllm", "serve", "m"]) == failed
    table = capsys.readouterr().out
    assert ("it is [odd]" in table) is failed
    assert f"{int(failed)} failed, " in table


def test_two_command_lines_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each is checked with the variables before it, which end with it."""
    seen: list[tuple[list[str], str | None]] = []

    def inspect_arguments(arguments: list[str], **_: object) -> ConfigReport:
        seen.append((arguments, os.environ.get("PYTHONHASHSEED")))
        number = f"{len(seen)}"
        return ConfigReport(
            [ok("vllm", "0.32.0")],
            identity=number * 64,
            options={"--dtype": number},
            role="kv_both",
        )

    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    monkeypatch.setattr("hybridkv.lab.configuration.inspect_arguments", inspect_arguments)
    first = ["PYTHONHASHSEED=7", "vllm", "serve", "m", "--dtype", "1"]
    words = ["--", *first, "--", "vllm", "serve", "n"]
    assert main.main(["doctor", "--json", *words]) == 1
    document = json.loads(capsys.readouterr().out)
    assert seen == [(["m", "--dtype", "1"], "7"), (["n"], None)]
    assert (document["identity"], document["second"]["identity"]) == ("1" * 64, "2" * 64)
    failed = [check["remedy"] for check in document["pair"] if check["verdict"] == "FAIL"]
    assert failed == ["--dtype 1 for both works"]
    assert main.main(["doctor", *words]) == 1
    assert "pair: --dtype 3 for both works" in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("line", ["a -- b -- c", "a --", "-- a"])
def test_another_number_of_command_lines_is_one_sentence(line: str) -> None:
    with pytest.raises(ConfigError, match="are not a pair of engines"):
        split_pair(line.split())


def test_a_socket_that_goes_with_the_last_logout(tmp_path: Path) -> None:
    """Unless the user lingers, or is a service's."""
    warned = logout_finding("/run/user/54301/hybridkv/daemon.sock", 54301, tmp_path)
    assert warned is not None
    assert (warned.verdict, warned.check) == (Verdict.WARN, "socket")
    assert warned.remedy == '"loginctl enable-linger 54301" keeps them'
    assert logout_finding("/run/user/999/hybridkv/daemon.sock", 999, tmp_path) is None
    assert logout_finding("/tmp/hybridkv-54301/daemon.sock", 54301, tmp_path) is None
    (tmp_path / "54301").touch()
    assert logout_finding("/run/user/54301/hybridkv/daemon.sock", 54301, tmp_path) is None


def measured(url: str, prefill: float | None = None) -> Finding:
    """The finding about a tier, measured with 4 MiB of a model's objects."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tier_findings, "MEASURED_BYTES", 4 << 20)
        spec = parse_tier(url, "--tier")
        return tier_findings.tier_finding(spec, preview(LAYOUTS["gemma4"], 4096), prefill)


def test_a_measured_tier_says_from_when_on_it_pays(tmp_path: Path) -> None:
    url = f"disk://{tmp_path}/kv?bytes=1GiB"
    finding = measured(url)
    assert finding.verdict is Verdict.OK
    assert "a hit of 4,096 tokens reads" in finding.what
    assert list((tmp_path / "kv").iterdir()) == [], "nothing is left"
    slow = measured(url, prefill=1e9)
    assert slow.verdict is Verdict.WARN
    assert "yours computes 1,000,000,000: such hits are computed" in slow.what
    assert measured(url, prefill=1.0).verdict is Verdict.OK


def test_a_tier_that_cannot_be_used_fails_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    finding = measured(f"disk://{tmp_path}/file/kv")
    assert finding.verdict is Verdict.FAIL
    assert "cannot be used" in finding.sentence


def test_a_prefill_that_is_no_number_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["doctor", "--prefill", "fast"]) == 2
    assert "--prefill" in capsys.readouterr().err
