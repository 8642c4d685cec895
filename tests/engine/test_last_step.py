"""What an engine stores in its last step is committed, although no request comes after it."""

from pathlib import Path

import pytest

from hybridkv.lab.daemon_process import DaemonProcess
from hybridkv.lab.models import bundled_environment
from tests.engine.server import Server
from tests.engine.support import arguments_of, prompt, stats
from tests.waiting import until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

MODEL = "qwen3"
CHUNK, CHUNKS = 128, 4


def arguments(socket_path: str) -> list[str]:
    return arguments_of(
        MODEL, socket_path, extra={"hybrid_chunk_size": CHUNK}, module="tests.engine.late"
    )


def committed(socket_path: str) -> bool:
    return stats(socket_path).get("objects_stored") == CHUNKS


@pytest.mark.soak
def test_an_engine_in_a_process_of_its_own(daemon: DaemonProcess, tmp_path: Path) -> None:
    """vLLM's busy loop steps until the connector has nothing pending."""
    path = daemon.socket_path
    with Server(arguments(path), tmp_path / "log", bundled_environment(MODEL)) as server:
        server.complete(prompt(1, CHUNKS * CHUNK + 1), max_tokens=1)
        until(lambda: committed(path), "the last stores are committed")
