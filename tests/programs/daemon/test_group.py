"""A daemon for a group of users: real users and groups, as the kernel tells each side."""

import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from hybridkv.client.control import ControlClient, DaemonRefusedError
from hybridkv.client.link import peer_pid
from hybridkv.core.errors import ConfigError
from hybridkv.shm.access import group_id
from hybridkv.shm.slots import slot_bytes
from tests.forked_daemon import run_forked
from tests.programs.daemon.holder import PART

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to act as other users")

GROUP, GROUP_ID = "users", 100
OWNER, MEMBER, STRANGER = 54301, 54302, 54303
AS_USER = """
import os, sys
from pathlib import Path
from hybridkv.cli import arenas, control, plan, replay, serve, top
from hybridkv.cli.main import main
from hybridkv.client.control import ControlClient
from hybridkv.shm.access import group_id
from hybridkv.shm.arena import attach_arena, new_lock
from rich import _emoji_codes
from rich.cells import cell_len
cell_len("\u4e00")
user, groups = int(sys.argv[1]), [int(group) for group in sys.argv[2].split(",") if group]
os.setgroups(groups)
os.setgid(user)
os.setuid(user)
"""
"""Another user may not be allowed to read this Python, so it is imported before."""
COMMAND = f"{AS_USER}\nsys.exit(main(sys.argv[3:]))"
ENGINE = f"""{AS_USER}
group = group_id(sys.argv[4])
with ControlClient(sys.argv[3], group=group) as control:
    welcome = control.welcome
    arena = attach_arena(
        Path(welcome.arena_path),
        welcome.arena_bytes,
        welcome.slots_bytes,
        lock=new_lock(),
        group=group,
    )
    arena.memory[welcome.slots_bytes - 1] = 7
    print(Path(welcome.arena_path).stat().st_uid, flush=True)
    arena.close()
"""
"""A worker of another user, which writes into a daemon's memory."""
STORES = f"""
import json
from hybridkv.core.packed import pack_u64
from hybridkv.wire.messages import Commit, Reserve
from tests.programs.daemon.holder import PART, engine_hello
{AS_USER}
with ControlClient(sys.argv[3], hello=engine_hello(f"e{{user}}"), group=group_id(sys.argv[4])) as e:
    for number in range(int(sys.argv[5])):
        granted = e.call(Reserve(3, PART, 1, 1))
        name = (user << 32 | number).to_bytes(32, "little")
        e.tell(Commit(granted.slots, pack_u64([0]), name))
    values = e.stats().values
    print(json.dumps([values[key] for key in ("objects", "tenants", "over_quota")]), flush=True)
"""
"""An engine of another user, which stores so many objects."""

SHARES = f"""{AS_USER}
from hybridkv.daemon.filesystem import make_private_directory, share_directory
make_private_directory(Path(sys.argv[3]), "socket")
share_directory(Path(sys.argv[3]), {GROUP_ID})
"""
"""A directory is made for the group's daemon."""


class Ended(NamedTuple):
    """A command that has ended."""

    status: int
    out: str
    err: str


def run_as(
    user: int, *words: object, groups: tuple[int, ...] = (), code: str = COMMAND, **variables: str
) -> Ended:
    """Run a command of hybridkv as another user."""
    given = [str(user), ",".join(map(str, groups)), *map(str, words)]
    run = run_forked(given, code, {"XDG_RUNTIME_DIR": "", **variables})
    return Ended(run.returncode, run.stdout, run.stderr)


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that every user can reach, and where the daemon's user makes one of its own."""
    with tempfile.TemporaryDirectory(prefix="hybridkv-group-", dir="/tmp") as name:
        path = Path(name)
        path.chmod(0o755)
        (path / "run").mkdir(mode=0o700)
        shutil.chown(path / "run", OWNER, OWNER)
        yield path


@pytest.fixture
def socket_path(place: Path) -> Iterator[Path]:
    """The socket of a daemon of OWNER for the group, where each user may store 64 KiB."""
    path = place / "run" / "daemon.sock"
    words = ["--socket", path, "--ram", "16MiB", "--metrics-port", "-1", "--group", GROUP]
    words += ["--user-quota", "64KiB"]
    served = run_as(OWNER, "serve", *words, "--detach", groups=(GROUP_ID,))
    assert served == (0, "", "")
    try:
        yield path
    finally:
        stopped = run_as(OWNER, "stop", "--free", "--socket", path, groups=(GROUP_ID,))
        assert stopped.status == 0, stopped


