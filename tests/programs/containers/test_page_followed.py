"""docs/containers.md as one script: its manifests' own commands, in namespaces.

The daemon's command, the engine's settings, users, volumes, what is run first, and the probes are
read from the manifests. Sizes are SCALE times smaller, and the model is another one.
"""

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import pytest

from hybridkv.core.settings import parse_settings
from hybridkv.core.sizes import format_size, parse_size
from hybridkv.lab.engine_process import ENGINE_ENVIRONMENT, EngineProcess
from hybridkv.lab.models import bundled_arguments, bundled_environment, bundled_models
from tests.engine.support import forget, prompt
from tests.programs.containers.manifests import (
    MANIFESTS,
    PAGE,
    Container,
    containers,
    served,
    transfer_config,
)
from tests.programs.containers.namespaces import SCALE, Machine, RunningContainer, variables
from tests.waiting import until

MODEL, CHUNK = "gemma3", 128
PROMPTS = [prompt(seed, 400) for seed in (1, 2)]


class Namespaces(NamedTuple):
    """The namespaces of its own that a container has."""

    has_own_pids: bool
    has_own_users: bool


WAYS = {
    "own pids": Namespaces(has_own_pids=True, has_own_users=False),
    "shared pids": Namespaces(has_own_pids=False, has_own_users=False),
    "own pids and users": Namespaces(has_own_pids=True, has_own_users=True),
}
FREE = "hybridkv stop --free"


class Engine(Protocol):
    """An engine of a container, of the wire or of vLLM."""

    running: RunningContainer

    def store(self) -> None:
        """Store what `hits` asks for."""

    def hits(self) -> bool:
        """Whether the cache has the prompts. The answer must be right in any case."""


class WireEngine:
    """An engine that is tests.programs.containers.client."""

    def __init__(self, machine: Machine, container: Container, answers: dict[str, Any]) -> None:
        settings = parse_settings(transfer_config(container)["kv_connector_extra_config"])
        socket_path = settings.server.removeprefix("unix://")
        words = ["python", "-m", "tests.programs.containers.client", socket_path]
        self.running = machine.start(
            container, words, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def does(self, word: str) -> dict[str, Any]:
        """Send a word. Returns the answer."""
        stdin, stdout = self.running.process.stdin, self.running.process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(f"{word}\n".encode())
        stdin.flush()
        line = stdout.readline()
        assert line, self.running.log.read_text()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def store(self) -> None:
        assert self.does("store")["stored"] > 0
        assert self.hits()
        assert self.does("hold") == {"held": True}

    def hits(self) -> bool:
        answer = self.does("look")
        assert answer.get("right", True)
        return bool(answer["hits"])


class VllmEngine(EngineProcess):
    """vLLM with the --kv-transfer-config of the manifest."""

    def __init__(self, machine: Machine, container: Container, answers: dict[str, Any]) -> None:
        config = transfer_config(container)
        # On a busy machine an answer may be late, and that is no miss that is asked for here.
        config["kv_connector_extra_config"]["lookup_timeout_ms"] = 2000
        if answers:
            # A later engine proves nothing of what it loads, and its answers must be the same.
            config["kv_connector_extra_config"]["checksum"] = "off"
        arguments = [f"--model={bundled_models()[MODEL]}", *bundled_arguments(MODEL)]
        arguments += ["--kv-transfer-config", json.dumps(config)]
        self._say: Callable[[str], None] = print
        self.log_path = machine.log_path("vllm")
        self._answers = answers
        self._pipe, theirs = Pipe()
        machine.ends.callback(self._pipe.close)
        child = ["python", "-m", "hybridkv.lab.runner", str(theirs.fileno()), *arguments]
        with theirs, self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                machine.command(container, child),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(theirs.fileno(),),
                env={**ENGINE_ENVIRONMENT, **variables(bundled_environment(MODEL))},
            )
        self.running = machine.adopt(container, self.process, self.log_path)
        self.info = self.end_command("starting")

    def store(self) -> None:
        assert not self.hits()

    def hits(self) -> bool:
        forget(self)
        results = [self.generate(each, max_tokens=4)[0] for each in PROMPTS]
        answers = [result["tokens"] for result in results]
        assert answers == self._answers.setdefault("tokens", answers)
        return all(result["cached_tokens"] >= CHUNK for result in results)


