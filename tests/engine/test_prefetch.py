"""A prompt that is only on disk is prefetched before its turn, on the real engine."""

from pathlib import Path

import pytest

from hybridkv.cli.main import main
from hybridkv.client.control import ControlClient
from tests.engine.support import answer, engine, forget, prompt, stats
from tests.engine.test_tiers import CHUNKS, LOAD, MODELS, is_written, serve
from tests.waiting import until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


def test_the_lookup_of_a_prefetched_prompt_is_answered_as_from_ram(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chunk = MODELS["qwen3next"]
    text = prompt(1, CHUNKS * chunk + 20)
    disk = ("--disk", str(tmp_path / "disk"), "--disk-bytes", "1GiB")
    with (
        serve(tmp_path, "node", *disk) as daemon,
        engine("qwen3next", tmp_path / "a.log", daemon.socket_path, extra=LOAD) as running,
        ControlClient(daemon.socket_path, 60.0) as control,
    ):
        running.generate(text, max_tokens=6)
        (oracle,) = running.generate(text, max_tokens=6)
        is_written(daemon, "disk")

        def asked() -> list[str]:
            ids = control.explain("").latest
            explained = [control.explain(name).explanation for name in ids]
            tokens = len(text)
            return [
                name
                for name, course in zip(ids, explained, strict=True)
                if course is not None and course.prompt_tokens == tokens
            ]

        until(lambda: len(asked()) == 2, "the engine has reported its requests")
        name = asked()[0]
        forget(running)
        control.clear_objects()
        assert main(["prefetch", name, "--wait", "--socket", daemon.socket_path]) == 0
        said = capsys.readouterr().out
        assert said.startswith(f"{CHUNKS * chunk} tokens: RAM has all that tiers have"), said
        before = stats(daemon.socket_path)
        (result,) = running.generate(text, max_tokens=6)
        assert result["cached_tokens"] == oracle["cached_tokens"] == CHUNKS * chunk
        assert answer(result) == answer(oracle)
        until(lambda: len(asked()) == 3, "the engine has reported the request")
        explanation = control.explain(asked()[0]).explanation
        assert explanation is not None
        assert explanation.loaded_tokens == CHUNKS * chunk
        assert explanation.tiers == {}, "no tier was read for it"
        after = stats(daemon.socket_path)
    assert after["lookups_waited"] == before["lookups_waited"]
    assert after["tier_disk_objects_read"] == before["tier_disk_objects_read"]
    assert after["prefetched_objects_hit"] == after["tier_disk_objects_read"] > 0
