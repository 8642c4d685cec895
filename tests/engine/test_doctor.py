"""`hybridkv doctor` and the connector refuse for the same reasons."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from hybridkv.cli.main import main
from hybridkv.core.errors import ConfigError
from hybridkv.core.findings import Finding, Verdict
from hybridkv.core.settings import TRANSFER
from hybridkv.lab.configuration import PREVIEW_ENVIRONMENT, ConfigReport
from hybridkv.lab.models import bundled_arguments, bundled_environment, bundled_models
from hybridkv.lab.pairs import EngineOfPair, pair_findings
from hybridkv.vllm.preflight import CONNECTOR
from tests.engine.forked import ForkedChild, lines_of
from tests.engine.support import CommandReport

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]


ON_TWO_NODES = {"server": "unix:///run/hybridkv/daemon.sock", "nodes": 2}


def config(**changes: Any) -> Any:
    """The parts of a VllmConfig that the rules read, all as they should be but for `changes`."""
    values: dict[str, Any] = {
        "kv_connector": "HybridKVConnector",
        "kv_connector_module_path": "hybridkv.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {},
        "enable_prefix_caching": True,
        "calculate_kv_scales": False,
        "cache_dtype": "auto",
        "prefix_caching_hash_algo": "sha256",
        "prefix_cache_retention_interval": 0,
        "distributed_executor_backend": "mp",
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "nnodes_within_dp": 1,
        "data_parallel_size": 1,
        "enable_eplb": False,
        "disable_hybrid_kv_cache_manager": False,
        "max_num_batched_tokens": 2048,
        "enable_chunked_prefill": True,
        "speculative_config": None,
        "pooler_config": None,
        "is_diffusion": False,
        "use_mla": False,
    } | changes
    part = SimpleNamespace(**values)
    return SimpleNamespace(
        kv_transfer_config=part,
        model_config=part,
        cache_config=part,
        parallel_config=part,
        scheduler_config=part,
        speculative_config=part.speculative_config,
    )


def findings(**changes: Any) -> list[Finding]:
    from hybridkv.vllm.preflight import config_findings, transfer_findings

    vllm_config = config(**changes)
    return [*transfer_findings(vllm_config.kv_transfer_config), *config_findings(vllm_config)]


def test_what_should_be_is_all_ok(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    assert {finding.verdict for finding in findings()} == {Verdict.OK}
    several = findings(kv_connector_extra_config=ON_TWO_NODES, tensor_parallel_size=2)
    assert {finding.verdict for finding in several} == {Verdict.OK}
    assert "2 nodes with 1 of 2 ranks each" in str(several)


@pytest.mark.parametrize(
    ("changes", "verdict", "sentence"),
    [
        ({"kv_connector": "NixlConnector"}, "FAIL", "NixlConnector.*HybridKVConnector"),
        (
            {"kv_connector_module_path": None},
            "FAIL",
            '"kv_connector_module_path":"hybridkv.connector" works',
        ),
        ({"kv_connector": None}, "FAIL", "names no connector.*--kv-transfer-config '.*' works"),
        (
            {"kv_connector_extra_config": {"sever": 1}},
            "FAIL",
            "unknown key 'sever'; did you mean 'server'",
        ),
        (
            {
                "pipeline_parallel_size": 2,
                "speculative_config": SimpleNamespace(method="ngram", num_speculative_tokens=1),
            },
            "FAIL",
            "=2 is not supported yet with speculation; --pipeline-parallel-size 1 works",
        ),
        (
            {"tensor_parallel_size": 2, "distributed_executor_backend": "external_launcher"},
            "FAIL",
            'a scheduler of its own.*; distributed_executor_backend="mp" works, and so does',
        ),
        ({"decode_context_parallel_size": 2}, "FAIL", "--decode-context-parallel-size 1 works"),
        ({"prefill_context_parallel_size": 2}, "FAIL", "--prefill-context-parallel-size 1 works"),
        (
            {"nnodes_within_dp": 2, "tensor_parallel_size": 2},
            "FAIL",
            'on one of 2 nodes; `hybridkv serve` on each node and "server":"unix:///.*" works',
        ),
        (
            {"tensor_parallel_size": 3, "kv_connector_extra_config": ON_TWO_NODES},
            "FAIL",
            "nodes=2 do not divide 3 ranks; nodes with as many ranks each work",
        ),
        (
            {
                "tensor_parallel_size": 2,
                "kv_connector_extra_config": {"share_tp": 3, "weights_identity": "v1"},
            },
            "FAIL",
            'share_tp=3 is no multiple of tensor_parallel_size 2; "share_tp": 4 works',
        ),
        (
            {"speculative_config": SimpleNamespace(method="medusa")},
            "FAIL",
            "without --speculative-config works",
        ),
        ({"calculate_kv_scales": True}, "FAIL", "without --calculate-kv-scales works"),
        (
            {"disable_hybrid_kv_cache_manager": True},
            "warn",
            "--no-disable-hybrid-kv-cache-manager works",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_each_rule_names_the_setting_that_works(
    changes: dict[str, Any], verdict: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import re

    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    found = [finding for finding in findings(**changes) if finding.verdict is not Verdict.OK]
    assert found, "the rule says nothing"
    assert {str(finding.verdict) for finding in found} == {verdict}
    assert re.search(sentence, found[0].sentence), found[0].sentence


def test_a_seed_of_ones_own_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    (found,) = [finding for finding in findings() if finding.verdict is not Verdict.OK]
    assert found.sentence.endswith("unset PYTHONHASHSEED works")


@pytest.mark.parametrize("version", ["0.29.1", "0.34.0", "1.32.0"])
def test_a_vllm_that_nobody_ran_it_on_is_refused(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another minor version has other hooks and other layouts (A38)."""
    monkeypatch.setattr("vllm.__version__", version)
    (found,) = [finding for finding in findings() if finding.verdict is Verdict.FAIL]
    why = {"0.29.1": "cannot report a load that failed"}
    what = why.get(version, "is not one that hybridkv was run on")
    assert found.sentence == f"vllm {version} {what}; vllm 0.30 to 0.33 works"


