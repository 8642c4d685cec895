"""An engine whose own prefix caching is off has every hit from outside."""

from pathlib import Path

import pytest

from hybridkv.lab.engine_process import EngineProcess
from tests.engine.support import answer, engine, prompt, stats
from tests.forked_daemon import ForkedDaemon

pytestmark = [pytest.mark.engine, pytest.mark.soak, pytest.mark.timeout(600)]

TOKENS = 4200
CHUNK = 1024


def test_deepseekv4_as_the_requirements_ask(tmp_path: Path) -> None:
    """The smoke test of requirements A: 4,096 of 4,200 tokens come from outside."""
    options = ("--block-size=256", "--no-enable-prefix-caching", "--max-model-len=8192")
    socket_path = str(tmp_path / "daemon.sock")
    with (
        ForkedDaemon(socket_path, "1GiB"),
        engine(
            "deepseekv4",
            tmp_path / "engine.log",
            socket_path,
            *options,
            extra={"hybrid_chunk_size": CHUNK},
            kind=EngineProcess,  # Triton's interpreter is chosen when it is imported.
        ) as started,
    ):
        first, second = (started.generate(prompt(1, TOKENS), max_tokens=8)[0] for _ in range(2))
        values = stats(socket_path)
    assert (first["cached_tokens"], second["cached_tokens"]) == (0, 4096)
    assert answer(second) == answer(first)
    assert (values["tokens_hit"], values["objects_stored"]) == (4096, 5 * 4), "of five groups"
