"""ops/: every daemon metric of the dashboard and alerts exists, and Prometheus reads the rules."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

from tests.unit.observe.describe_metrics import exposed

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
"""What vLLM has, and what the MultiConnector adds, without `vllm:`."""


def queries() -> list[str]:
    """Every expression of the dashboard and of the alerts."""
    asked = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]
    asked += [
        variable["definition"]
        for variable in DASHBOARD["templating"]["list"]
        if "definition" in variable
    ]
    return [*asked, *(rule["expr"] for rule in RULES)]


def test_every_metric_of_the_daemon_exists() -> None:
    named = {name for query in queries() for name in re.findall(r"hybridkv_daemon_\w+", query)}
    assert len(named) > 30
    assert named <= set(exposed())


def test_every_metric_of_vllm_is_one_that_we_know() -> None:
    named = {name for query in queries() for name in re.findall(r"vllm:(\w+)", query)}
    assert named == OF_VLLM


def test_labels_are_those_that_the_metrics_have() -> None:
    known = {label for described in exposed().values() for label in described.labels}
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
        for name, described in exposed().items():
            for found in re.finditer(rf"(\w+ ?\()?{name}(?!\w)", query):
                grows = (found[1] or "").rstrip("( ") in ("rate", "increase")
                assert grows == (described.kind != "gauge"), f"{name} in {query}"


def test_panels_do_not_lie_on_each_other() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
        assert place["x"] + place["w"] <= 24
        assert panel["type"] == "row" or panel["description"]
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))


def test_every_alert_says_what_is_wrong_and_what_to_do() -> None:
    assert len({rule["alert"] for rule in RULES}) == len(RULES) >= 8
    for rule in RULES:
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert set(rule["annotations"]) == {"summary", "description"}


def promtool() -> str:
    """Prometheus' own checker."""
    found = os.environ.get("PROMTOOL") or shutil.which("promtool")
    if found is None:
        pytest.skip("needs promtool (Debian: prometheus), or PROMTOOL=/its/path")
    return found


def test_prometheus_reads_the_rules_and_the_configuration() -> None:
    for check in (["rules", "alerts.yml"], ["config", "prometheus.yml"]):
        said = subprocess.run(
            [promtool(), "check", *check], cwd=OPS, capture_output=True, text=True, check=False
        )
        assert said.returncode == 0, said.stdout + said.stderr


SERIES = {
    "tier_is_open": "{tier='disk'} 0x20",
    "ceiling_tokens_total": " 0+90x800",
    "ceiling_hit_tokens_total": " 0+50x800",
    "ceiling_asked_tokens_total": " 0+100x800",
    "evicted_total": " 0+3x800",
    "deadlines_missed_total": " 0+2x800",
    "lookups_waited_total": " 0+10x800",
    "loads_failed_total": " 0x800",
}


def fill(text: str, labels: dict[str, str]) -> str:
    """An annotation as Prometheus tells it."""
    return re.sub(r"\{\{ \$labels\.(\w+) \}\}", lambda found: labels.get(found[1], ""), text)


def test_alerts_sound_when_they_should(tmp_path: Path) -> None:
    """By Prometheus itself, on series that are drawn up here."""

    def expect(minute: int, name: str, *labels: dict[str, str]) -> dict[str, object]:
        rule = next(rule for rule in RULES if rule["alert"] == name)
        severity = {"severity": rule["labels"]["severity"]}
        filled = [
            {
                "exp_labels": {**one, **severity},
                "exp_annotations": {
                    key: fill(text, one) for key, text in rule["annotations"].items()
                },
            }
            for one in labels
        ]
        return {"eval_time": f"{minute}m", "alertname": name, "exp_alerts": filled}

    node = {"instance": "n"}
    series = [
        {
            "series": f"hybridkv_daemon_{name}{{instance='n'{',' if labels else ''}{labels}}}",
            "values": values,
        }
        for name, said in SERIES.items()
        for labels, _, values in [
            said.lstrip("{").partition("} ") if "{" in said else ("", "", said.strip())
        ]
    ]
    tests = {
        "rule_files": [str(OPS / "alerts.yml")],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": series,
                "alert_rule_test": [
                    expect(3, "HybridKVTierNotOpen"),
                    expect(8, "HybridKVTierNotOpen", {**node, "tier": "disk"}),
                    expect(30, "HybridKVMoreMemoryWouldHelp"),
                    expect(500, "HybridKVMoreMemoryWouldHelp", node),
                    expect(60, "HybridKVDeadlinesMissed", node),
                    expect(60, "HybridKVLoadsFail"),
                ],
            }
        ],
    }
    path = tmp_path / "test.yml"
    path.write_text(yaml.safe_dump(tests))
    said = subprocess.run(
        [promtool(), "test", "rules", str(path)], capture_output=True, text=True, check=False
    )
    assert said.returncode == 0, said.stdout + said.stderr
