"""The Helm chart as Helm itself renders it, and the values with which it is tested."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from tests.programs.containers.manifests import ROOT

CHART = ROOT / "ops" / "helm" / "hybridkv"
OPERATORS = "monitoring.coreos.com/v1"
"""The resources of the Prometheus operator, whose schemas are not those of Kubernetes."""
METRICS = {"enabled": True, "tokenSecret": {"name": "hybridkv", "key": "bearer"}}
WATCHED = {"metrics": {**METRICS, "podMonitor": {"enabled": True}}, "alerts": {"enabled": True}}
VALUES: Mapping[str, Mapping[str, Any]] = {
    "no values": {},
    "watched": {**WATCHED, "engine": {"replicas": 2}},
    "a sidecar that is watched": {**WATCHED, "mode": "sidecar", "engine": {"replicas": 2}},
    "tiers": {
        "disk": {"path": "/mnt/nvme/hybridkv", "bytes": "2TiB"},
        "tiers": ["s3://bucket/prefix?endpoint=https://s3.example", "valkey://10.0.0.7:6379/0"],
        "args": ["--salt-quota=2GiB"],
        "env": [{"name": "AWS_REGION", "value": "eu-central-1"}],
        "envFrom": [{"secretRef": {"name": "s3"}}],
        "volumes": [{"name": "ca", "secret": {"secretName": "ca"}}],
        "volumeMounts": [{"name": "ca", "mountPath": "/etc/ca", "readOnly": True}],
        "serviceAccountName": "hybridkv",
        "engine": {"replicas": 1},
    },
    "another node": {
        "uid": 0,
        "gid": 3_000_000_000,
        "ram": "700MiB",
        "directories": {"socket": "/var/run/kv", "memory": "/mnt/huge/kv"},
        "nodeSelector": {"nvidia.com/gpu.present": None, "pool": "gpu"},
        "tolerations": [],
        "priorityClassName": "system-node-critical",
        "image": {"repository": "registry.example/kv/hybridkv", "tag": "7", "pullPolicy": "Always"},
        "imagePullSecrets": [{"name": "registry"}],
        "engine": {"replicas": 1, "args": ["--max-model-len=8192"], "model": "openai/gpt-oss-20b"},
    },
    "much memory": {"ram": "2TiB"},
    "resources": {"ram": "8GiB", "resources": {"limits": {"memory": "16Gi", "cpu": "2"}}},
}
"""Values that work, by what they are about."""


@cache
def program() -> str | None:
    """Returns the path of Helm 4, or None. Helm 3 renders the same, and says other sentences."""
    own = Path(sys.executable).with_name("helm")
    found = os.environ.get("HELM") or (str(own) if own.exists() else shutil.which("helm"))
    if found is None:
        return None
    version = [found, "version", "--short"]
    done = subprocess.run(version, capture_output=True, text=True, check=True)
    return found if done.stdout.startswith("v4.") else None


def helm(*words: str) -> "subprocess.CompletedProcess[str]":
    """Run Helm, without the line about the symbolic link. Skips a test where there is none."""
    found = program()
    if found is None:
        pytest.skip("needs Helm 4, or HELM=/its/path")
    done = subprocess.run([found, *words], capture_output=True, text=True, check=False)
    errors = [line for line in done.stderr.splitlines() if "found symbolic link" not in line]
    done.stderr = "\n".join(errors)
    return done


def render(values: Mapping[str, Any], path: Path) -> Path:
    """Returns the path, at which the resources of the chart with those values are afterwards."""
    given = path.with_suffix(".values")
    given.write_text(yaml.safe_dump(dict(values)))
    done = helm("template", "kv", str(CHART), "--namespace=llm", f"--values={given}")
    assert done.returncode == 0, done.stderr
    path.write_text(done.stdout)
    return path
