"""`hybridkv import`: puts the objects of an exported file into a directory of daemons."""

import argparse
import contextlib
import os
import time
import uuid
from collections import Counter
from typing import BinaryIO

from hybridkv.cli.arguments import JSON, option
from hybridkv.cli.terminal import print_json, progress
from hybridkv.core.errors import ConfigError
from hybridkv.core.sizes import format_size
from hybridkv.core.tier_urls import disk_url, parse_tier
from hybridkv.lab.bundle import BundleMember, read_bundle
from hybridkv.tiers.contract import FullError, TierError, WriteRequest
from hybridkv.tiers.disk.tier import DiskTier

TEND_SECONDS = 1.0
ARGUMENTS = (
    option("file", "FILE", "of hybridkv export"),
    option(
        "--disk",
        "DIRECTORY",
        "as of hybridkv serve; its daemon reads the objects at once,"
        " and keeps them within its own bound",
        required=True,
    ),
    option(
        *("--disk-bytes", "SIZE"),
        'the most to import, like "20GiB" (default: half of what is free)',
    ),
    JSON,
)


def run(arguments: argparse.Namespace) -> int:
    """Write what is proven and print; 1 if anything was wrong."""
    spec = parse_tier(disk_url(os.path.abspath(arguments.disk), arguments.disk_bytes), "disk")
    try:
        file = open(arguments.file, "rb")  # noqa: SIM115  # closed below
    except OSError as error:
        what = f"import: {arguments.file} cannot be read ({error.strerror})"
        raise ConfigError(what, "a file of hybridkv export works") from error
    with file:
        tier = DiskTier(spec, f"import-{uuid.uuid4().hex[:8]}", adopts=False)
        try:
            tier.open()
        except TierError as error:
            what = f"disk: {arguments.disk} cannot be used ({error})"
            raise ConfigError(what, "another directory works") from error
        try:
            counts = _import(file, arguments.file, tier)
        finally:
            tier.close()
            with contextlib.suppress(OSError):
                tier.leave()
    imported = counts.pop("imported", 0)
    kept, size = (int(tier.gauges()[name]) for name in ("objects", "bytes"))
    if arguments.json:
        print_json({"objects": imported, "kept": kept, "bytes": size, **counts})
    else:
        within = f"{kept} of them are within the bound, {format_size(size)}"
        print(f"imported {imported} objects; {within}")
        for why, count in sorted(counts.items()):
            print(f"left out {count}: {why}")
    return int(bool(set(counts) - {"there already"}))


def _import(file: BinaryIO, name: str, tier: DiskTier) -> Counter[str]:
    """What became of the records, in words."""
    counts: Counter[str] = Counter()
    tend_at = time.monotonic() + TEND_SECONDS
    with progress("importing", None) as step:
        for member in read_bundle(file, f"import: {name}"):
            if time.monotonic() >= tend_at:
                # Without this sign of life daemons would take away what is imported already.
                tier.tend()
                tend_at = time.monotonic() + TEND_SECONDS
            counts[_put(tier, member)] += 1
            step()
    return counts


def _put(tier: DiskTier, member: BundleMember) -> str:
    record = member.proof.record
    if member.proof.damage is not None or record is None:
        return "damaged" if member.name else "the file ends too early"
    key = record.name.key
    if tier.peek(key):
        return "there already"
    write = WriteRequest(key, [member.proof.memory], record.parent, record.interior)
    (error,) = tier.put([write])
    if isinstance(error, FullError):
        return "no room"
    return "imported" if error is None else "not written"
