"""What ops/ and the page say about containers: the one source of what is tested.

The manifests are those that scripts/chart writes, or what Helm makes of the chart with other values
(tests.programs.containers.chart).
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml  # type: ignore[import-untyped]

from hybridkv.cli.serve import run_serve

ROOT = Path(__file__).parents[3]
DOCKERFILE = ROOT / "ops" / "container" / "Dockerfile"
ENGINE_DOCKERFILE = ROOT / "ops" / "container" / "Dockerfile.engine"
MANIFESTS = sorted((ROOT / "ops" / "kubernetes").glob("*.yaml"))
PAGE = ROOT / "docs" / "containers.md"


def documents(path: Path) -> list[dict[str, Any]]:
    """Returns the resources of a manifest."""
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def pods(path: Path) -> list[dict[str, Any]]:
    """Returns the specifications of all pods of a manifest."""
    found = [document["spec"] for document in documents(path)]
    return [spec["template"]["spec"] for spec in found if "template" in spec]


class VolumePath(NamedTuple):
    """A path in a volume."""

    volume: str
    """The node's path of the volume, or the name of a volume of the pod."""
    path: str


class Container(NamedTuple):
    """A container and its pod, as a manifest has them."""

    pod: dict[str, Any]
    spec: dict[str, Any]

    @property
    def user(self) -> int:
        """The id of the user that the container runs as."""
        own: dict[str, int] = self.spec.get("securityContext", {})
        pods: dict[str, int] = self.pod["securityContext"]
        return (pods | own)["runAsUser"]

    @property
    def mounts(self) -> dict[str, str]:
        """The name of each volume, by its path in the container."""
        return {mount["mountPath"]: mount["name"] for mount in self.spec["volumeMounts"]}

    @property
    def probe(self) -> list[str]:
        """The command that succeeds once the container serves."""
        probe = self.spec.get("startupProbe") or self.spec["readinessProbe"]
        words: list[str] = probe["exec"]["command"]
        return words

    def place(self, path: str) -> VolumePath:
        """Returns the volume that a path of the container is in, and the path within."""
        volumes = {volume["name"]: volume for volume in self.pod["volumes"]}
        for at, name in self.mounts.items():
            if f"{path}/".startswith(f"{at}/"):
                volume = volumes[name]
                real = volume["hostPath"]["path"] if "hostPath" in volume else name
                return VolumePath(real, path.removeprefix(at))
        raise AssertionError(f"{path} is in no volume")


def containers(path: Path, name: str) -> list[Container]:
    """Returns every container of that name, with those that are started first."""
    return [
        Container(pod, container)
        for pod in pods(path)
        for container in [*pod.get("initContainers", ()), *pod["containers"]]
        if container["name"] == name
    ]


def served(arguments: list[str]) -> argparse.Namespace:
    """Returns the options that `hybridkv serve` makes of its arguments."""
    assert arguments[0] == "serve"
    parser = argparse.ArgumentParser()
    for option in run_serve[0]:
        assert isinstance(option, tuple)
        name, keywords = option
        parser.add_argument(name, **keywords)
    return parser.parse_args(arguments[1:])


def transfer_config(engine: Container) -> dict[str, Any]:
    """Returns the --kv-transfer-config of an engine's container."""
    arguments = engine.spec["args"]
    config: dict[str, Any] = json.loads(arguments[arguments.index("--kv-transfer-config") + 1])
    return config


def instructions(dockerfile: Path = DOCKERFILE) -> dict[str, str]:
    """Returns the rest of the line of each instruction of the Dockerfile.

    Of an instruction that comes twice it is the last.
    """
    lines = dockerfile.read_text().splitlines()
    steps = [line.split(" ", 1) for line in lines if line and not line.startswith("#")]
    return dict(steps)


def image_variables() -> dict[str, str]:
    """Returns the environment that the image gives."""
    return dict(word.split("=") for word in instructions()["ENV"].split())


def page_commands() -> Iterator[list[str]]:
    """Yields the words of each `docker run` of the page."""
    for line in PAGE.read_text().replace("\\\n", " ").splitlines():
        if line.startswith("docker run "):
            yield line.split()
