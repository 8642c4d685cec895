"""An engine whose new identity the daemon refuses is served nothing, and waits for nothing."""

import itertools
import logging
import time
from collections import Counter

import pytest

from hybridkv.client.control import ControlClient
from hybridkv.connector.metrics import DAEMON_LOSSES, LOOKUPS_ASKED, daemon_refused, declined
from hybridkv.connector.scheduler.listeners import EngineIdentity
from hybridkv.connector.scheduler.session import DaemonSession, describe_facts
from hybridkv.core.metrics import Metric
from hybridkv.core.settings import Settings
from hybridkv.lab.daemon_process import DaemonProcess
from hybridkv.wire.codec import Frames, decode_request, encode
from hybridkv.wire.messages import (
    FACT_MAX,
    FACTS_MAX,
    PROTOCOL_VERSION,
    Decline,
    Hello,
    ReportIdentity,
    geometry_to_wire,
)
from tests.layouts import LAYOUTS
from tests.unit.connector import requests
from tests.waiting import DEADLINE_SECONDS

pytestmark = pytest.mark.engine

GEOMETRY = LAYOUTS["qwen3"]
TAKEN = Hello(
    1, PROTOCOL_VERSION, "engine", "other", b"o" * 32, geometry_to_wire(LAYOUTS["gemma3"])
)


def test_a_refused_identity_means_misses_until_there_is_another(daemon: DaemonProcess) -> None:
    counters: Counter[Metric] = Counter()
    server = f"unix://{daemon.socket_path}"
    settings = Settings(server=server, lookup_timeout_ms=60_000, audit=0.0)
    scheduler = requests.make_role(settings, GEOMETRY, b"n" * 32, counters)
    numbers = itertools.count()

    def asks() -> int | None:
        """Return the tokens that a new request is offered."""
        tokens = 3 * GEOMETRY.chunk_tokens
        named = b"".join(bytes([at % 256]) * 32 for at in range(tokens // GEOMETRY.hash_tokens))
        request = requests.request(f"r{next(numbers)}", tokens, named)
        scheduler.on_new_request(request)
        offer: int | None = scheduler.offer_hit(request, 0)
        scheduler.on_finished(request.request_id)
        return offer

    def until(metric: Metric, least: int) -> None:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while counters[metric] < least:
            assert time.monotonic() < deadline, f"{metric}: {counters}"
            asks()

    with ControlClient(daemon.socket_path, hello=TAKEN) as control:
        until(LOOKUPS_ASKED, 1)
        assert asks() is None, "the answer is on its way"
        scheduler.change_identity(EngineIdentity(b"o" * 32, {}))
        until(DAEMON_LOSSES, 1)
        assert counters[daemon_refused("identify")] == 1
        assert control.stats().values["sessions"] == 1
        assert asks() == 0
        assert counters[declined(Decline.NO_DAEMON)] > 0
        scheduler.change_identity(EngineIdentity(b"p" * 32, {}))
        until(LOOKUPS_ASKED, counters[LOOKUPS_ASKED] + 1)
        assert control.stats().values["sessions"] == 2
    scheduler.close()


def test_a_refused_greeting_is_a_line_of_the_log(
    daemon: DaemonProcess, caplog: pytest.LogCaptureFixture
) -> None:
    session = DaemonSession(
        daemon.socket_path,
        Hello(1, PROTOCOL_VERSION, "engine", "e", TAKEN.namespace, geometry_to_wire(GEOMETRY)),
        facts={},
        daemon_options=None,
        subscribes=False,
        counters=Counter(),
        on_loss=lambda: None,
        geometry=GEOMETRY,
    )
    ours = logging.getLogger("vllm.hybridkv")
    ours.addHandler(caplog.handler)
    try:
        with ControlClient(daemon.socket_path, hello=TAKEN):
            deadline = time.monotonic() + DEADLINE_SECONDS
            while not session.refusal:
                assert time.monotonic() < deadline
                session.link.poll(time.monotonic())
                session.follow(time.monotonic())
            session.follow(time.monotonic())
    finally:
        ours.removeHandler(caplog.handler)
        session.link.close()
    (line,) = [record.getMessage() for record in dict.fromkeys(caplog.records)]
    assert line.startswith("hybridkv: the daemon does not serve this engine (")
    assert "geometry" in line


def test_each_setting_is_a_fact_so_that_explain_names_it() -> None:
    facts = {"chunk": [128, 16], "files": {}, "parallel": {"size": 2, "nodes": {"a": 1}}}
    assert describe_facts(facts) == {
        "chunk": "[128, 16]",
        "files": "{}",
        "parallel.size": "2",
        "parallel.nodes": '{"a": 1}',
    }


@pytest.mark.parametrize("count", [FACTS_MAX - 1, FACTS_MAX])
def test_no_facts_are_more_than_a_message_may_have(count: int) -> None:
    """Also with that of the node."""
    texts = describe_facts(
        {"settings": {f"{number}{'x' * 400}": number for number in range(count)}}
    )
    report = ReportIdentity({**texts, "node": "[0, 2]"})
    (body,) = Frames().feed(encode(report))
    assert decode_request(body) == report
    assert len(texts) == (count if count < FACTS_MAX else 1)


def test_a_long_fact_says_what_is_set_in_it_and_ends_with_its_hash() -> None:
    off = {f"option_{number}": False for number in range(99)}
    texts = [describe_facts({"all": {"x": {**off, "x": value}}})["all.x"] for value in "ab"]
    assert texts[0] != texts[1]
    assert texts[0].startswith('{"x": "a"}... sha256:')
    assert all(len(text) <= FACT_MAX for text in texts)
    assert describe_facts({"settings": ["word" * 999]})["settings"].startswith('["wordword')