class Followed:
    """The state of a pod of the page."""

    def __init__(self, machine: Machine, manifest: Path) -> None:
        self.machine = machine
        (self.daemon_spec,) = containers(manifest, "hybridkv")
        (self.engine_spec,) = containers(manifest, "vllm")
        self.options = served(self.daemon_spec.spec["args"])
        for first in containers(manifest, "directories"):
            machine.run(first, first.spec["command"])
        self.daemon = self._start_daemon()

    def _start_daemon(self) -> RunningContainer:
        """Start the daemon's container, and wait for its probe."""
        ram_bytes = parse_size(self.options.ram, "ram") // SCALE
        words = [
            word.replace(self.options.ram, format_size(ram_bytes)).replace("$(NODE_NAME)", "node-1")
            for word in self.daemon_spec.spec["args"]
        ]
        daemon = self.machine.start(self.daemon_spec, ["hybridkv", *words])
        until(
            lambda: daemon.has_ended or not daemon.execute(self.daemon_spec.probe).returncode,
            "the probe finds it",
        )
        assert not daemon.has_ended, daemon.log.read_text()
        return daemon

    def restart_daemon(self) -> None:
        """Start the daemon's container again, as the kubelet does after its end."""
        self.daemon = self._start_daemon()

    def stats(self) -> dict[str, Any]:
        """Returns the daemon's values, asked in its container."""
        socket_path = str(self.options.socket)
        words = ["hybridkv", "stats", "--debug", "--json", "--socket", socket_path]
        done = self.daemon.execute(words)
        assert done.returncode == 0, done.stderr
        values: dict[str, Any] = json.loads(done.stdout)
        return values

    def is_free(self) -> bool:
        """Whether nobody holds write slots or a session."""
        stats = self.stats()
        held = [stats[name] for name in ("sessions", "leases", "bytes_writing", "bytes_held")]
        return not any(held)

    def volumes(self) -> list[Path]:
        """Returns every file of both volumes."""
        real = [
            self.machine.volume(self.daemon_spec, name) for name in self.daemon_spec.mounts.values()
        ]
        return [path for each in real for path in each.rglob("*") if not path.is_dir()]


IN_GATE = {("daemonset", "own pids")}
CASES = [
    pytest.param(
        (path, way),
        id=f"{path.stem}, {way}",
        marks=[] if (path.stem, way) in IN_GATE else pytest.mark.soak,
    )
    for path in MANIFESTS
    for way in WAYS
    # What is another's in the node's directories has no owner in a user namespace.
    if (path.stem, way) != ("daemonset", "own pids and users")
]


@pytest.fixture(params=CASES)
def followed(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Followed]:
    manifest, way = request.param
    if os.geteuid() != 0:
        pytest.skip("needs root to act as another user")
    namespaces = WAYS[way]
    with Machine(tmp_path, namespaces.has_own_pids, namespaces.has_own_users) as machine:
        yield Followed(machine, manifest)


def follow(page: Followed, engine_of: Callable[..., Engine]) -> None:
    """Follow the life of a pod: hits, and the end of either side by -9."""
    answers: dict[str, Any] = {}
    first = engine_of(page.machine, page.engine_spec, answers)
    first.store()
    boot = page.stats()["boot"]
    first.running.kill()
    until(page.is_free, "what the engine held is free")

    second = engine_of(page.machine, page.engine_spec, answers)
    assert second.hits(), "after a restart of the engine"
    assert page.stats()["boot"] == boot, "the daemon went on"

    page.daemon.kill()
    assert not second.hits(), "it computes without a daemon"
    page.restart_daemon()
    assert page.stats()["boot"] != boot
    assert page.stats()["objects_recovered"] > 0
    until(second.hits, "hits go on with the daemon's next life")

    second.running.kill()
    until(page.is_free, "what the engine held is free")
    assert f"`{FREE}`" in PAGE.read_text().replace("\n", " ")
    page.daemon.execute(FREE.split())
    until(lambda: page.daemon.has_ended, "the daemon ends")
    left = [path.name for path in page.volumes()]
    assert left == ["daemon.sock.lock"]


def test_an_engine_of_the_wire(followed: Followed) -> None:
    follow(followed, WireEngine)


@pytest.mark.engine
@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "followed", [case for case in CASES if "users" not in str(case.id)], indirect=True
)
def test_vllm(followed: Followed) -> None:
    follow(followed, VllmEngine)
