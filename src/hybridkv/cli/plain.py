"""Text of others on a terminal: shown as it is, and obeyed by nobody."""

from rich.console import Console


def plain(text: str) -> str:
    """What clients named may have anything in it that a terminal obeys."""
    return "".join(one if one.isprintable() else "\ufffd" for one in text)


def plain_console(width: int) -> Console:
    """Standard output, `width` columns wide where it is no terminal; no word in it is markup."""
    console = Console(markup=False, emoji=False)
    if not console.file.isatty():
        console.width = width
    return console
