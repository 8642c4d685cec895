"""What a router hears of engines that nobody has asked yet."""

import json
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from hybridkv.lab.models import bundled_environment
from tests.engine.server import Server
from tests.engine.subscriber import Subscriber
from tests.engine.support import arguments_of, prompt
from tests.engine.test_metrics import prefixes
from tests.forked_daemon import ForkedDaemon
from tests.waiting import until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

MODEL, CHUNK, CHUNKS = "gemma3", 128, 3


@pytest.mark.soak
def test_an_engine_announces_what_its_node_has_before_it_is_asked(tmp_path: Path) -> None:
    """What an earlier engine stored, through a killed daemon; then what another one stores."""
    text, later = prompt(1, CHUNKS * CHUNK + 20), prompt(2, CHUNKS * CHUNK + 20)
    with ForkedDaemon(str(tmp_path / "daemon.sock"), "64MiB") as daemon, ExitStack() as stack:

        def serve(name: str) -> tuple[Server, Subscriber]:
            endpoint = f"ipc://{tmp_path}/{name}"
            events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint}
            arguments = [*arguments_of(MODEL, daemon.socket_path), "--enforce-eager"]
            arguments += ["--kv-events-config", json.dumps(events)]
            log = tmp_path / f"{name}.log"
            subscriber = stack.enter_context(closing(Subscriber(endpoint)))
            return Server(arguments, log, bundled_environment(MODEL)), subscriber

        def hears(subscriber: Subscriber, *texts: list[int]) -> None:
            def is_heard() -> bool:
                subscriber.poll()
                wanted = {tuple(each[: CHUNKS * CHUNK]) for each in texts}
                return prefixes(subscriber.stored("CPU")) == wanted

            until(is_heard, "the prompts are announced")

        first, hearing = serve("first")
        with first:
            first.complete(text)
            hears(hearing, text)
        daemon.kill()
        daemon.start()
        second, hearing = serve("second")
        with second:
            hears(hearing, text)
            third, also_hearing = serve("third")
            with third:
                hears(also_hearing, text)
                third.complete(later)
                hears(also_hearing, text, later)
                hears(hearing, text, later)
