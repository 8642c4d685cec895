"""The scheduler role hears what RAM has no more, over every connection that it makes."""

import os
import socket
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from hybridkv.client.control import ControlClient
from hybridkv.connector.metrics import DAEMON_LOSSES
from hybridkv.core.metrics import Metric
from hybridkv.core.settings import parse_settings
from hybridkv.lab.daemon_process import DaemonProcess
from hybridkv.vllm.hook_guard import fault
from tests.unit.connector.requests import make_role
from tests.unit.daemon.tierclient import GEOMETRY, IDENTITY, Client, hashes
from tests.waiting import until

pytestmark = pytest.mark.engine

CHUNKS = 3


def make_request(name: str) -> Any:
    tokens = CHUNKS * GEOMETRY.chunk_tokens + 1
    return SimpleNamespace(
        request_id=name,
        prompt_embeds=None,
        lora_request=None,
        cache_salt=None,
        session_id=None,
        mm_features=[],
        resumable=False,
        all_token_ids=[*range(tokens)],
        num_tokens=tokens,
        num_prompt_tokens=tokens,
        num_preemptions=0,
        block_hashes=hashes(1, CHUNKS),
    )


def test_what_went_is_heard_over_every_connection(daemon: DaemonProcess) -> None:
    from vllm.distributed.kv_events import BlockRemoved, BlockStored

    counters: Counter[Metric] = Counter()
    settings = parse_settings(
        {"server": f"unix://{daemon.socket_path}", "lookup_timeout_ms": 10_000, "audit": "off"}
    )
    side = make_role(settings, GEOMETRY, IDENTITY, counters, publishes_events=True)
    heard: list[Any] = []

    def hears(kind: Any, names: int) -> bool:
        heard.extend(side.on_step_end())
        return (
            len([name for event in heard if isinstance(event, kind) for name in event.block_hashes])
            >= names
        )

    with (
        Client(daemon.socket_path, name="other") as engine,
        ControlClient(daemon.socket_path) as control,
    ):
        for life in (1, 2):
            heard.clear()
            until(
                lambda: hears(BlockStored, 0) and side.session.link.welcome is not None,
                "it is connected",
            )
            engine.store(1, CHUNKS)
            assert engine.values()["objects"], "the daemon has read what was committed"
            side.on_new_request(make_request(f"r{life}"))
            until(lambda: hears(BlockStored, CHUNKS), "a lookup saw another engine's objects")
            side.on_finished(f"r{life}")
            side.session.link.flush(time.monotonic())
            until(lambda: not control.stats().values["leases"], "its lease ended")
            assert control.stats().values["watching"] == 1
            if life == 1:
                fd = side.session.link.fd
                assert fd is not None
                with socket.socket(fileno=os.dup(fd)) as connection:
                    connection.shutdown(socket.SHUT_RDWR)
            else:
                control.clear_objects()
            until(lambda: hears(BlockRemoved, CHUNKS), "what was announced is withdrawn")
        assert counters[DAEMON_LOSSES] == 1
        assert not counters[fault("kv_events")]
    side.close()


def test_an_engine_without_kv_events_does_not_subscribe(daemon: DaemonProcess) -> None:
    """The daemon would send it every removal, and it would drop them all."""
    settings = parse_settings({"server": f"unix://{daemon.socket_path}", "audit": "off"})
    side = make_role(settings, GEOMETRY, IDENTITY, Counter())

    def is_connected() -> bool:
        side.on_step_end()
        return bool(side.session.is_connected)

    with ControlClient(daemon.socket_path) as control:
        until(is_connected, "it is connected")
        side.on_step_end()
        until(lambda: control.stats().values["sessions"] == 1, "the daemon has the session")
        assert control.stats().values["watching"] == 0
    side.close()