def test_the_connector_raises_what_doctor_shows() -> None:
    from hybridkv.connector.connector import check_config

    several = config(nnodes_within_dp=2)
    with pytest.raises(ConfigError) as caught:
        check_config(several, SimpleNamespace(prefix_cacheable_group_ids=()))
    shown = [f.sentence for f in findings(nnodes_within_dp=2) if f.verdict is Verdict.FAIL]
    assert [str(caught.value)] == shown


def doctor(*arguments: str) -> CommandReport:
    """Run the command, whose child imports vLLM."""
    process = subprocess.run(
        [sys.executable, "-m", "hybridkv", "doctor", "--json", "--", "vllm", "serve", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.stdout, process.stderr
    return CommandReport(process.returncode, json.loads(process.stdout))


def forked_doctor(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> CommandReport:
    """Run the command, whose child is a fork."""
    monkeypatch.setattr("hybridkv.lab.configuration.AnsweringChild", ForkedChild)
    status = main(["doctor", "--json", "--", "vllm", "serve", *arguments])
    return CommandReport(status, json.loads(capsys.readouterr().out))


def test_a_whole_command_line_with_several_faults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All of them at once, where the engine would stop at the first."""
    transfer = {
        "kv_connector": "HybridKVConnector",
        "kv_connector_module_path": "hybridkv.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "server": f"unix://{tmp_path}/none.sock",
            "hybrid_chunk_size": 200,
            "ram": "100TiB",
        },
    }
    status, report = forked_doctor(
        monkeypatch,
        capsys,
        str(bundled_models()["qwen3next"]),
        "--skip-tokenizer-init",
        "--max-model-len=4096",
        "--port=8001",
        "--kv-transfer-config",
        json.dumps(transfer),
    )
    assert status == 1
    checks = {check["check"]: check for check in report["checks"]}
    assert {name for name, check in checks.items() if check["verdict"] == "FAIL"} == {
        "chunk",
        "memory",
    }
    assert checks["chunk"]["what"].startswith("hybrid_chunk_size=200 is not a multiple of")
    assert checks["daemon"]["verdict"] == "warn"


def inspected(*arguments: str) -> dict[str, Finding]:
    """Returns the findings of a command line that vLLM refuses before it builds a model."""
    from hybridkv.lab.configuration_child import inspect

    found = {}
    for finding in inspect([*arguments, "--kv-transfer-config", json.dumps(CONNECTOR)]).findings:
        if finding.check not in found or finding.verdict is Verdict.FAIL:
            found[finding.check] = finding
    return found


@pytest.mark.parametrize(
    ("option", "text", "what"),
    [
        ("--kv-transfer-config", "{bad", "Invalid JSON: key must be a string at line 1 column 2"),
        ("--kv-transfer-config", '{"kv_role":"x"}', "kv_role: Input should be 'kv_producer'"),
        ("--compilation-config", "{bad", "Invalid JSON"),
    ],
)
def test_json_that_cannot_be_read_is_one_sentence(option: str, text: str, what: str) -> None:
    from hybridkv.lab.configuration_child import inspect

    report = inspect(["m", option, text])
    assert report.unreadable.startswith(option)
    assert f": {what}" in report.unreadable
    assert "\n" not in report.unreadable
    is_ours = option == "--kv-transfer-config"
    works = json.dumps(TRANSFER, separators=(",", ":")) if is_ours else "one JSON object"
    assert works in report.readable


def test_a_model_that_is_not_there_has_a_remedy(tmp_path: Path) -> None:
    refused = inspected(str(tmp_path))["vllm arguments"]
    assert refused.verdict is Verdict.FAIL
    assert "a directory with a config.json works" in refused.remedy


def test_what_vllm_refuses_by_itself_is_said_to_be_so() -> None:
    model = str(bundled_models()["qwen3"])
    refused = inspected(model, "--skip-tokenizer-init", "--max-model-len=100000000")
    assert refused["vllm arguments"].remedy.startswith("vLLM refuses it without hybridkv too")


def test_offloading_of_vllm_is_refused_by_its_name(tmp_path: Path) -> None:
    """It takes this connector's place. doctor itself made vLLM look for its class here."""
    found = inspected(str(tmp_path), "--kv-offloading-size=4")
    assert found["connector"].what.startswith("--kv-offloading-size has vLLM serve its own")
    assert "OffloadingConnector not found" not in str(found)


def report_of(role: str, log_path: Path, *arguments: str) -> ConfigReport:
    """Returns what an engine in a role would be."""
    transfer = json.dumps({**CONNECTOR, "kv_role": role})
    words = [str(bundled_models()["qwen3"]), *bundled_arguments("qwen3"), *arguments]
    words += ["--kv-transfer-config", transfer]
    variables = {**PREVIEW_ENVIRONMENT, **os.environ, **bundled_environment("qwen3")}
    lines = lines_of("tests.engine.promise", words, log_path, variables)
    (report,) = (line for line in lines if line.startswith("{"))
    return msgspec.json.decode(report, type=ConfigReport)


def test_two_real_command_lines_are_compared(tmp_path: Path) -> None:
    """What does not shape the KV may differ, and each option that does is named alone."""
    words = ("--max-num-batched-tokens=256", "--max-num-seqs=8")
    prefill = report_of("kv_producer", tmp_path / "prefill.log")
    decode = report_of("kv_consumer", tmp_path / "decode.log", *words)
    apart = ("--dtype=bfloat16", "--block-size=64", "--tensor-parallel-size=2")
    other = report_of("kv_consumer", tmp_path / "other.log", *apart)
    pair = EngineOfPair(prefill, "/a")
    right = pair_findings(pair, EngineOfPair(decode, "/a"))
    assert {finding.verdict for finding in right} == {Verdict.OK}
    wrong = pair_findings(pair, EngineOfPair(other, "/a"))
    failed = [finding for finding in wrong if finding.verdict is Verdict.FAIL]
    assert sorted(finding.remedy.split()[0] for finding in failed) == [
        "--block-size",
        "--dtype",
        "--tensor-parallel-size",
    ]
    for finding in failed:
        option, value = finding.remedy.split()[:2]
        assert finding.what.startswith(f"{option} is {value} for the first and ")


@pytest.mark.soak
def test_several_connectors_are_looked_into() -> None:
    ours = {**CONNECTOR, "kv_connector_extra_config": {"load_weight": 2, "checksum": "of"}}
    example = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    several = {**CONNECTOR, "kv_connector": "MultiConnector"}
    status, report = doctor(
        str(bundled_models()["qwen3"]),
        "--skip-tokenizer-init",
        "--kv-transfer-config",
        json.dumps(
            {**several, "kv_connector_extra_config": {"connectors": [CONNECTOR, ours, example]}}
        ),
    )
    assert status == 1
    shown = [(check["check"], check["verdict"]) for check in report["checks"]]
    assert ("connector", "ok") in shown
    assert ("connectors", "ok") in shown
    (identity,) = [check for check in report["checks"] if check["check"] == "identity"]
    assert identity["verdict"] == "ok"
    assert identity["what"].endswith(
        "; weights are read once they are loaded, in up to 60 s, and for the rest in idle steps"
    )
    assert [verdict for check, verdict in shown if check == "settings"] == ["ok", "FAIL"]
    (wrong,) = [check for check in report["checks"] if check["verdict"] == "FAIL"]
    assert "checksum='of' must be one of" in wrong["what"]


@pytest.mark.soak
def test_an_option_that_vllm_does_not_have_is_one_clear_line() -> None:
    process = subprocess.run(
        [
            sys.executable,
            "-m",
            "hybridkv",
            "doctor",
            "--",
            "vllm",
            "serve",
            "m",
            "--tensor-paralel",
            "2",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 2
    assert process.stderr.splitlines()[-1].startswith(
        "hybridkv: unrecognized arguments: --tensor-paralel 2; "
    )
