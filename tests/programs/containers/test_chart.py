"""What the Helm chart promises beside its resources, which tests.programs.containers.test_manifests
has."""

import json
import shlex
from pathlib import Path
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml  # type: ignore[import-untyped]

from hybridkv import __version__
from tests.programs.containers.chart import CHART, OPERATORS, VALUES, WATCHED, helm, render
from tests.programs.containers.manifests import MANIFESTS, ROOT, containers, documents

ALERTS = ROOT / "ops" / "alerts.yml"
HEADER = "# Written by scripts/chart, which says:"


def test_helm_has_nothing_against_it() -> None:
    done = helm("lint", "--strict", "--quiet", str(CHART))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_the_manifests_are_the_chart(path: Path) -> None:
    """If this fails, run scripts/chart."""
    first, command, *_ = path.read_text().splitlines()
    assert first == HEADER
    program, *words = shlex.split(command.removeprefix("#"))
    assert program == "helm"
    done = helm(*(str(CHART) if ROOT / word == CHART else word for word in words))
    assert done.returncode == 0, done.stderr
    assert list(yaml.safe_load_all(done.stdout)) == documents(path)


def test_its_version_is_the_packages() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == __version__
    (daemon,) = containers(MANIFESTS[0], "hybridkv")
    assert daemon.spec["image"] == f"hybridkv:{__version__}"


