"""The status page in a real browser: what it draws, and that no client's text becomes markup."""

import platform
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from hybridkv.client.control import ControlClient
from hybridkv.lab.daemon_process import DaemonProcess
from hybridkv.wire.messages import Decline, Report, ReportRequest, RequestExplanation, WireModel
from tests.forked_daemon import ForkedDaemon
from tests.screenshots.browser import Browser, find_browser
from tests.unit.daemon.harness import engine_hello
from tests.unit.daemon.tierclient import GEOMETRY, IDENTITY, Client, is_written, stats
from tests.waiting import until

HOSTILE = "<img src=x onerror=document.title='pwned'>"
SCRIPT = "<script>document.title='pwned'</script>"
FIRST_SAMPLES = 12.0
"""Seconds after which a daemon has two samples, and so a line to draw."""

pytestmark = [pytest.mark.soak, pytest.mark.skipif(find_browser() is None, reason="needs chromium")]


class Attribute(NamedTuple):
    """An attribute of an element."""

    name: str
    value: str | None


class Elements(HTMLParser):
    """The elements of a document, and the text within those with an id."""

    def __init__(self, document: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.attributes: list[Attribute] = []
        self.text: dict[str, str] = {}
        self._ids: list[str | None] = []
        self.feed(document)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.attributes += map(Attribute._make, attrs)
        if tag not in ("meta", "link", "img", "br", "input"):
            self._ids.append(dict(attrs).get("id"))

    def handle_endtag(self, tag: str) -> None:
        if self._ids:
            self._ids.pop()

    def handle_data(self, data: str) -> None:
        for name in filter(None, self._ids):
            self.text[name] = self.text.get(name, "") + data


def has_past(report: Report) -> bool:
    return report.status is not None and bool(report.status.hour.ages)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Elements]:
    """The page of a daemon that was used by engines, whose texts are all hostile."""
    place = tmp_path_factory.mktemp("page")
    socket_path = str(place / "daemon.sock")
    options = ["--disk", str(place / "disk"), "--disk-bytes", "64MiB"]
    browser = find_browser()
    assert browser is not None
    with ForkedDaemon(socket_path, "32MiB", metrics_port=0, options=options):
        model = WireModel(
            name=HOSTILE,
            max_model_len=1024,
            kv_dtype=SCRIPT,
            layers=[1, 1, 1],
            retention_tokens=None,
            step_tokens=1,
        )
        hello = msgspec.structs.replace(engine_hello(GEOMETRY, SCRIPT, IDENTITY), model=model)
        with ControlClient(socket_path, hello=hello) as hostile, Client(socket_path) as client:
            client.store(1, 8)
            for _ in range(3):
                client.look_up(1, 8)
            client.look_up(2, 8)
            failed = RequestExplanation(
                1100, 0, not_read=SCRIPT, declined=Decline.PLAN_FAILED, detail=HOSTILE
            )
            hostile.tell(ReportRequest(HOSTILE, failed))
            loaded = RequestExplanation(1100, 0, loaded_tokens=1024, loaded_bytes=9 << 20)
            hostile.tell(ReportRequest("chatcmpl-1", loaded))
            until(lambda: is_written(socket_path), "nothing is written")
            until(
                lambda: stats(socket_path)["ceiling_lookups"] == 4, "the ceiling is not worked off"
            )
            url = hostile.stats().metrics_url.removesuffix("metrics")
            until(lambda: has_past(hostile.stats(status=True)), "no samples")
            yield Elements(Browser(browser).elements(url))


def test_the_numbers_are_drawn(page: Elements) -> None:
    assert "all is well" in page.text["state"]
    assert "75.0 %" in page.text["tiles"], "three hits of four"
    assert re.search(r"of 32 MiB, 24 objects", page.text["tiles"])
    (tile,) = re.findall(r"RAM([\d.]+ \w+)of 32 MiB", page.text["tiles"])
    assert re.search(rf"ramwell{tile}of 32 MiB", page.text["tiers"]), "one size in both places"
    assert "disk" in page.text["tiers"]
    assert "well" in page.text["tiers"]
    assert "group 1 sliding" in page.text["groups"]
    assert "More memory would not help" in page.text["verdict"]


def test_the_page_says_whose_it_is(page: Elements) -> None:
    """Several daemons are looked at side by side."""
    host = platform.node()
    assert page.text["about"].startswith(f"{host} · up ")
    setup = page.text["setup"]
    assert all(f"{name}{value}" in setup for name, value in (("host", host), ("ram", "32MiB")))
    assert re.search(r"socket/.*/daemon.sock", setup)
    assert re.search(r"tier 1disk:///.*/disk, write through, timeout 5 s", setup)


def test_cells_have_the_names_of_their_columns(page: Elements) -> None:
    """Where the screen is narrow, each stands on a line of its own."""
    names = [value for name, value in page.attributes if name == "data-name"]
    assert {"engine", "chunk", "write speed"} <= {*names}


def test_the_charts_are_drawn(page: Elements) -> None:
    assert page.names.count("svg") == 7
    paths = [value for name, value in page.attributes if name == "d" and value]
    assert len(paths) >= 7
    assert all(re.fullmatch(r"[MLZ\d. -]+", path) for path in paths)
    assert "hit" in page.text["chart-hit"]
    labels = [value for name, value in page.attributes if name == "aria-label" and value]
    assert any(label.startswith("hit 75.0 %, ceiling") for label in labels)


def test_what_clients_say_is_text(page: Elements) -> None:
    assert HOSTILE in page.text["decisions"]
    assert SCRIPT in page.text["decisions"]
    assert "loaded: 1024 tokens, 9MiB" in page.text["decisions"]
    assert HOSTILE in page.text["groups"]
    assert SCRIPT in page.text["sessions"]
    assert "img" not in page.names
    assert page.names.count("script") == 1, "the page's own"
    assert not [name for name, _ in page.attributes if name.startswith("on")]


def test_a_name_that_is_markup_did_not_run(page: Elements) -> None:
    assert "title" in page.names
    assert "pwned" not in page.text.get("title", "")


def test_a_picture_can_be_taken(tmp_path: Path, daemon: DaemonProcess) -> None:
    browser = find_browser()
    assert browser is not None
    with ControlClient(daemon.socket_path) as control:
        url = control.stats().metrics_url.removesuffix("metrics")
    Browser(browser).picture(url, tmp_path / "page.png", is_dark=True, size=(400, 300))
    assert (tmp_path / "page.png").read_bytes().startswith(b"\x89PNG")
