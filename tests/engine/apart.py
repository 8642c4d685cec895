"""An engine in a mount namespace of its own: it has the daemon's socket, and another /dev/shm.

Run with a connection, a socket and perhaps DIRECTORY and HERE, it hides the daemon's /dev/shm. A
DIRECTORY below it is at HERE instead, as the volume of a container. For each word that it gets it
does one step and sends a report. For "together" it shows the daemon's /dev/shm again before that.
"""

import ctypes
import json
import subprocess
import sys
from multiprocessing.connection import Connection
from types import SimpleNamespace

from hybridkv.cli.plan import host_findings
from hybridkv.connector.metrics import ATTACH_FAILED, Shed, stores_shed
from hybridkv.core.settings import Settings
from hybridkv.lab.configuration import ConfigReport
from tests.unit.connector.test_hooks import IDLE, make_roles

CLONE_NEWNS = 0x20000
BUSY = {"num_scheduled_tokens": {"r": 8}, "total_num_scheduled_tokens": 8}


def main(pipe: Connection, socket_path: str, *volume: str) -> None:
    """Do a step for each word, until nobody can send any."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS):
        raise OSError(ctypes.get_errno(), "unshare")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    if volume:
        subprocess.run(["mount", "--bind", *volume], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/dev/shm"], check=True)
    roles = make_roles(socket_path)
    report = ConfigReport(settings=Settings(server=f"unix://{socket_path}"))
    while True:
        try:
            word = pipe.recv()
        except EOFError:
            break
        if word == "together":
            subprocess.run(["umount", "/dev/shm"], check=True)
        roles.step(SimpleNamespace(**vars(IDLE) | BUSY))
        report_of_step = {
            "attached": roles.scheduler.scheduler_role.session.workers_attached(),
            "failed": roles.scheduler.counters.get(ATTACH_FAILED, 0),
            "shed": roles.scheduler.counters.get(stores_shed(Shed.UNATTACHED), 0),
            "doctor": {finding.check: str(finding.verdict) for finding in host_findings(report)},
        }
        pipe.send_bytes(json.dumps(report_of_step).encode())
    roles.scheduler.shutdown()
    roles.worker.shutdown()


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])), *sys.argv[2:])
