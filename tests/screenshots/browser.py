"""A real browser without a window: pictures of a page, and the elements that its scripts made."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome")
WIDTH, HEIGHT = 1280, 1960
BUDGET_MS = 3000
"""Time that the page's clock goes on, as fast as it can, while nothing is being fetched."""
PATIENCE_SECONDS = 60.0


def find_browser() -> str | None:
    """Returns the path of Chromium, None where it is not installed."""
    return next((path for path in map(shutil.which, NAMES) if path), None)


class Browser:
    """Chromium, started for each page with a profile of its own."""

    def __init__(self, path: str) -> None:
        self._path = path

    def picture(
        self, url: str, image: Path, is_dark: bool = False, size: tuple[int, int] = (WIDTH, HEIGHT)
    ) -> None:
        """Write a PNG of the page."""
        self._run(
            url,
            [f"--screenshot={image}", f"--window-size={size[0]},{size[1]}", "--hide-scrollbars"],
            is_dark,
        )
        assert image.stat().st_size

    def elements(self, url: str) -> str:
        """The document as HTML, after its scripts ran."""
        return self._run(url, ["--dump-dom", f"--window-size={WIDTH},{HEIGHT}"])

    def _run(self, url: str, options: list[str], is_dark: bool = False) -> str:
        with tempfile.TemporaryDirectory(prefix="hybridkv-browser-") as profile:
            command = [
                self._path,
                "--headless=new",
                f"--user-data-dir={profile}",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--no-first-run",
                "--disable-background-networking",
                "--disable-component-update",
                "--disable-sync",
                "--force-device-scale-factor=1",
                f"--blink-settings=preferredColorScheme={0 if is_dark else 1}",
                f"--virtual-time-budget={BUDGET_MS}",
                *(["--no-sandbox"] if os.geteuid() == 0 else []),
                *options,
                url,
            ]
            browser = subprocess.run(
                command,
                check=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                timeout=PATIENCE_SECONDS,
                text=True,
            )
        return browser.stdout
