"""Hints of a request through vLLM's real API server: which forms reach the connector.

docs/agents.md has the table of what is seen here.
"""

import json
import urllib.error
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from hybridkv.client.control import ControlClient
from hybridkv.core.hints import NO_HINTS, PREFETCH_SECONDS_MAX, RETAIN_SECONDS_MAX, Hints
from hybridkv.lab.daemon_process import DaemonProcess
from hybridkv.lab.models import bundled_environment
from hybridkv.lab.prompts import english
from hybridkv.lab.tiny_model import write_tokenizer
from tests.engine.server import Server
from tests.engine.support import VOCABULARY, arguments_of, since_vllm, stats
from tests.waiting import DEADLINE_SECONDS, until

pytestmark = [
    pytest.mark.engine,
    pytest.mark.soak,
    pytest.mark.timeout(600),
    since_vllm(32, "other entry points were not looked at"),
]

MODEL = "qwen3"
TEXT = english(600)  # More than two chunks of this model.
RELEASE = "hybridkv.release"
TTL = "kv_retention_ttl_seconds"
EPHEMERAL = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
USER = [{"role": "user", "content": TEXT}]
MARKED = [{"role": "user", "content": [{"type": "text", "text": TEXT, **EPHEMERAL}]}]
ENDPOINTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": TEXT, "max_tokens": 2},
    "/v1/chat/completions": {"messages": USER, "max_tokens": 2},
    "/v1/responses": {"input": TEXT, "max_output_tokens": 2},
    "/v1/messages": {"messages": USER, "max_tokens": 2},
}
OWN = {
    "hybridkv.read": False,
    "hybridkv.write": False,
    "hybridkv.retain_seconds": 600,
    RELEASE: True,
    "hybridkv.demote": True,
    "hybridkv.priority": "low",
    "hybridkv.prefetch_in_seconds": 20,
}
OWN_HINTS = Hints(
    reads=False,
    writes=False,
    retain_seconds=600.0,
    release=True,
    demote=True,
    low_priority=True,
    prefetch_in_seconds=20.0,
)
ENVELOPE = {
    "protocol_version": "0.1",
    "message_id": "m",
    "actions": [
        {
            "action_id": "a",
            "action_type": "kv.retain",
            "action_version": "1.0",
            "payload": {"ttl_seconds": 9, "priority": 3},
        }
    ],
}
TAKEN: tuple[tuple[dict[str, Any], Hints], ...] = (
    ({"kv_transfer_params": OWN}, OWN_HINTS),
    ({"kv_transfer_params": {"kv_hint": ENVELOPE}}, Hints(retain_seconds=9.0)),
    ({"vllm_xargs": {TTL: 7.5}}, Hints(retain_seconds=7.5)),
    ({"vllm_xargs": {"agentic_context": json.dumps({TTL: 5})}}, Hints(retain_seconds=5.0)),
)
DROPPED: tuple[dict[str, Any], ...] = (
    {},
    {"kv_hints": ENVELOPE},
    {"nvext": {"agent_hints": {"priority": 5, "osl": 9, "speculative_prefill": True}, **EPHEMERAL}},
    EPHEMERAL,
    {"priority": 0, "session_id": "s"},
)
REFUSED: tuple[dict[str, Any], ...] = (
    {"vllm_xargs": {"agentic_context": {TTL: 5}}},
    {"kv_transfer_params": [OWN]},
    {"kv_transfer_params": {"hybridkv.retain_seconds": 2**64}},
)
"""vLLM itself answers these with the status 400."""
MISTAKEN: tuple[dict[str, Any], ...] = (
    {"hybridkv.retain_seconds": "1h"},
    {"hybridkv.priority": 5},
    {"hybridkv.pin": True},
)


class Asked:
    """A server, and what its daemon hears that requests have asked."""

    def __init__(self, server: Server, control: ControlClient) -> None:
        self._server, self._control = server, control

    def hints(self, path: str, *parts: Mapping[str, Any]) -> Hints:
        """Returns the hints of a request with these parts of a body, as `explain` has them."""
        before = self._control.explain("").latest
        body = {key: value for part in parts for key, value in part.items()}
        self._server.post(path, {"model": "tiny", **body})
        until(lambda: self._control.explain("").latest[:1] != before[:1], "it is explained")
        explanation = self._control.explain(self._control.explain("").latest[0]).explanation
        assert explanation is not None
        return explanation.hints

    def status(self, path: str, *parts: Mapping[str, Any]) -> int:
        """Returns the status with which the server refuses such a request."""
        with pytest.raises(urllib.error.HTTPError) as refused:
            self.hints(path, *parts)
        with refused.value as answer:
            return answer.code or 0

    def counted(self, event: str) -> float:
        return self._server.total("vllm:hybridkv_events_total", event=event)


