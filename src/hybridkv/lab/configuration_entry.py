"""The child behind `hybridkv plan` and `doctor`.

Its arguments after the descriptor are "1" where the environment is to be checked, or "0", and those
of `vllm serve`. It answers once, with a ConfigReport.
"""

import importlib
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection

import msgspec

from hybridkv.lab import environment
from hybridkv.lab.configuration import ConfigReport


def report_of(arguments: Sequence[str], with_environment: bool) -> ConfigReport:
    """Return the report on a command line. Where vLLM cannot be imported, it says why alone."""
    findings = [*environment.installation_findings()] if with_environment else []
    failures = environment.import_failures()
    if failures:
        return ConfigReport([*findings, *failures])
    report = ConfigReport()
    if arguments:
        # It imports vLLM, which the checks above have tried.
        child = importlib.import_module("hybridkv.lab.configuration_child")
        report = child.inspect([*arguments])
    if with_environment and not findings:
        findings.append(environment.command_finding())
    report.findings[:0] = findings
    return report


if __name__ == "__main__":
    with Connection(int(sys.argv[1])) as pipe:
        pipe.send_bytes(msgspec.json.encode(report_of(sys.argv[3:], sys.argv[2] == "1")))
