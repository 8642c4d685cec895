"""A machine of its own with Linux' own NFS server and client, as one process of this user.

It is user-mode Linux, and shows this machine's files read-only. `scripts/nfs-machine` unpacks it.
"""

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[3]
ROOT = CHECKOUT / "build" / "nfs-machine" / "root"
DISK_BYTES = 2 << 30


def run_inside(words: list[str], directory: Path, seconds: float) -> str:
    """Run a command on a new machine in this checkout. Returns what it printed.

    `directory` gets the machine's disk. Skips the test where the machine is not unpacked. Raises
    AssertionError where the command fails, and subprocess.TimeoutExpired.
    """
    kernel, mkfs = ROOT / "usr/bin/linux.uml", shutil.which("mkfs.ext4", path="/usr/sbin:/sbin")
    if not kernel.exists() or mkfs is None:
        pytest.skip("needs a machine with NFS, which scripts/nfs-machine unpacks, and mkfs.ext4")
    disk = directory / "disk"
    with disk.open("wb") as file:
        file.truncate(DISK_BYTES)
    subprocess.run([mkfs, "-q", "-m", "0", str(disk)], check=True)
    variables = {
        name: os.environ[name] for name in ("PATH", "PYTHONPATH", "HOME") if name in os.environ
    }
    script = [f"export {name}={shlex.quote(text)}" for name, text in variables.items()]
    script += [f"cd {shlex.quote(str(CHECKOUT))}", "exec " + shlex.join(words)]
    command, console = directory / "command", directory / "console"
    command.write_text("\n".join(script))
    kernel_options = [f"ubd0={disk}", "mem=2G", "con=null", "con0=null,fd:1", "quiet"]
    root_options = ["root=/dev/root", "rootfstype=hostfs", "ro"]
    own_options = [f"init={Path(__file__).with_name('init')}", f"machine={ROOT}"]
    # The machine keeps its memory in a file of this directory.
    environment = {**os.environ, "TMPDIR": str(directory)}
    words = [str(kernel), *kernel_options, *root_options, *own_options, f"command={command}"]
    with (
        console.open("wb") as output,
        subprocess.Popen(
            words,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as process,
    ):
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the machine did not end: {console.read_text(errors='replace')[-20_000:]}")
        finally:
            # The machine's own processes outlive its first one.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    printed = console.read_text(errors="replace").replace("\r", "")
    assert "\nstatus 0\n" in printed, printed[-20_000:]
    return printed
