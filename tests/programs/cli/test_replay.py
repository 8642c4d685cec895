"""`hybridkv replay`: a trace, the engine of a running daemon, and files that are no trace."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import pytest

from hybridkv.cli import main
from hybridkv.client.control import ControlClient
from hybridkv.core.findings import fail
from hybridkv.lab.configuration import ConfigReport
from hybridkv.lab.daemon_process import DaemonProcess
from hybridkv.shm.slots import slot_bytes
from tests.layouts import LAYOUTS
from tests.unit.daemon.harness import engine_hello

QWEN3 = LAYOUTS["qwen3"]
OBJECT = slot_bytes(QWEN3.groups[0].block_bytes, 1)
HELLO = engine_hello(QWEN3, "the engine")
BLOCK = QWEN3.chunk_tokens


class TracedPrompt(NamedTuple):
    """A line of a trace."""

    tokens: int
    hash_ids: list[int]


def trace(directory: Path, prompts: Iterable[TracedPrompt]) -> str:
    """The path of a new trace of these prompts."""
    path = directory / "trace.jsonl"
    lines = [
        json.dumps({"timestamp": 1, "input_length": prompt.tokens, "hash_ids": prompt.hash_ids})
        for prompt in prompts
    ]
    path.write_text("\n".join([*lines, ""]))
    return str(path)


def test_vllms_arguments_may_come_after_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The order of the usage: options, then two dashes, then what vLLM gets."""
    asked: list[tuple[object, ...]] = []

    def inspect(*words: object, **_: object) -> ConfigReport:
        asked.append(words)
        return ConfigReport([fail("a", "not today")])

    monkeypatch.setattr("hybridkv.cli.replay.inspect_model", inspect)
    path = trace(tmp_path, [TracedPrompt(600, [1, 2])])
    words = ["replay", path, "--model", "m", "--ram", "1GiB", "--", "--tensor-parallel-size", "2"]
    assert main.main(words) == 2
    assert "not today" in capsys.readouterr().err
    assert [words[:2] for words in asked] == [("m", ["--tensor-parallel-size", "2"])]
    with pytest.raises(SystemExit):
        main.main(["stats", "--", "word"])
    assert "unrecognized arguments: word" in capsys.readouterr().err


def test_what_each_size_hits_next_to_the_ceiling(
    daemon: DaemonProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two prompts in turns: both fit, or none is there any more when it comes again."""
    prompts = [TracedPrompt(4 * BLOCK + 1, [*range(first, first + 5)]) for first in (0, 10)]
    path = trace(tmp_path, 3 * prompts)
    words = ["replay", path, "--socket", daemon.socket_path, "--block-tokens", str(BLOCK)]
    sizes = ["--ram", str(8 * OBJECT), "--ram", str(2 * OBJECT)]
    with ControlClient(daemon.socket_path, hello=HELLO):
        assert main.main([*words, *sizes, "--prefill", "1000", "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        assert main.main(words) == 0
        table = capsys.readouterr().out
    tokens, hits = 6 * (4 * BLOCK + 1), 4 * 4 * BLOCK
    assert (document["model"], document["prompts"], document["tokens"]) == ("the engine", 6, tokens)
    assert document["everything_bytes"] == 8 * OBJECT
    assert document["known_tokens"] == hits
    rates = {"tokens_hit": hits, "prompts_hit": 4, "rate": hits / tokens}
    assert document["ceiling"] == {**rates, "computed_again": 0.0}
    small, large = document["sizes"]
    assert (small["ram_bytes"], large["ram_bytes"]) == (2 * OBJECT, 8 * OBJECT)
    assert (large["tokens_hit"], large["of_ceiling"], large["evicted"]) == (hits, 1.0, 0)
    assert small["tokens_hit"] < hits
    assert small["computed_again"] == (hits - small["tokens_hit"]) / tokens
    assert small["evicted"] > 8
    assert f"{hits / tokens:.1%}" in table
    assert "100.0%" in table
    assert large["tier_read"] == {"tokens": 0, "objects": 0, "bytes": 0}
    missed = (hits - small["tokens_hit"]) // BLOCK
    read = {"tokens": missed * BLOCK, "objects": missed, "bytes": missed * OBJECT}
    assert small["tier_read"] == read
    assert small["needed_speed"]["objects_per_second"] == pytest.approx(1000 / BLOCK)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "line 2: Input data was truncated"),
        ("[]", "line 2: Expected `object`"),
        ('{"input_length": 5}', "line 2: Object missing required field `hash_ids`"),
        (
            '{"input_length": 1025, "hash_ids": [1, 2]}',
            "line 2: 2 hash_ids for input_length 1025; one for every started",
        ),
        (f'{{"input_length": 5, "hash_ids": [{10**99}]}}', "line 2: "),
        ('{"input_length": -1, "hash_ids": []}', "line 2: 0 hash_ids for input_length -1"),
    ],
)
def test_a_line_that_is_no_prompt_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, complaint: str
) -> None:
    path = tmp_path / "trace"
    path.write_text('{"input_length": 5, "hash_ids": [1]}\n' + line + "\n")
    assert main.main(["replay", str(path), "--model", "qwen3"]) == 2
    assert complaint in capsys.readouterr().err


def test_what_cannot_be_replayed_is_one_sentence(
    daemon: DaemonProcess,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path, empty = trace(tmp_path, [TracedPrompt(5, [1])]), str(tmp_path / "empty")
    Path(empty).write_text("\n\n")
    at = ["--socket", daemon.socket_path]

    def refused(*words: str) -> str:
        assert main.main(["replay", *words]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    assert "No such file" in refused(str(tmp_path / "none"))
    assert "has no prompt" in refused(empty)
    for wrong in ("0", str(10**12)):
        says = f"--block-tokens {wrong} is no number of tokens from 1 to 1048576; 512 works"
        assert says in refused(path, "--block-tokens", wrong)
    assert "ram='x' is not a size" in refused(path, "--ram", "x")
    assert "0 engines are connected" in refused(path, *at)
    with ControlClient(daemon.socket_path, hello=HELLO):
        assert f"no prompt of the trace has a whole chunk of {BLOCK} tokens" in refused(path, *at)
    monkeypatch.setattr(
        "hybridkv.lab.configuration.inspect_arguments",
        lambda *_: ConfigReport([fail("group 2", "it has a sink", "none")]),
    )
    assert "it has a sink" in refused(path, "--model", "some/model")
