"""`hybridkv fsck`: is every file of a directory tier the record that its name says?"""

import argparse
import json
from pathlib import Path
from typing import Any

from rich.table import Table

from hybridkv.cli.plain import plain, plain_console
from hybridkv.cli.progress import progress
from hybridkv.core.errors import ConfigError
from hybridkv.core.sizes import format_size
from hybridkv.storage.tiers.files import check_root
from hybridkv.storage.tiers.fsck import Report, WriterReport, fsck, list_files

EXIT_DAMAGED = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `fsck`."""
    parser.add_argument("--disk", required=True, metavar="DIRECTORY", help="as of hybridkv serve; daemons may use it")
    parser.add_argument(
        "--repair",
        action="store_true",
        help="put damaged files into quarantine, give whole ones their own names, remove what dead writers began",
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
            f"disk: {root} cannot be checked ({error.strerror}); a directory that you may read"
            f"{' and write to' if arguments.repair else ''} works"
        ) from error
    if arguments.json:
        print(json.dumps(_json(report), indent=2))
    else:
        _print(report)
    return EXIT_DAMAGED if report.damaged > report.repaired else 0


def _json(report: Report) -> dict[str, Any]:
    return {
        "damaged": report.damaged,
        "repaired": report.repaired,
        "quarantined": report.quarantined,
        "quarantined_bytes": report.quarantined_bytes,
        "writers": [_json_writer(writer) for writer in report.writers],
        "files": [finding._asdict() for finding in report.findings],
    }


def _json_writer(writer: WriterReport) -> dict[str, Any]:
    return {
        "name": writer.name,
        "is_alive": writer.is_alive,
        "whole": writer.whole,
        "whole_bytes": writer.whole_bytes,
        "damaged": {str(damage): count for damage, count in sorted(writer.damaged.items())},
        "damaged_bytes": writer.damaged_bytes,
        "repaired": writer.repaired,
        "foreign": writer.foreign,
        "leftovers": writer.leftovers,
        "leftovers_removed": writer.leftovers_removed,
    }


def _print(report: Report) -> None:
    table = Table()
    for column in ("writer", "lives", "whole", "bytes", "damaged", "repaired", "foreign", "leftovers", "removed"):
        table.add_column(column, justify="left" if column in ("writer", "lives", "damaged") else "right")
    for writer in report.writers:
        damaged = ", ".join(f"{count} {damage}" for damage, count in sorted(writer.damaged.items()))
        table.add_row(
            plain(writer.name),
            "yes" if writer.is_alive else "no",
            *(str(writer.whole), format_size(writer.whole_bytes), damaged or "0", str(writer.repaired)),
            *(str(writer.foreign), str(writer.leftovers), str(writer.leftovers_removed)),
        )
    plain_console(120).print(table)
    for finding in report.findings:
        print(f"{plain(finding.path)}: {finding.damage}{f'; {finding.done}' if finding.done else ''}")
    print(f"quarantine: {report.quarantined} files, {format_size(report.quarantined_bytes)}")
