"""A picture of what a console printed."""

import re
from pathlib import Path

from rich.console import Console


def write_svg(console: Console, title: str, path: Path) -> None:
    """Write what a recording console printed. It keeps its record."""
    # The picture is shown without the network: whatever monospaced font is there does.
    svg = console.export_svg(title=title, clear=False)
    path.write_text(re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL))
