"""An engine in a mount namespace of its own: it has the daemon's socket, and another /dev/shm.

`python -m tests.programs.daemon.apart SOCKET [DIRECTORY HERE]`, as the first program of `unshare
--mount`, hides the daemon's /dev/shm. A DIRECTORY below it is at HERE instead, as the volume of a
container. For each line that it reads it does one step and prints a line of JSON. For "together" it
shows the daemon's /dev/shm again before the step.
"""

import json
import subprocess
import sys
from types import SimpleNamespace

from hybridkv.cli.plan import host_findings
from hybridkv.connector.metrics import ATTACH_FAILED, Shed, stores_shed
from hybridkv.core.settings import Settings
from hybridkv.lab.configuration import ConfigReport
from tests.unit.connector.test_hooks import IDLE, make_roles

BUSY = {"num_scheduled_tokens": {"r": 8}, "total_num_scheduled_tokens": 8}


def main(socket_path: str, *volume: str) -> None:
    """Do a step for each line of standard input, until its end."""
    if volume:
        subprocess.run(["mount", "--bind", *volume], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/dev/shm"], check=True)
    roles = make_roles(socket_path)
    report = ConfigReport(settings=Settings(server=f"unix://{socket_path}"))
    for word in sys.stdin:
        if word == "together\n":
            subprocess.run(["umount", "/dev/shm"], check=True)
        roles.step(SimpleNamespace(**vars(IDLE) | BUSY))
        report_of_step = {
            "attached": roles.scheduler.scheduler_role.session.workers_attached(),
            "failed": roles.scheduler.counters.get(ATTACH_FAILED, 0),
            "shed": roles.scheduler.counters.get(stores_shed(Shed.UNATTACHED), 0),
            "doctor": {finding.check: str(finding.verdict) for finding in host_findings(report)},
        }
        print(json.dumps(report_of_step), flush=True)
    roles.scheduler.shutdown()
    roles.worker.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
