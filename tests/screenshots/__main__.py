"""`python -m tests.screenshots` takes pictures of a daemon under load for scripts/screenshots."""

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.text import Text

from hybridkv.client.control import ControlClient
from hybridkv.lab.daemon_process import DaemonProcess
from tests.screenshots.browser import Browser, find_browser
from tests.screenshots.load import ENGINES, Player
from tests.screenshots.svg import write_svg

IMAGES = Path(__file__).parents[2] / "docs" / "images"
SECONDS = 420
COLUMNS, LINES = 100, 36
PATIENCE_SECONDS = 20.0
RUN = "import sys; from hybridkv.cli.main import main; sys.exit(main())"


def main() -> int:
    """Make the pictures of docs/images."""
    parser = argparse.ArgumentParser(prog="scripts/screenshots", description=__doc__)
    parser.add_argument(
        "--seconds",
        type=int,
        default=SECONDS,
        help="of load before the first picture (%(default)s)",
    )
    parser.add_argument("--images", type=Path, default=IMAGES, metavar="DIRECTORY")
    arguments = parser.parse_args()
    browser = find_browser()
    missing = [
        name for name, there in (("chromium", browser), ("tmux", shutil.which("tmux"))) if not there
    ]
    if browser is None or missing:
        print(
            f"{' and '.join(missing)} not found; apt-get install {' '.join(missing)} works",
            file=sys.stderr,
        )
        return 2
    arguments.images.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="hybridkv-demo-") as place:
        socket_path = f"{place}/daemon.sock"
        options = ["--disk", f"{place}/disk", "--disk-bytes", "224MiB"]
        with DaemonProcess(socket_path, "192MiB", metrics_port=0, options=options):
            players = [Player(socket_path, served, seed) for seed, served in enumerate(ENGINES)]
            for player in players:
                player.start()
            try:
                time.sleep(arguments.seconds)
                take(Browser(browser), socket_path, arguments.images)
            finally:
                for player in players:
                    player.stop()
    failed = [player.failed for player in players if player.failed is not None]
    if failed:
        print(f"an engine failed: {failed[0]!r}", file=sys.stderr)
    return 1 if failed else 0


def take(browser: Browser, socket_path: str, images: Path) -> None:
    """The pictures, of a daemon that is at work."""
    with ControlClient(socket_path) as control:
        url = control.stats().metrics_url.removesuffix("metrics")
    for name, is_dark in (("status.png", False), ("status-dark.png", True)):
        browser.picture(url, images / name, is_dark)
        print(images / name)
    shown = terminal(["top", "--socket", socket_path], COLUMNS, LINES)
    console = Console(record=True, width=COLUMNS, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(Text.from_ansi(shown))
    write_svg(console, "hybridkv top", images / "top.svg")
    (images / "top.txt").write_text(
        "\n".join(line.rstrip() for line in console.export_text().splitlines()) + "\n"
    )
    print(images / "top.svg", images / "top.txt", sep="\n")


def terminal(arguments: list[str], columns: int, lines: int, until: str = "hybridkv") -> str:
    """Returns the picture of a command in a terminal of that size. Raises TimeoutError."""
    command = shlex.join([sys.executable, "-c", RUN, *arguments])
    tmux = ["tmux", "-L", f"hybridkv-{os.getpid()}"]
    start = [
        "new-session",
        "-d",
        "-x",
        str(columns),
        "-y",
        str(lines),
        "-e",
        f"PYTHONPATH={os.pathsep.join(sys.path)}",
    ]
    subprocess.run([*tmux, "-f", "/dev/null", *start, command], check=True)
    try:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            shown = subprocess.run(
                [*tmux, "capture-pane", "-p", "-e"], check=True, stdout=subprocess.PIPE, text=True
            )
            if until in shown.stdout:
                return shown.stdout
            time.sleep(0.2)
        raise TimeoutError(f"{command} shows nothing")
    finally:
        subprocess.run([*tmux, "kill-server"], check=True)


if __name__ == "__main__":
    sys.exit(main())
