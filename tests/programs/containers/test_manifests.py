"""The manifests and the chart, as far as they can be judged without a cluster."""

from pathlib import Path

import kubernetes_validate  # type: ignore[import-untyped]
import pytest

from hybridkv.core.paths import socket_of_server
from hybridkv.core.settings import TRANSFER, parse_settings
from hybridkv.core.sizes import parse_size
from hybridkv.shm.control_groups import MemoryGroup
from tests.programs.containers.chart import OPERATORS, VALUES, render
from tests.programs.containers.manifests import (
    MANIFESTS,
    Container,
    containers,
    documents,
    pods,
    served,
    transfer_config,
)

VERSIONS = ("1.29.0", kubernetes_validate.latest_version())
"""The first version in which a container that is restarted always may be started first, and ours.
"""


@pytest.fixture(params=[*MANIFESTS, *VALUES], ids=lambda param: getattr(param, "name", param))
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Returns a manifest, or what the chart is with values."""
    if isinstance(request.param, Path):
        return request.param
    return render(VALUES[request.param], tmp_path / "chart.yaml")


@pytest.mark.parametrize("version", VERSIONS)
def test_each_resource_is_one_of_kubernetes(path: Path, version: str) -> None:
    for document in documents(path):
        if document["apiVersion"] != OPERATORS:
            kubernetes_validate.validate(document, version, strict=True)


def test_a_wrong_resource_is_seen() -> None:
    (deployment,) = documents(next(path for path in MANIFESTS if path.stem == "sidecar"))
    volume = deployment["spec"]["template"]["spec"]["volumes"][0]
    volume["emptyDirectory"] = volume.pop("emptyDir")
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(deployment, VERSIONS[-1], strict=True)


def _where(container: Container, socket_path: str, directory: str) -> tuple[object, ...]:
    return container.user, container.place(socket_path), container.place(directory)


def test_engine_and_daemon_have_one_user_one_socket_and_one_memory(path: Path) -> None:
    for pod in pods(path):
        assert pod["volumes"]
    (daemon,), engines = containers(path, "hybridkv"), containers(path, "vllm")
    for container in (daemon, *engines):
        assert {*container.mounts.values()} <= {
            volume["name"] for volume in container.pod["volumes"]
        }
    options = served(daemon.spec["args"])
    assert daemon.probe == ["hybridkv", "ping", "--socket", options.socket]
    place = _where(daemon, options.socket, options.shm_dir)
    assert daemon.place(options.socket).path.count("/") == 2, (
        "a volume's own directory is not private"
    )
    for engine in engines:
        config = transfer_config(engine)
        assert {**config, **TRANSFER} == config
        settings = parse_settings(config["kv_connector_extra_config"])
        socket_path = socket_of_server(settings.server, "", 0)
        assert settings.daemon.shm_dir is None, "the daemon names the path, which is the engine's"
        assert _where(engine, socket_path, options.shm_dir) == place


def test_the_limit_of_memory_has_room_for_the_cache(path: Path) -> None:
    """A daemon without that room warns, and its cache stays smaller."""
    for daemon in containers(path, "hybridkv"):
        options = served(daemon.spec["args"])
        limit_bytes = parse_size(daemon.spec["resources"]["limits"]["memory"] + "B", "memory")
        others_bytes = 700 << 20  # The interpreter with its libraries, and connections.
        if options.disk:
            others_bytes += 1536 << 20  # The table of five million files (docs/tiers.md).
        group = MemoryGroup(Path("/"), limit_bytes, used_bytes=others_bytes, shared_bytes=0)
        assert group.needed_bytes(parse_size(options.ram, "ram")) <= limit_bytes


def test_a_volume_in_memory_has_room_for_the_cache(path: Path) -> None:
    """Its trailer is a thousandth more than --ram."""
    for daemon in containers(path, "hybridkv"):
        ram_bytes = parse_size(served(daemon.spec["args"]).ram, "ram")
        for volume in daemon.pod["volumes"]:
            if limit := volume.get("emptyDir", {}).get("sizeLimit"):
                assert parse_size(f"{limit}B", "size") > ram_bytes * 1.01
                assert volume["emptyDir"]["medium"] == "Memory"


def test_the_name_of_the_node_is_the_nodes(path: Path) -> None:
    """A pod's host name is new with each pod, and what it stored below RAM would be a stranger's.

    Kubernetes tells the node's by the downward API.
    """
    for daemon in containers(path, "hybridkv"):
        options = served(daemon.spec["args"])
        variables = {variable["name"]: variable for variable in daemon.spec.get("env", ())}
        assert options.node == "$(NODE_NAME)"
        source = variables["NODE_NAME"]["valueFrom"]["fieldRef"]["fieldPath"]
        assert source == "spec.nodeName"
