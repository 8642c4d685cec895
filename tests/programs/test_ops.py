"""ops/: every daemon metric of the dashboard and alerts exists, and Prometheus reads the rules."""

import json
import os
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml  # type: ignore[import-untyped]
from prometheus_client.parser import text_string_to_metric_families

from hybridkv.client.control import ControlClient
from tests.forked_daemon import ForkedDaemon
from tests.unit.observe.metric_names import exposed, exposed_by_engines
from tests.waiting import DEADLINE_SECONDS

OPS = Path(__file__).parents[2] / "ops"
DASHBOARD = json.loads((OPS / "grafana-hybridkv.json").read_text())
RULES = [
    rule
    for group in yaml.safe_load((OPS / "alerts.yml").read_text())["groups"]
    for rule in group["rules"]
]
OF_VLLM = {
    *("prompt_tokens_total", "prefix_cache_hits_total"),
    *("external_prefix_cache_hits_total", "external_prefix_cache_queries_total"),
    *(f"kv_connector_mc_{what}_total" for what in ("queries", "hits", "hit_tokens", "misses")),
    "kv_connector_mc_pending_loads",
}
"""The metrics of vLLM and of the MultiConnector, without `vllm:`."""


def queries() -> list[str]:
    """Returns every expression of the dashboard and of the alerts."""
    asked = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]
    asked += [
        variable["definition"]
        for variable in DASHBOARD["templating"]["list"]
        if "definition" in variable
    ]
    return [*asked, *(rule["expr"] for rule in RULES)]


def test_every_metric_of_the_daemon_exists() -> None:
    named = {
        name for query in queries() for name in re.findall(r"(?<!vllm:)hybridkv_daemon_\w+", query)
    }
    assert len(named) > 30
    assert named <= set(exposed())


def test_every_metric_of_vllm_is_one_that_we_know() -> None:
    named = {name for query in queries() for name in re.findall(r"vllm:(\w+)", query)}
    ours = {name for name in named if name.startswith("hybridkv_")}
    assert named - ours == OF_VLLM
    assert {f"vllm:{name}" for name in ours} <= set(exposed_by_engines())


def test_labels_are_those_that_the_metrics_have() -> None:
    families = {**exposed(), **exposed_by_engines()}
    known = {label for family in families.values() for label in family.labels}
    for query in queries():
        for labels in re.findall(r"by \(([\w, ]+)\)", query):
            assert set(labels.split(", ")) <= known | {
                "instance",
                "le",
                "model_name",
                "connector",
            }, query


def test_counters_are_asked_for_their_growth_and_gauges_for_their_value() -> None:
    for query in queries():
        for name, described in {**exposed(), **exposed_by_engines()}.items():
            for found in re.finditer(rf"(\w+ ?\()?{name}(?!\w)", query):
                grows = (found[1] or "").rstrip("( ") in ("rate", "increase")
                assert grows == (described.kind != "gauge"), f"{name} in {query}"


class Cell(NamedTuple):
    """A cell of the dashboard's grid."""

    x: int
    y: int


def test_panels_do_not_lie_on_each_other() -> None:
    cells_taken: set[Cell] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            Cell(x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & cells_taken, panel["title"]
        cells_taken |= cells
        assert place["x"] + place["w"] <= 24
        assert panel["type"] == "row" or panel["description"]
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))


