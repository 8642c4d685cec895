"""Plans as text, and those of a daemon's engines; tests/engine/test_plan.py has vLLM's part."""

import json

import pytest

from hybridkv.cli import main
from hybridkv.client.control import ControlClient
from hybridkv.core.findings import fail, ok
from hybridkv.lab.configuration import ConfigReport
from hybridkv.lab.daemon_process import DaemonProcess
from tests.layouts import LAYOUTS
from tests.programs.cli.greetings import wire_model
from tests.unit.core.test_capacity import preview
from tests.unit.daemon.harness import engine_hello

LLAMA4 = LAYOUTS["llama4"]


def test_the_engines_of_a_daemon_are_planned_for_its_memory(
    daemon: DaemonProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    model = wire_model("llama", kv_dtype="auto (bfloat16)", layers=[36, 12], step_tokens=2048)
    hello = engine_hello(LLAMA4, model=model)
    with ControlClient(daemon.socket_path, hello=hello):
        assert main.main(["plan", "--socket", daemon.socket_path, "--json"]) == 0
        (planned,) = json.loads(capsys.readouterr().out)["plans"]
        assert main.main(["plan", "--socket", daemon.socket_path, "--ram", "1GiB"]) == 0
        table = capsys.readouterr().out
    assert (planned["model"], planned["kv_dtype"], planned["max_model_len"]) == (
        "llama",
        "auto (bfloat16)",
        8192,
    )
    assert [(group["kind"], group["layers"]) for group in planned["groups"]] == [
        ("chunked_local", 36),
        ("full", 12),
    ]
    assert planned["totals"]["ram_bytes"] == 64 << 20
    assert planned["groups"][0]["stored_token_bytes"] == planned["groups"][0]["token_bytes"] * 3 / 4
    assert planned["needed_speed"] is None
    read = planned["totals"]["tier_read"]
    assert read["tokens"] == 8192
    assert f"in {read['objects']} objects" in table
    assert "for each 1,000 tokens/s of prefill" in table
    assert "1GiB hold" in table
    assert "a prompt of 129 tokens" in table


def test_a_daemon_without_engines_is_one_clear_line(
    daemon: DaemonProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["plan", "--socket", daemon.socket_path]) == 2
    assert "no engine is connected" in capsys.readouterr().err


def test_a_refused_group_is_shown_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    what = "KV cache group 2 (SinkFullAttentionSpec) is not restored yet"
    remedy = "serve without the connector"
    refusal = f"{what}; {remedy}"
    seen = preview(LLAMA4, 4096, refused=refusal)
    answer = ConfigReport([ok("vllm", "0.32.0"), fail("group 2", what, remedy)], seen)
    monkeypatch.setattr("hybridkv.lab.configuration.inspect_arguments", lambda *_: answer)
    assert main.main(["plan", "--model", "some/model"]) == 1
    output = " ".join(capsys.readouterr().out.split())
    assert "SinkFullAttentionSpec" in output
    assert f"FAIL group 2: {refusal}" in output
    assert main.main(["plan", "--model", "some/model", "--json"]) == 1
    (planned,) = json.loads(capsys.readouterr().out)["plans"]
    assert planned["totals"] is None
    assert planned["groups"][2]["refusal"] == refusal


def test_what_vllm_refuses_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = ConfigReport(
        [ok("vllm", "0.32.0"), fail("vllm arguments", "vLLM says: no such model")]
    )
    monkeypatch.setattr("hybridkv.lab.configuration.inspect_arguments", lambda *_: answer)
    assert main.main(["plan", "--model", "some/model"]) == 2
    assert capsys.readouterr().err == "hybridkv: vLLM says: no such model\n"


def test_a_models_name_is_no_markup(
    daemon: DaemonProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "/models/llama[/v2][bold]:smile:\x1b[2J"
    model = wire_model(name, kv_dtype="auto[/red]", layers=[36, 12], step_tokens=2048)
    hello = engine_hello(LLAMA4, model=model)
    with ControlClient(daemon.socket_path, hello=hello):
        assert main.main(["plan", "--socket", daemon.socket_path]) == 0
        output = capsys.readouterr().out
        assert main.main(["plan", "--socket", daemon.socket_path, "--json"]) == 0
        (planned,) = json.loads(capsys.readouterr().out)["plans"]
    assert "/models/llama[/v2][bold]:smile:\ufffd[2J" in output
    assert "auto[/red]" in output
    assert planned["model"] == name


def test_a_model_directory_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    """vLLM would take it for a hub name, and report what the hub answers."""
    for words in (["plan", "--model", "/no/model"], ["doctor", "--", "vllm", "serve", "./none"]):
        assert main.main(words) == 2
        assert capsys.readouterr().err.startswith(f"hybridkv: model: there is no {words[-1]}; ")
