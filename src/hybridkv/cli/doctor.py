"""`hybridkv doctor`: a `vllm serve` command line checked before it is served."""

import argparse
from collections import Counter
from dataclasses import asdict

from hybridkv.cli.arguments import JSON, command, option
from hybridkv.cli.terminal import STYLES, PlainConsole, new_table, print_json
from hybridkv.core.findings import Verdict
from hybridkv.lab.configuration import inspect_arguments, serve_arguments
from hybridkv.lab.host import host_findings

_WORDS = 'a whole "vllm serve MODEL ..." command line, or its arguments'


@command(JSON, option("vllm_arguments", "-- VLLM ARGS", _WORDS, nargs="+"))
def run_doctor(arguments: argparse.Namespace) -> int:
    """Run every check and print; 1 = the engine would not start, or not use the cache."""
    report = inspect_arguments(serve_arguments(arguments.vllm_arguments))
    findings = [*report.findings, *host_findings(report)]
    count = Counter(finding.verdict for finding in findings)
    failed = count[Verdict.FAIL]
    if arguments.json:
        checks = [asdict(finding) for finding in findings]
        identity = {"identity": report.identity, "identity_facts": report.facts}
        print_json({"ok": not failed, "checks": checks, **identity})
        return int(failed > 0)
    columns = ("check", "state", "what", "remedy")
    table = new_table(columns, columns, "hybridkv doctor")
    for column in table.columns:
        column.overflow = "fold"
    for finding in findings:
        words = (finding.check, str(finding.verdict), finding.what, finding.remedy)
        table.add_row(*words, style=STYLES[finding.verdict])
    console = PlainConsole(160)
    console.print(table)
    if report.identity:
        console.print(f"identity {report.identity}", highlight=False)
        for name, value in report.facts.items():
            console.print(f"  {name}: {value}", highlight=False)
    print(f"{failed} failed, {count[Verdict.WARN]} warnings, {count[Verdict.OK]} ok")
    return int(failed > 0)
