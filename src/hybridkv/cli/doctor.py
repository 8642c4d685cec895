"""`hybridkv doctor`: a `vllm serve` command line checked before it is served."""

import argparse
from collections import Counter
from dataclasses import asdict

from hybridkv.cli.arguments import add_json
from hybridkv.cli.terminal import STYLES, new_table, plain_console, print_json
from hybridkv.core.findings import Finding, Verdict
from hybridkv.lab.configuration import ConfigReport, inspect_arguments, serve_arguments
from hybridkv.lab.host import host_findings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `doctor`."""
    add_json(parser)
    parser.add_argument(
        "vllm_arguments",
        nargs="+",
        metavar="-- VLLM ARGS",
        help='a whole "vllm serve MODEL ..." command line, or its arguments',
    )


def run(arguments: argparse.Namespace) -> int:
    """Run every check and print; 1 = the engine would not start, or not use the cache."""
    report = inspect_arguments(serve_arguments(arguments.vllm_arguments))
    findings = [*report.findings, *host_findings(report)]
    failed = any(finding.verdict is Verdict.FAIL for finding in findings)
    if arguments.json:
        checks = [asdict(finding) for finding in findings]
        identity = {"identity": report.identity, "identity_facts": report.facts}
        print_json({"ok": not failed, "checks": checks, **identity})
    else:
        _print_table(findings, report)
    return int(failed)


def _print_table(findings: list[Finding], report: ConfigReport) -> None:
    columns = ("check", "state", "what", "remedy")
    table = new_table(columns, columns, "hybridkv doctor")
    for column in table.columns:
        column.overflow = "fold"
    for finding in findings:
        words = (finding.check, str(finding.verdict), finding.what, finding.remedy)
        table.add_row(*words, style=STYLES[finding.verdict])
    console = plain_console(160)
    console.print(table)
    if report.identity:
        console.print(f"identity {report.identity}", highlight=False)
        for name, value in report.facts.items():
            console.print(f"  {name}: {value}", highlight=False)
    count = Counter(finding.verdict for finding in findings)
    print(f"{count[Verdict.FAIL]} failed, {count[Verdict.WARN]} warnings, {count[Verdict.OK]} ok")