@pytest.fixture
def asked(daemon: DaemonProcess, tmp_path: Path) -> Iterator[Asked]:
    write_tokenizer(tmp_path, VOCABULARY)
    arguments = [
        word for word in arguments_of(MODEL, daemon.socket_path) if word != "--skip-tokenizer-init"
    ]
    arguments += [f"--tokenizer={tmp_path}"]
    log_path = tmp_path / "server.log"
    with (
        ControlClient(daemon.socket_path, DEADLINE_SECONDS) as control,
        Server(arguments, log_path, bundled_environment(MODEL)) as server,
    ):
        yield Asked(server, control)
        named = log_path.read_text(errors="replace")
        for params in MISTAKEN:
            assert named.count(f"hint of a request: {next(iter(params))} is ") == 1


def test_hints_reach_the_daemon_in_every_form_and_no_mistake_is_an_error(
    asked: Asked, daemon: DaemonProcess
) -> None:
    for path, body in ENDPOINTS.items():
        for form, hints in TAKEN:
            assert asked.hints(path, body, form) == hints, (path, form)
        for form in DROPPED:
            assert asked.hints(path, body, form) == NO_HINTS, (path, form)
        for form in REFUSED:
            assert asked.status(path, body, form) == 400, (path, form)
        for params in MISTAKEN:
            assert asked.hints(path, body, {"kv_transfer_params": params}) == NO_HINTS
    for path in ("/v1/chat/completions", "/v1/messages"):
        assert asked.hints(path, ENDPOINTS[path], {"messages": MARKED}) == NO_HINTS

    def heard(message: str) -> float:
        return stats(daemon.socket_path)[f"requests_{message}"]

    # Each form of TAKEN retains at the lookup, unless it does not read, and says something at its
    # end. OWN releases then.
    advised, mistaken = len(ENDPOINTS) * (2 * len(TAKEN) - 1), len(ENDPOINTS) * len(MISTAKEN)
    until(lambda: heard("advise") >= advised, "the daemon hears of each")
    until(lambda: heard("prefetch") >= len(ENDPOINTS), "it hears of each that goes on")
    until(lambda: asked.counted("hints_mistaken") >= mistaken, "mistakes are counted")
    assert (heard("advise"), heard("prefetch")) == (advised, len(ENDPOINTS))
    assert asked.counted("hints_mistaken") == mistaken

    completion = ENDPOINTS["/v1/completions"]

    def retained_bytes() -> float:
        return stats(daemon.socket_path)["retained_bytes"]

    retain, release = {"hybridkv.retain_seconds": 600}, {RELEASE: True}
    asked.hints("/v1/completions", completion, {"kv_transfer_params": retain})
    until(lambda: retained_bytes() > 0, "the prompt is retained")
    asked.hints("/v1/completions", completion, {"kv_transfer_params": release})
    until(lambda: retained_bytes() == 0, "it is released")

    long = {"hybridkv.retain_seconds": 1e300, "hybridkv.prefetch_in_seconds": 2**63}
    longest = Hints(retain_seconds=RETAIN_SECONDS_MAX, prefetch_in_seconds=PREFETCH_SECONDS_MAX)
    assert asked.hints("/v1/completions", completion, {"kv_transfer_params": long}) == longest
    until(lambda: asked.counted("hints_shortened") >= 2, "times that were shortened are counted")
    assert asked.counted("hints_shortened") == 2
    before = asked.counted("hints_mistaken")
    many = {f"hybridkv.pin{number}": True for number in range(100_000)}
    assert asked.hints("/v1/completions", completion, {"kv_transfer_params": many}) == NO_HINTS
    until(lambda: asked.counted("hints_mistaken") > before, "some of many mistakes are counted")
    assert asked.counted("hints_mistaken") <= before + 100
