"""An engine that starts while the daemon is of another version."""

import os
import signal
from pathlib import Path

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from hybridkv.client.control import ControlClient
from hybridkv.connector import HybridKVConnector
from tests.programs.daemon.test_upgrade import others, ours
from tests.simulation.configs import Shape, config_of
from tests.simulation.layouts import LAYOUTS, ON_CPU
from tests.waiting import until

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]


def test_an_engine_starts_where_the_daemon_it_names_is_of_another_version(tmp_path: Path) -> None:
    """A daemon may be upgraded after its engines. They greet it every few seconds."""
    layout, socket_path = LAYOUTS["full"], tmp_path / "d.sock"
    settings: dict[str, object] = {"weights_identity": "simulated"}
    shape = Shape(
        layout=layout,
        num_blocks=64,
        max_model_len=512,
        budget=512,
        max_seqs=4,
        retention=None,
        ranks=1,
        placement=ON_CPU,
        settings=settings,
    )
    config = config_of(shape, str(socket_path), "e")
    with others(socket_path, 1, -1):
        kv_config = layout.config(config, 64, worker=False)
        HybridKVConnector(config, KVConnectorRole.SCHEDULER, kv_config).shutdown()
        ours(socket_path)
    with ControlClient(str(socket_path)) as control:
        os.kill(control.welcome.pid, signal.SIGINT)
    until(lambda: not socket_path.exists(), "it ends")
