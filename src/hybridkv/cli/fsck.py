"""`hybridkv fsck`: every object of a directory is proven, and what is wrong is put right."""

import argparse
from pathlib import Path

from hybridkv.cli.arguments import JSON, command, option, or_refuse, switch
from hybridkv.cli.terminal import PlainConsole, new_table, plain, print_json, progress
from hybridkv.core.sizes import format_size
from hybridkv.core.tier_urls import parse_key
from hybridkv.tiers.coding import PLAIN, Coding
from hybridkv.tiers.disk.fsck import fsck, list_files
from hybridkv.tiers.disk.writers import check_root
from hybridkv.tiers.encryption import read_key


@command(
    option("--disk DIRECTORY", "as of hybridkv serve; daemons may use it", required=True),
    switch(
        "--repair",
        "put damaged files into quarantine, give whole ones their own names,"
        " remove what dead writers began",
    ),
    option("--key file:PATH", "the key of encrypted objects, as in a tier's URL"),
    JSON,
)
def run_fsck(arguments: argparse.Namespace) -> int:
    """Prove every object and print. Returns 1 if anything is damaged and stays so."""
    root, coding = Path(arguments.disk), PLAIN
    if arguments.key is not None:
        coding = Coding(key=read_key(parse_key(arguments.key, "--key"), "--key"), takes_plain=True)
    check_root(root)
    works = f"a directory that you may read{' and write to' if arguments.repair else ''} works"
    with or_refuse(f"disk: {root} cannot be checked", works):
        files = list_files(root)
        with progress("proving", sum(map(len, files.values()))) as step:
            report = fsck(root, files, arguments.repair, step, coding)
    status = int(report.damaged > report.repaired)
    if arguments.json:
        totals = ("damaged", "repaired", "quarantined", "quarantined_bytes")
        writers = [
            vars(writer) | {"damaged": {str(kind): n for kind, n in sorted(writer.damaged.items())}}
            for writer in report.writers
        ]
        found = [finding._asdict() for finding in report.findings]
        counts = {name: getattr(report, name) for name in totals}
        print_json({**counts, "writers": writers, "files": found})
        return status
    left = ("writer", "lives", "damaged")
    table = new_table(
        (
            "writer",
            "lives",
            "whole",
            "bytes",
            "undecodable",
            "damaged",
            "repaired",
            "foreign",
            "leftovers",
            "removed",
        ),
        left,
    )
    for writer in report.writers:
        damaged = ", ".join(f"{count} {kind}" for kind, count in sorted(writer.damaged.items()))
        table.add_row(
            plain(writer.name),
            "yes" if writer.is_alive else "no",
            str(writer.whole),
            format_size(writer.whole_bytes),
            str(writer.undecodable),
            damaged or "0",
            str(writer.repaired),
            str(writer.foreign),
            str(writer.leftovers),
            str(writer.leftovers_removed),
        )
    PlainConsole(120).print(table)
    for finding in report.findings:
        done = f"; {finding.done}" if finding.done else ""
        print(f"{plain(finding.path)}: {finding.damage}{done}")
    print(f"quarantine: {report.quarantined} files, {format_size(report.quarantined_bytes)}")
    return status
