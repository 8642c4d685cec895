"""`hybridkv fsck`: is every file of a directory tier the record that its name says?"""

import argparse
import json
from pathlib import Path
from typing import Any

from rich.table import Table

from hybridkv.cli.progress import progress
from hybridkv.cli.terminal import plain, plain_console
from hybridkv.core.errors import ConfigError
from hybridkv.core.sizes import format_size
from hybridkv.tiers.disk.fsck import FsckReport, fsck, list_files
from hybridkv.tiers.disk.writers import check_root

EXIT_DAMAGED = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `fsck`."""
    where = "as of hybridkv serve; daemons may use it"
    parser.add_argument("--disk", required=True, metavar="DIRECTORY", help=where)
    parser.add_argument(
        "--repair",
        action="store_true",
        help="put damaged files into quarantine, give whole ones their own names,"
        " remove what dead writers began",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Prove and print; 1 if anything is damaged and stays so."""
    root = Path(arguments.disk)
    check_root(root, "disk")
    try:
        files = list_files(root)
        with progress("proving", sum(map(len, files.values()))) as step:
            report = fsck(root, files, arguments.repair, step)
    except OSError as error:
        raise ConfigError(
            f"disk: {root} cannot be checked ({error.strerror})",
            f"a directory that you may read{' and write to' if arguments.repair else ''} works",
        ) from error
    if arguments.json:
        print(json.dumps(_json(report), indent=2))
    else:
        _print(report)
    return EXIT_DAMAGED if report.damaged > report.repaired else 0


def _json(report: FsckReport) -> dict[str, Any]:
    return {
        "damaged": report.damaged,
        "repaired": report.repaired,
        "quarantined": report.quarantined,
        "quarantined_bytes": report.quarantined_bytes,
        "writers": [
            vars(writer) | {"damaged": {str(kind): n for kind, n in sorted(writer.damaged.items())}}
            for writer in report.writers
        ],
        "files": [finding._asdict() for finding in report.findings],
    }


def _print(report: FsckReport) -> None:
    table = Table()
    for column in ("writer", "lives"):
        table.add_column(column)
    for column in ("whole", "bytes", "damaged", "repaired", "foreign", "leftovers", "removed"):
        table.add_column(column, justify="left" if column == "damaged" else "right")
    for one in report.writers:
        damaged = ", ".join(f"{count} {kind}" for kind, count in sorted(one.damaged.items()))
        counts = (one.repaired, one.foreign, one.leftovers, one.leftovers_removed)
        table.add_row(
            *(plain(one.name), "yes" if one.is_alive else "no", str(one.whole)),
            *(format_size(one.whole_bytes), damaged or "0", *map(str, counts)),
        )
    plain_console(120).print(table)
    for finding in report.findings:
        done = f"; {finding.done}" if finding.done else ""
        print(f"{plain(finding.path)}: {finding.damage}{done}")
    print(f"quarantine: {report.quarantined} files, {format_size(report.quarantined_bytes)}")
