"""The manifests, as far as they can be judged without a cluster."""

from pathlib import Path

import kubernetes_validate  # type: ignore[import-untyped]
import pytest

from hybridkv.core.paths import socket_of_server
from hybridkv.core.settings import TRANSFER, parse_settings
from hybridkv.core.sizes import parse_size
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
named = pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)


@named
@pytest.mark.parametrize("version", VERSIONS)
def test_each_resource_is_one_of_kubernetes(path: Path, version: str) -> None:
    for document in documents(path):
        kubernetes_validate.validate(document, version, strict=True)


def test_a_wrong_resource_is_seen() -> None:
    (pod,) = documents(next(path for path in MANIFESTS if path.stem == "sidecar"))
    pod["spec"]["volumes"][0]["emptyDirectory"] = pod["spec"]["volumes"][0].pop("emptyDir")
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(pod, VERSIONS[-1], strict=True)


def _where(container: Container, socket_path: str, directory: str) -> tuple[object, ...]:
    return container.user, container.place(socket_path), container.place(directory)


@named
def test_engine_and_daemon_have_one_user_one_socket_and_one_memory(path: Path) -> None:
    for pod in pods(path):
        assert pod["volumes"]
    (daemon,), (engine,) = containers(path, "hybridkv"), containers(path, "vllm")
    for container in (daemon, engine):
        assert {*container.mounts.values()} <= {
            volume["name"] for volume in container.pod["volumes"]
        }
    options = served(daemon.spec["args"])
    assert daemon.probe == ["hybridkv", "ping", "--socket", options.socket]
    limit = parse_size(daemon.spec["resources"]["limits"]["memory"] + "B", "memory")
    assert limit >= parse_size(options.ram, "ram") + (2 << 30)
    place = _where(daemon, options.socket, options.shm_dir)
    assert daemon.place(options.socket).path.count("/") == 2, (
        "a volume's own directory is not private"
    )
    config = transfer_config(engine)
    assert {**config, **TRANSFER} == config
    settings = parse_settings(config["kv_connector_extra_config"])
    assert settings.daemon.shm_dir is not None
    socket_path = socket_of_server(settings.server, "", 0)
    assert _where(engine, socket_path, settings.daemon.shm_dir) == place


@named
def test_a_volume_in_memory_has_room_for_the_cache(path: Path) -> None:
    """Its trailer is a thousandth more than --ram."""
    for daemon in containers(path, "hybridkv"):
        ram_bytes = parse_size(served(daemon.spec["args"]).ram, "ram")
        for volume in daemon.pod["volumes"]:
            if limit := volume.get("emptyDir", {}).get("sizeLimit"):
                assert parse_size(f"{limit}B", "size") > ram_bytes * 1.01
                assert volume["emptyDir"]["medium"] == "Memory"


@named
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
