"""`hybridkv bench path` on the device without hardware; tests/programs runs it on the processor."""

from pathlib import Path

import pytest

from hybridkv.lab.path_bench import measure_path
from tests.devicesim.threaded import ThreadedDevice

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("checksum", ["on", "off"])
def test_a_device_is_compared_with_copies_of_its_own(tmp_path: Path, checksum: str) -> None:
    """Stores with a copy from the device, loads with a copy to it; all bytes come back (F13)."""
    socket_path, total = str(tmp_path / "d.sock"), 8 << 20
    told = measure_path(socket_path, total, 4, 64 << 10, checksum, "cpu", ThreadedDevice())
    assert told["bytes"] == "8MiB"
    for way, copy in (("store", "copy_out"), ("load", "copy_in")):
        assert told[f"{way}_ratio_min"] <= told[f"{way}_ratio"] <= told[f"{way}_ratio_max"]
        assert told[f"{copy}_GBps"] > 0


def test_more_than_the_staging_holds_is_stored_in_batches(tmp_path: Path) -> None:
    """The default of 512 MiB was refused when the staging had 256 (F13)."""
    device = ThreadedDevice()
    device.habits.free_bytes = 40 << 20
    told = measure_path(str(tmp_path / "d.sock"), 16 << 20, 4, 64 << 10, "on", "cpu", device)
    assert told["store_GBps"] > 0
