"""`hybridkv import`: puts the objects of an exported file into a directory of daemons."""

import argparse
import contextlib
import json
import os
import time
import uuid
from collections import Counter
from typing import BinaryIO

from hybridkv.cli.progress import progress
from hybridkv.core.errors import ConfigError
from hybridkv.core.sizes import format_size
from hybridkv.core.tier_urls import disk_url, parse_tier
from hybridkv.lab.bundle import BundleMember, read_bundle
from hybridkv.tiers.contract import FullError, TierError, WriteRequest
from hybridkv.tiers.disk.tier import DiskTier

EXIT_DAMAGED = 1
TEND_SECONDS = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `import`."""
    parser.add_argument("file", metavar="FILE", help="of hybridkv export")
    parser.add_argument(
        "--disk",
        required=True,
        metavar="DIRECTORY",
        help="as of hybridkv serve; its daemon reads the objects at once,"
        " and keeps them within its own bound",
    )
    parser.add_argument(
        "--disk-bytes",
        metavar="SIZE",
        help='the most to import, like "20GiB" (default: half of what is free)',
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Write what is proven and print; 1 if anything was wrong."""
    spec = parse_tier(disk_url(os.path.abspath(arguments.disk), arguments.disk_bytes), "disk")
    try:
        file = open(arguments.file, "rb")  # noqa: SIM115  # closed below
    except OSError as error:
        raise ConfigError(
            f"import: {arguments.file} cannot be read ({error.strerror})",
            "a file of hybridkv export works",
        ) from error
    with file:
        tier = DiskTier(spec, f"import-{uuid.uuid4().hex[:8]}", adopts=False)
        try:
            tier.open()
        except TierError as error:
            raise ConfigError(
                f"disk: {arguments.disk} cannot be used ({error})", "another directory works"
            ) from error
        counts: Counter[str] = Counter()
        try:
            _import(file, arguments.file, tier, counts)
        finally:
            tier.close()
            with contextlib.suppress(OSError):
                tier.leave()
    imported = counts.pop("imported", 0)
    kept, size = (int(tier.gauges()[name]) for name in ("objects", "bytes"))
    if arguments.json:
        print(json.dumps({"objects": imported, "kept": kept, "bytes": size, **counts}, indent=2))
    else:
        within = f"{kept} of them are within the bound, {format_size(size)}"
        print(f"imported {imported} objects; {within}")
        for why, count in sorted(counts.items()):
            print(f"left out {count}: {why}")
    return EXIT_DAMAGED if set(counts) - {"there already"} else 0


def _import(file: BinaryIO, name: str, tier: DiskTier, counts: Counter[str]) -> None:
    tend_at = time.monotonic() + TEND_SECONDS
    with progress("importing", None) as step:
        for member in read_bundle(file, f"import: {name}"):
            if time.monotonic() >= tend_at:
                # Without this sign of life daemons would take away what is imported already.
                tier.tend()
                tend_at = time.monotonic() + TEND_SECONDS
            counts[_put(tier, member)] += 1
            step()


def _put(tier: DiskTier, member: BundleMember) -> str:
    """Put one record; returns what became of it, in words."""
    record = member.proof.record
    if member.proof.damage is not None or record is None:
        return "damaged" if member.name else "the file ends too early"
    if tier.peek(record.name.key):
        return "there already"
    key, pieces = record.name.key, [member.proof.memory]
    (error,) = tier.put([WriteRequest(key, pieces, record.parent, record.interior)])
    if isinstance(error, FullError):
        return "no room"
    return "imported" if error is None else "not written"
