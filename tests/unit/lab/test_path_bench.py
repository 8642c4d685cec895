"""`hybridkv bench path` on the device without hardware; tests/programs runs it on the processor."""

from pathlib import Path

import pytest

from hybridkv.lab.path_bench import PathOptions, measure_path
from tests.devicesim.threaded import ThreadedDevice

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("checksum", ["on", "off"])
def test_a_device_is_compared_with_copies_of_its_own(tmp_path: Path, checksum: str) -> None:
    """Stores with a copy from the device, loads with a copy to it; all bytes come back (F13)."""
    options = PathOptions(8 << 20, layers=4, block_bytes=64 << 10, checksum=checksum)
    row = measure_path(str(tmp_path / "d.sock"), options, ThreadedDevice())
    assert row["bytes"] == "8MiB"
    for direction, copy in (("store", "copy_out"), ("load", "copy_in")):
        ratios = [row[f"{direction}_ratio{suffix}"] for suffix in ("_min", "", "_max")]
        assert ratios == sorted(ratios)
        assert row[f"{copy}_GBps"] > 0


def test_more_than_the_staging_holds_is_stored_in_batches(tmp_path: Path) -> None:
    """The default of 512 MiB was refused when the staging had 256 (F13)."""
    device = ThreadedDevice()
    device.habits.free_bytes = 40 << 20
    options = PathOptions(16 << 20, layers=4, block_bytes=64 << 10)
    assert measure_path(str(tmp_path / "d.sock"), options, device)["store_GBps"] > 0
