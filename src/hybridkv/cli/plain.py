"""Text of others on a terminal: shown as it is, and obeyed by nobody."""

from rich.console import Console


def plain(text: str) -> str:
    """What clients named may have anything in it that a terminal obeys."""
    return "".join(one if one.isprintable() else "\ufffd" for one in text)


class PlainConsole(Console):
    """Standard output on which no word is markup."""

    def __init__(self) -> None:
        super().__init__(markup=False, emoji=False)

    def on_broken_pipe(self) -> None:
        """Left to the command, which ends as it does without this library."""
        raise BrokenPipeError


def plain_console(width: int) -> PlainConsole:
    """One that is `width` columns wide where it is no terminal."""
    console = PlainConsole()
    if not console.file.isatty():
        console.width = width
    return console
