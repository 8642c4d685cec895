"""The directory of the socket: whose it must be, and that asking changes nothing."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hybridkv.core.errors import ConfigError
from hybridkv.core.settings import parse_settings
from hybridkv.daemon.filesystem import ServedSocket, check_private_directory, make_private_directory
from hybridkv.shm.arena import SHM_DIR, create_arena

SOMEONE = 54321  # The id of a user whom no machine has.


def test_asking_makes_nothing(tmp_path: Path) -> None:
    wanted = tmp_path / "a" / "b"
    check_private_directory(wanted, "socket")
    assert not wanted.parent.exists()
    make_private_directory(wanted, "socket")
    check_private_directory(wanted, "socket")
    assert wanted.stat().st_mode & 0o777 == 0o700


def test_what_is_not_mine_alone_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "file").touch()
    for name, says in (
        ("open", "others may write"),
        ("link", "not a directory of its own"),
        ("file", "not a dir"),
    ):
        with pytest.raises(ConfigError, match=f"socket: .*{says}.* works"):
            check_private_directory(tmp_path / name, "socket")
    with pytest.raises(ConfigError, match=r"socket: .* works"):
        check_private_directory(tmp_path / "file" / "below", "socket")
    with pytest.raises(ConfigError, match=r"^server: ") as refused:
        check_private_directory(tmp_path / "open", "server")
    server = parse_settings({"server": refused.value.value}).server
    check_private_directory(Path(server.removeprefix("unix://")).parent, "server")


@pytest.mark.parametrize("kind", ["file", "directory", "link"])
def test_what_is_no_socket_stays(tmp_path: Path, kind: str) -> None:
    """Nothing is left beside it, and the socket that the remedy names can be served."""
    place = tmp_path / "place"
    make_private_directory(place, "socket")
    path = place / "daemon.sock" if kind == "directory" else place / "model.bin"
    match kind:
        case "file":
            path.touch()
        case "directory":
            path.mkdir()
        case _:
            path.symlink_to("nowhere")
    with pytest.raises(
        ConfigError, match=f"socket: {path} is no socket, and stays; .* works"
    ) as no:
        ServedSocket(path)
    assert list(place.iterdir()) == [path]
    if kind != "directory":
        assert no.value.value == str(place / "daemon.sock")
        served = ServedSocket(Path(str(no.value.value)))
        served.listen().close()
        served.close()


@pytest.fixture
def someone() -> Iterator[Path]:
    """The home of a user whose name in /tmp another user has taken. Skips without root."""
    if os.geteuid() != 0:
        pytest.skip("needs root to act as another user")
    taken, home = Path(f"/tmp/hybridkv-{SOMEONE}"), Path(f"/tmp/hybridkv-home-{os.getpid()}")
    taken.mkdir(mode=0o755)
    try:
        home.mkdir()
        os.chown(home, SOMEONE, SOMEONE)
        yield home
    finally:
        taken.rmdir()
        shutil.rmtree(home)


def test_a_name_that_another_user_took(someone: Path) -> None:
    """The remedy is tried: it names a socket that can be served, and its variable is obeyed."""
    code = """if True:
        import os, sys
        from pathlib import Path
        from hybridkv.client.control import runtime_directory
        from hybridkv.core.errors import ConfigError
        from hybridkv.core.paths import default_socket
        from hybridkv.daemon.filesystem import ServedSocket
        uid = int(sys.argv[1])
        os.setgroups([]); os.setgid(uid); os.setuid(uid)
        try:
            ServedSocket(Path(default_socket(runtime_directory(), uid)))
        except ConfigError as error:
            print(error)
        os.environ["XDG_RUNTIME_DIR"] = os.environ["HOME"]
        ServedSocket(Path(own := default_socket(runtime_directory(), uid))).close()
        print(own)
    """
    variables = {name: text for name, text in os.environ.items() if name != "XDG_RUNTIME_DIR"}
    printed = subprocess.check_output(
        [sys.executable, "-c", code, str(SOMEONE)],
        env=variables | {"HOME": str(someone)},
        text=True,
        timeout=60,
    )
    value = f"{someone}/hybridkv/daemon.sock"
    assert printed.splitlines() == [
        f"socket: /tmp/hybridkv-{SOMEONE} belongs to user id 0, not to you; "
        f'"{value}" works, and XDG_RUNTIME_DIR={someone} makes it the default',
        value,
    ]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_place_that_is_not_mine_to_make(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match=r"you may not make directory"):
        check_private_directory(tmp_path / "a", "socket")


def test_an_arena_that_cannot_be_made_leaves_nothing(tmp_path: Path) -> None:
    """The file system refuses the file's size, or has no room for its pages."""
    shared = SHM_DIR / f"hybridkv-test-{os.getpid()}-none"
    for path, slots_bytes, more_bytes in ((tmp_path / "a", 1 << 62, 0), (shared, 4096, 1 << 50)):
        before = os.listdir("/proc/self/fd")
        with pytest.raises(OSError, match=r"File too large|No space left"):
            create_arena(path, slots_bytes, more_bytes)
        assert not path.exists()
        assert len(os.listdir("/proc/self/fd")) == len(before)
