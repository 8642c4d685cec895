"""What was hunted for on real engines (docs/RELIABILITY.md), one engine start for several cases."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hybridkv.daemon.filesystem import stale_arenas
from hybridkv.lab.daemon_process import DaemonProcess
from tests.engine.soak import ONE_THREAD
from tests.engine.support import answer, engine, prompt, stats

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

CHUNK = 128
PATIENCE_SECONDS = 30.0


@pytest.mark.soak
def test_a_new_engine_finds_an_arena_whose_name_is_gone_and_waits_for_none_that_is_not_there(
    daemon: DaemonProcess, tmp_path: Path
) -> None:
    """systemd removes a user's shared memory at the last logout. A container may have its own."""
    text = prompt(1, 3 * CHUNK + 20)
    (arena,) = stale_arenas(Path(daemon.socket_path))
    with engine("qwen3", tmp_path / "1.log", daemon.socket_path) as first:
        first.generate(text, max_tokens=4)
        (own,) = first.generate(text, max_tokens=4)
    arena.unlink()
    with engine("qwen3", tmp_path / "2.log", daemon.socket_path) as second:
        (hit,) = second.generate(text, max_tokens=4)
    assert hit["cached_tokens"] == 3 * CHUNK
    assert answer(hit) == answer(own)
    extra: dict[str, object] = {"lookup_timeout_ms": 1e3 * PATIENCE_SECONDS}
    with (arena.parent / f"another-{arena.name}").open("wb") as another:
        # Without its lock the daemon would remove it.
        fcntl.flock(another, fcntl.LOCK_EX)
        Path(another.name).rename(arena)
        with engine("qwen3", tmp_path / "3.log", daemon.socket_path, extra=extra) as third:
            third.generate(prompt(2, CHUNK // 2), max_tokens=4)
            (computed,) = third.generate(text, max_tokens=4)
    arena.unlink()
    assert computed["cached_tokens"] == 0
    assert computed["tokens"] == own["tokens"]
    assert computed["ttft_seconds"] < PATIENCE_SECONDS / 2
    assert stats(daemon.socket_path)["lookups_hit"] == 3
    assert (tmp_path / "3.log").read_text().count("hybridkv: nothing is loaded or stored: ") == 1


@pytest.mark.soak
@pytest.mark.parametrize(
    "words",
    ["sampling --model qwen3", "embeddings --model qwen3", "salts --model qwen3", "storm", "live"],
)
def test_unusual_requests(words: str) -> None:
    check([sys.executable, "-m", "tests.engine.hunt", *words.split()])


@pytest.mark.soak
def test_an_arena_grows_again_once_there_is_memory() -> None:
    """Somebody else fills shared memory while an engine stores, and leaves."""
    mount = ["unshare", "-m", "mount", "-t", "tmpfs", "none", "/mnt"]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("needs the right to mount")
    hunt = f"{sys.executable} -m tests.engine.hunt memory --model qwen3 --ram 1000MiB"
    script = f"mount -t tmpfs -o size=1200m none /dev/shm && exec {hunt}"
    check(["unshare", "-m", "sh", "-c", script])


def check(command: list[str]) -> None:
    """Run a hunt, which must find nothing."""
    environment, root = {**ONE_THREAD, **os.environ}, Path(__file__).parents[2]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=root, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "nothing was found" in done.stdout
