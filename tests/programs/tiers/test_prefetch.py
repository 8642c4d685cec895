"""`hybridkv prefetch`, and the message of an engine, over the socket of a daemon with a directory.

Whether the command waits for what it began, and what it says, does not depend on who is sooner.
"""

import json
import re
from pathlib import Path

import pytest

from hybridkv.cli.main import main
from hybridkv.wire.messages import Prefetch, ReportRequest, RequestExplanation
from tests.forked_daemon import ForkedDaemon
from tests.unit.daemon.tierclient import DISK, Client, hashes, is_written, stats
from tests.waiting import until

CHUNKS, OTHERS = 12, 3
OBJECTS_OF_HIT = 2 * CHUNKS + 1
TOKENS = CHUNKS * 128
WAIT_MS = 20_000


def test_a_prompt_comes_by_command_and_by_message_and_its_lookup_does_not_wait(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--node", "here", "--tier", f"disk://{tmp_path}/disk?bytes=1GiB"]
    daemon = ForkedDaemon(str(tmp_path / "daemon.sock"), "128MiB", options=options)
    where = ["--socket", daemon.socket_path]
    with daemon:
        with Client(daemon.socket_path) as client:
            client.store(1, CHUNKS)
            client.store(2, CHUNKS)
            until(lambda: is_written(daemon.socket_path), "everything is written")
        daemon.end()
        daemon.start()
        until(lambda: stats(daemon.socket_path).get(f"{DISK}is_open") == 1, "the tier is open")
        with Client(daemon.socket_path) as client:
            assert main(["prefetch", "cmpl-1", *where]) == 1
            assert "knows no prompt of request 'cmpl-1'" in capsys.readouterr().err
            client.look_up(1, CHUNKS)  # Without patience: RAM has nothing.
            first = hashes(1, CHUNKS)[0]
            explanation = RequestExplanation(1, 0, asked_chunks=CHUNKS, first_chunk=first)
            client.tell(ReportRequest("cmpl-1-0", explanation))
            assert client.values()["objects"] == 0
            assert main(["prefetch", "cmpl-1", "--wait", *where]) == 0
            said = capsys.readouterr().out
            assert re.fullmatch(
                rf"{TOKENS} tokens: RAM has all that tiers have; RAM hits {TOKENS} tokens, "
                rf"{OBJECTS_OF_HIT} objects \(\S+\) were read\n",
                said,
            )
            found = client.look_up(1, CHUNKS, WAIT_MS).found
            assert (found.chunks, found.tiers) == (CHUNKS, {}), "it was in RAM"
            assert stats(daemon.socket_path)["prefetched_objects_hit"] == OBJECTS_OF_HIT
            assert main(["prefetch", "--family", first.hex()[:8], "--wait", "--json", *where]) == 0
            (prefetch,) = json.loads(capsys.readouterr().out)["prefetches"]
            assert (prefetch["state"], prefetch["objects_read"]) == ("needless", 0)
            client.tell(Prefetch(b"".join(hashes(2, CHUNKS)), 100))
            whole = "prefetches_ended_whole"
            until(lambda: stats(daemon.socket_path)[whole] == 2, "the second prompt is there")
            found = client.look_up(2, CHUNKS, WAIT_MS).found
            assert (found.chunks, found.tiers) == (CHUNKS, {})
            assert main(["prefetch", "--family", first.hex(), "--in", "50min", *where]) == 0
            assert "waits for its time, in " in capsys.readouterr().out
            assert stats(daemon.socket_path)["prefetches_waiting"] == 1
            assert stats(daemon.socket_path)["lookups_waited"] == 0


@pytest.mark.parametrize(
    "words",
    [
        ["--family", "xyz"],
        ["--family", "abc"],
        ["r", "--in", "2h"],
        ["r", "--in", "never"],
        ["r", "--in", "soon"],
        [""],
    ],
)
def test_bad_words_of_prefetch_are_refused(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["prefetch", *words, "--socket", "/nowhere"]) == 2
    assert " work" in capsys.readouterr().err
