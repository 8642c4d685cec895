"""A daemon process answers or closes on any bytes, and a good client notices nothing."""

from hybridkv.lab.daemon_process import DaemonProcess
from tests.fuzz.process import ProcessFuzz

SEED = 20260
CASES = 8_000


def test_a_daemon_process_and_a_good_client_beside_the_liars(daemon: DaemonProcess) -> None:
    fuzz = ProcessFuzz(SEED, daemon)
    fuzz.run(CASES)
    assert fuzz.seen["wire"] > 0
    assert fuzz.seen["Found"] > 0