def names(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns the names that a schema knows, each with those below it."""
    return {name: names(below) for name, below in schema.get("properties", {}).items()}


def test_each_value_has_a_default_and_a_schema() -> None:
    """Defaults that are empty objects, or objects of Kubernetes, have any names."""
    known = names(json.loads((CHART / "values.schema.json").read_text()))
    assert known.pop("global") == {}, "it is Helm's own"
    assert known.pop("disk") == {"path": {}, "bytes": {}}
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert values.pop("disk") == {}
    same_names(known, values)


def same_names(known: dict[str, Any], values: dict[str, Any]) -> None:
    """Raises AssertionError where a name is in one of them alone."""
    assert known.keys() == values.keys()
    for name, below in known.items():
        if below:
            same_names(below, values[name])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"ram": "64 gigs"}, "at '/ram': '64 gigs' does not match"),
        ({"ram": 64}, "at '/ram': got number, want string"),
        ({"memory": "64GiB"}, "additional properties 'memory' not allowed"),
        ({"mode": "deployment"}, "value must be one of 'daemonset', 'sidecar'"),
        ({"uid": "1000"}, "at '/uid': got string, want integer"),
        ({"tiers": ["bucket"]}, "at '/tiers/0': 'bucket' does not match"),
        ({"args": ["serve"]}, "at '/args/0': 'serve' does not match"),
        ({"disk": {"bytes": "1TiB"}}, "properties 'path' required, if 'bytes' exists"),
        ({"directories": {"memory": "shm"}}, "at '/directories/memory': 'shm' does not match"),
        ({"metrics": {"port": 80}}, "at '/metrics/port': minimum"),
        ({"metrics": {"enabled": True}}, "metrics.tokenSecret.name is the name of the secret"),
        (
            {"metrics": {"podMonitor": {"enabled": True}}},
            "Prometheus can reach no loopback: metrics.enabled: true works",
        ),
        ({"mode": "sidecar"}, "there is no engine: engine.replicas: 1 works"),
        (
            {"mode": "sidecar", "engine": {"replicas": 1}, "disk": {"path": "/mnt/kv"}},
            'disk: a directory of the node is for mode: "daemonset"',
        ),
        (
            {"mode": "sidecar", "engine": {"replicas": 2}, "tiers": ["s3://bucket"]},
            "engine.replicas: 1 works",
        ),
    ],
    ids=str,
)
def test_wrong_values_are_refused(values: dict[str, Any], message: str, tmp_path: Path) -> None:
    (path := tmp_path / "values.yaml").write_text(yaml.safe_dump(values))
    done = helm("template", "kv", str(CHART), f"--values={path}")
    assert done.returncode != 0
    assert message in done.stderr


def watched(mode: str, path: Path) -> dict[str, dict[str, Any]]:
    """Returns the resources of a chart that Prometheus watches, by their kinds."""
    rendered = render({**WATCHED, "mode": mode, "engine": {"replicas": 1}}, path)
    return {document["kind"]: document for document in documents(rendered)}


def test_the_alerts_are_those_of_ops(tmp_path: Path) -> None:
    rule = watched("daemonset", tmp_path / "chart.yaml")["PrometheusRule"]
    assert rule["apiVersion"] == OPERATORS
    assert rule["spec"] == yaml.safe_load(ALERTS.read_text())


@pytest.mark.parametrize(("mode", "kind"), [("daemonset", "DaemonSet"), ("sidecar", "Deployment")])
def test_prometheus_finds_the_daemon(mode: str, kind: str, tmp_path: Path) -> None:
    """Its pods have the labels and the port, the token is the daemon's, and the job is the alerts'.

    What the operator takes is compared as a whole: no schema of it is at hand.
    """
    resources = watched(mode, tmp_path / "chart.yaml")
    monitor, pod = resources["PodMonitor"], resources[kind]["spec"]["template"]
    assert monitor["apiVersion"] == OPERATORS
    spec = monitor["spec"]
    assert spec["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    (daemon,) = containers(tmp_path / "chart.yaml", "hybridkv")
    (port,) = daemon.spec["ports"]
    arguments = daemon.spec["args"]
    assert f"--metrics-port={port['containerPort']}" in arguments
    (token,) = (volume for volume in daemon.pod["volumes"] if volume["name"] == "token")
    credentials = {"name": token["secret"]["secretName"], "key": token["secret"]["items"][0]["key"]}
    assert f"--metrics-token=file:{mount_path(daemon.mounts, 'token')}/token" in arguments
    (job,) = {
        rule["expr"].partition('job="')[2].partition('"')[0]
        for rule in resources["PrometheusRule"]["spec"]["groups"][0]["rules"]
        if "job=" in rule["expr"]
    }
    assert spec["podMetricsEndpoints"] == [
        {
            "port": port["name"],
            "interval": "30s",
            "authorization": {"credentials": credentials},
            "relabelings": [
                {"targetLabel": "job", "replacement": job},
                {"sourceLabels": ["__meta_kubernetes_pod_node_name"], "targetLabel": "instance"},
            ],
        }
    ]


def mount_path(mounts: dict[str, str], name: str) -> str:
    """Returns the path of a volume in a container."""
    (path,) = (path for path, volume in mounts.items() if volume == name)
    return path


@pytest.mark.parametrize("name", ["no values", "another node"])
def test_the_notes_are_what_an_engine_needs(name: str, tmp_path: Path) -> None:
    """Their lines make a pod that can be, with what the engine of the chart has."""
    values = {**VALUES[name], "engine": {"replicas": 1}}
    rendered = render(values, tmp_path / "chart.yaml")
    arguments = [str(CHART), f"--values={tmp_path / 'chart.values'}", "--dry-run=client"]
    done = helm("install", "kv", *arguments)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.partition("\nNOTES:\n")[2].splitlines()
    start = lines.index("spec:")
    spec = yaml.safe_load("\n".join(lines[start : lines.index("", start)]))["spec"]
    (engine,) = containers(rendered, "vllm")
    (noted,) = spec["containers"]
    assert noted["args"] == engine.spec["args"][:2]
    for key in ("volumeMounts", "volumes"):
        shown, real = (noted, engine.spec) if key == "volumeMounts" else (spec, engine.pod)
        assert shown[key] == [entry for entry in real[key] if entry["name"] != "home"]
    assert spec["securityContext"] == engine.pod["securityContext"]
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "engine"}, "spec": spec}
    kubernetes_validate.validate(pod, kubernetes_validate.latest_version(), strict=True)