def test_a_member_is_served_and_maps_the_memory(socket_path: Path) -> None:
    """Directory, socket and arena are of the group, and of nobody else."""
    assert stat.S_IMODE(socket_path.parent.stat().st_mode) == 0o710
    assert stat.S_IMODE(socket_path.stat().st_mode) == 0o660
    member = run_as(MEMBER, socket_path, GROUP, groups=(GROUP_ID,), code=ENGINE)
    assert member == (0, f"{OWNER}\n", "")
    ping = ("ping", "--socket", socket_path)
    assert run_as(MEMBER, *ping, groups=(GROUP_ID,), HYBRIDKV_GROUP=GROUP).status == 0


def test_each_user_has_a_quota(socket_path: Path) -> None:
    """One that stores more than that evicts what is its own."""
    most = (64 << 10) // slot_bytes(PART, 1)

    def stored(user: int, count: int) -> list[int]:
        ended = run_as(user, socket_path, GROUP, count, groups=(GROUP_ID,), code=STORES)
        assert ended.status == 0, ended.err
        answer: list[int] = json.loads(ended.out)
        return answer

    assert stored(MEMBER, 3) == [3, 1, 0]
    assert stored(OWNER, most + 5) == [3 + most, 2, 5]
    assert stored(MEMBER, most) == [most + most, 2, 5]


def test_a_member_that_does_not_ask_for_a_group_trusts_nobody(socket_path: Path) -> None:
    """Users who share a group need not mean to share a cache."""
    ping = ("ping", "--socket", socket_path)
    status, out, err = run_as(MEMBER, *ping, groups=(GROUP_ID,))
    assert (status, out) == (2, "")
    assert err == f"hybridkv: {socket_path} is served by another user\n"


def test_others_are_refused(socket_path: Path) -> None:
    """By the socket's permissions, and by the daemon where they do not hold: root is no member."""
    ping = ("ping", "--socket", socket_path)
    status, out, err = run_as(STRANGER, *ping, HYBRIDKV_GROUP=GROUP)
    assert (status, out) == (2, "")
    whose = f"belongs to user id {OWNER}, and you are user id {STRANGER}"
    assert err == f"hybridkv: {socket_path} {whose}\n"
    assert os.getgid() != GROUP_ID
    assert GROUP_ID not in os.getgroups()
    says = f"this daemon belongs to user id {OWNER} and group id {GROUP_ID} and serves nobody else"
    with (
        pytest.raises(DaemonRefusedError, match=says),
        ControlClient(str(socket_path), group=group_id(GROUP)),
    ):
        pass


def test_what_cannot_be_shared_is_refused(place: Path) -> None:
    words = ["--socket", place / "run" / "daemon.sock", "--ram", "16MiB", "--metrics-port", "-1"]
    serve = ("serve", *words, "--group")
    status, _, err = run_as(OWNER, *serve, GROUP)
    assert (status, err.count("\n")) == (2, 1)
    assert err.startswith(f"hybridkv: group: you are no member of group id {GROUP_ID}; ")
    status, _, err = run_as(OWNER, *serve, "no-such-group")
    assert (status, err.count("\n")) == (2, 1)
    assert err.startswith("hybridkv: group: there is no group 'no-such-group' on this machine; ")
    place.chmod(0o700)
    shutil.chown(place, OWNER, OWNER)
    status, _, err = run_as(OWNER, *serve, GROUP, groups=(GROUP_ID,))
    assert (status, err.count("\n")) == (2, 1)
    works = f"/tmp/hybridkv-{OWNER}"
    assert err.startswith(f"hybridkv: group: its members cannot reach {place}/run, because of ")
    assert err.endswith(f"; --socket {works}/daemon.sock works\n")
    try:
        tried = run_as(OWNER, works, groups=(GROUP_ID,), code=SHARES)
    finally:
        shutil.rmtree(works, ignore_errors=True)
    assert tried == (0, "", "")
    assert peer_pid(str(place / "run" / "daemon.sock")) < 0
    with pytest.raises(ConfigError):
        group_id("no-such-group")