def test_the_service_is_hardened_and_stays_ended() -> None:
    """`hybridkv stop` ends it with 0, and the memory and the sockets stay where they are."""
    unit = (OPS / "systemd" / "hybridkv.service").read_text()
    set_lines = {line for line in unit.splitlines() if not line.startswith("#")}
    assert "Restart=on-failure" in set_lines
    assert not {line for line in set_lines if line.startswith(("RemoveIPC", "PrivateUsers"))}
    if (analyze := shutil.which("systemd-analyze")) is None:
        pytest.skip("needs systemd-analyze (Debian: systemd)")
    words = [analyze, "security", "--offline=true", "--threshold=30", "systemd/hybridkv.service"]
    process = subprocess.run(words, cwd=OPS, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout + process.stderr


def test_every_alert_says_what_is_wrong_and_what_to_do() -> None:
    assert len({rule["alert"] for rule in RULES}) == len(RULES) >= 8
    for rule in RULES:
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert set(rule["annotations"]) == {"summary", "description"}


def promtool() -> str:
    """Returns the path of promtool. Skips a test where there is none."""
    found = os.environ.get("PROMTOOL") or shutil.which("promtool")
    if found is None:
        pytest.skip("needs promtool (Debian: prometheus), or PROMTOOL=/its/path")
    return found


def test_prometheus_reads_the_rules_and_the_configuration() -> None:
    for check in (["rules", "alerts.yml"], ["config", "prometheus.yml"]):
        check_run = subprocess.run(
            [promtool(), "check", *check], cwd=OPS, capture_output=True, text=True, check=False
        )
        assert check_run.returncode == 0, check_run.stdout + check_run.stderr


class AlertCase(NamedTuple):
    """The events that an alert is for."""

    alert: str
    series: Mapping[str, str]
    """The series that the events change, those of the daemon without `hybridkv_daemon_`."""
    silent_minute: int
    sounding_minute: int
    labels: Mapping[str, str] = {}
    """The alert's labels besides `instance`."""


OF_DISK = {"tier": "disk"}
ALERT_CASES = (
    AlertCase("HybridKVDaemonDown", {"up{job='hybridkv'}": "1x5 0x20"}, 9, 12, {"job": "hybridkv"}),
    AlertCase("HybridKVDaemonStuck", {"answering": "1x5 0x20"}, 6, 8),
    AlertCase("HybridKVArenaNotMapped", {"workers_unmapped": "0x5 1x20"}, 5, 8),
    AlertCase("HybridKVEngineStale", {"engines_stale": "0x5 1x20"}, 5, 8),
    AlertCase("HybridKVAuditDiffered", {"audits_differed_total": "0x9 1x20"}, 9, 11),
    AlertCase("HybridKVTierNotOpen", {"tier_is_open{tier='disk'}": "1x5 0x20"}, 9, 12, OF_DISK),
    AlertCase("HybridKVTierSick", {"tier_breaker_open{tier='disk'}": "0x5 1x20"}, 9, 12, OF_DISK),
    AlertCase("HybridKVTierRefuses", {"tier_refusing{tier='disk'}": "0x5 1x20"}, 5, 8, OF_DISK),
    AlertCase("HybridKVWrongBytes", {"objects_condemned_total": "0x9 1x20"}, 9, 11),
    AlertCase(
        "HybridKVWrongBytes",
        {"tier_objects_wrong_in_ram_total{tier='disk'}": "0x9 1x20"},
        silent_minute=9,
        sounding_minute=11,
        labels=OF_DISK,
    ),
    AlertCase(
        "HybridKVTierDamaged",
        {"tier_objects_damaged_total{tier='disk'}": "0x9 1x20"},
        silent_minute=9,
        sounding_minute=11,
        labels=OF_DISK,
    ),
    AlertCase("HybridKVLoadsFail", {"loads_failed_total": "0x9 12x20"}, 9, 11),
    AlertCase(
        "HybridKVDeadlinesMissed",
        {"deadlines_missed_total": "0x9 2+2x60", "lookups_waited_total": "0x9 10+10x60"},
        silent_minute=20,
        sounding_minute=40,
    ),
    AlertCase(
        "HybridKVMoreMemoryWouldHelp",
        {
            "ceiling_tokens_total": "0+90x800",
            "ceiling_hit_tokens_total": "0+50x800",
            "ceiling_asked_tokens_total": "0+100x800",
            "evicted_total": "0x9 1x800",
        },
        silent_minute=30,
        sounding_minute=80,
    ),
    AlertCase(
        "HybridKVEngineWithoutDaemon", {"vllm:hybridkv_daemon_connected": "1x5 0x20"}, 14, 17
    ),
    AlertCase("HybridKVEngineQuarantined", {"vllm:hybridkv_quarantined": "0x5 1x20"}, 6, 8),
    AlertCase(
        "HybridKVEngineFaults",
        {"vllm:hybridkv_faults_total{hook='h'}": "0x9 1x20"},
        silent_minute=9,
        sounding_minute=11,
        labels={"hook": "h"},
    ),
    AlertCase("HybridKVEngineLoadsOverdue", {"vllm:hybridkv_loads_overdue": "0x5 1x20"}, 9, 12),
    AlertCase(
        "HybridKVEngineWrongBytes", {"vllm:hybridkv_condemned_slots_total": "0x9 1x20"}, 9, 11
    ),
    AlertCase(
        "HybridKVLookupsNotCounted",
        {"ceiling_lookups_left_out_total": "0x9 1+1x60", "lookups_total": "0x9 10+10x60"},
        silent_minute=30,
        sounding_minute=50,
    ),
)


def fill(text: str, labels: dict[str, str]) -> str:
    """Returns an annotation with its labels filled in, as Prometheus sends it."""
    return re.sub(r"\{\{ \$labels\.(\w+) \}\}", lambda found: labels.get(found[1], ""), text)


def expected(name: str, minute: int, *labels: dict[str, str]) -> dict[str, object]:
    """Returns what promtool must find of an alert at that minute."""
    rule = next(rule for rule in RULES if rule["alert"] == name)
    alerts = [
        {
            "exp_labels": {**label_set, "severity": rule["labels"]["severity"]},
            "exp_annotations": {
                key: fill(text, label_set) for key, text in rule["annotations"].items()
            },
        }
        for label_set in labels
    ]
    return {"eval_time": f"{minute}m", "alertname": name, "exp_alerts": alerts}


@pytest.fixture
def fresh_series(tmp_path: Path) -> set[str]:
    """The series that a daemon with a directory has when nothing has happened yet."""
    options = ["--disk", str(tmp_path / "disk"), "--disk-bytes", "16MiB"]
    with ForkedDaemon(str(tmp_path / "daemon.sock"), "16MiB", 0, options=options) as daemon:
        with ControlClient(daemon.socket_path) as control:
            url = control.stats().metrics_url
        with urllib.request.urlopen(url, timeout=DEADLINE_SECONDS) as answer:
            text = answer.read().decode()
    names = set()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{name}='{value}'" for name, value in sample.labels.items())
            names.add(f"{sample.name}{{{labels}}}" if labels else sample.name)
    return names


def test_every_alert_sounds_from_the_first_event_on(tmp_path: Path, fresh_series: set[str]) -> None:
    """By Prometheus itself. A series that the daemon lacks before the event begins with it."""
    assert {case.alert for case in ALERT_CASES} == {rule["alert"] for rule in RULES}
    tests = []
    for case in ALERT_CASES:
        series = []
        for metric, values in case.series.items():
            is_ours = not metric.startswith(("up{", "vllm:"))
            full = f"hybridkv_daemon_{metric}" if is_ours else metric
            if is_ours and full not in fresh_series:
                values = values.replace("0x9", "_x9")
            full = full[:-1] + ",instance='n'}" if "{" in full else full + "{instance='n'}"
            series.append({"series": full, "values": values})
        asked = [
            expected(case.alert, case.silent_minute),
            expected(case.alert, case.sounding_minute, {"instance": "n", **case.labels}),
        ]
        tests.append({"interval": "1m", "input_series": series, "alert_rule_test": asked})
    whole = {"rule_files": [str(OPS / "alerts.yml")], "evaluation_interval": "1m", "tests": tests}
    path = tmp_path / "test.yml"
    path.write_text(yaml.safe_dump(whole))
    promtool_run = subprocess.run(
        [promtool(), "test", "rules", str(path)], capture_output=True, text=True, check=False
    )
    assert promtool_run.returncode == 0, promtool_run.stdout + promtool_run.stderr
