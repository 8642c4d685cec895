"""`hybridkv fsck`: is every file of a directory tier the record that its name says?"""

import argparse
from pathlib import Path

from hybridkv.cli.arguments import JSON, command, option, or_refuse, switch
from hybridkv.cli.terminal import PlainConsole, new_table, plain, print_json, progress
from hybridkv.core.sizes import format_size
from hybridkv.tiers.disk.fsck import fsck, list_files
from hybridkv.tiers.disk.writers import check_root


@command(
    option("--disk DIRECTORY", "as of hybridkv serve; daemons may use it", required=True),
    switch(
        "--repair",
        "put damaged files into quarantine, give whole ones their own names,"
        " remove what dead writers began",
    ),
    JSON,
)
def run_fsck(arguments: argparse.Namespace) -> int:
    """Prove and print; 1 if anything is damaged and stays so."""
    root = Path(arguments.disk)
    check_root(root, "disk")
    works = f"a directory that you may read{' and write to' if arguments.repair else ''} works"
    with or_refuse(f"disk: {root} cannot be checked", works):
        files = list_files(root)
        with progress("proving", sum(map(len, files.values()))) as step:
            report = fsck(root, files, arguments.repair, step)
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
    columns = ("whole", "bytes", "damaged", "repaired", "foreign", "leftovers", "removed")
    table = new_table(("writer", "lives", *columns), ("writer", "lives", "damaged"))
    for one in report.writers:
        damaged = ", ".join(f"{count} {kind}" for kind, count in sorted(one.damaged.items()))
        more = (one.repaired, one.foreign, one.leftovers, one.leftovers_removed)
        table.add_row(
            *(plain(one.name), "yes" if one.is_alive else "no", str(one.whole)),
            *(format_size(one.whole_bytes), damaged or "0", *map(str, more)),
        )
    PlainConsole(120).print(table)
    for finding in report.findings:
        done = f"; {finding.done}" if finding.done else ""
        print(f"{plain(finding.path)}: {finding.damage}{done}")
    print(f"quarantine: {report.quarantined} files, {format_size(report.quarantined_bytes)}")
    return status
