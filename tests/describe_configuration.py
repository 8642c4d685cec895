"""`python -m tests.describe_configuration [--write]`: tables of the documents on settings.

These are docs/configuration.md and tiers.md. Settings come from the docstrings of
their dataclasses, options from the commands' parsers. What is between
`<!-- table: NAME -->` and `<!-- end -->` is made here.
"""

import argparse
import ast
import dataclasses
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import NamedTuple

from hybridkv.cli.arguments import CONFIG
from hybridkv.cli.main import COMMANDS, add_arguments
from hybridkv.core.daemon_settings import CONFIG_VARIABLE, DAEMON_SETTINGS
from hybridkv.core.settings import Settings
from tests.documents import DOCS, filled, print_or_write_all, table

PAGES = (DOCS / "configuration.md", DOCS / "tiers.md")
NONE = "-"
_KEYED = re.compile(r"`(\w+)`: ")
_ABOUT = {
    "socket": "The daemon's socket (default: `$XDG_RUNTIME_DIR/hybridkv/daemon.sock`, or "
    "`/tmp/hybridkv-UID/daemon.sock` if that is no directory of yours)."
}
"""The help of options that have none in the parser, because it would depend on the machine."""


class TierOption(NamedTuple):
    """An option of a tier's URL."""

    default: str
    meaning: str


TIER_OPTIONS: Mapping[str, Mapping[str, TierOption]] = {
    "any": {
        "bytes": TierOption(
            "by kind",
            "The most that a directory may hold, or that this node gives to Mooncake, "
            "like `200GiB`. Valkey and buckets refuse this option: their servers have a bound.",
        ),
        "write": TierOption(
            "`through`",
            "When objects are written to the tier. `through`: as soon as they are stored in RAM; "
            "windows inside a prompt once a lookup hits them, where hits seldom end; "
            "chunks with tokens of an answer once a lookup hits them, or when they are about "
            "to be evicted. `back`: when they are "
            "about to be evicted from RAM. `off`: never; the tier is only read.",
        ),
        "hourly": TierOption(
            "no bound",
            "The most that is written in an hour, like `10GiB`, to spare an SSD. "
            "Objects that nobody has read a "
            "second time are left out first.",
        ),
        "timeout": TierOption(
            "`5`",
            "Seconds that one call may take, 0.01 to 60. A call that takes longer counts "
            "as a failure, and the tier "
            "is left alone until it answers.",
        ),
        "codec": TierOption(
            "`none`",
            "The lossless compression of objects that are written. `zplanes`: the bytes of "
            "numbers in planes, each by zstd. Objects of any codec are read.",
        ),
        "key": TierOption(
            NONE,
            "`file:` and the path of a file with 32 random bytes, the key by which objects are "
            "encrypted. Objects that are not encrypted with this key are not read.",
        ),
        "class": TierOption(
            NONE,
            "`MODULE:CLASS` of a [tier of your own](tiers-of-your-own.md), with a scheme that no "
            "installed package registers.",
        ),
    },
    "valkey": {
        "prefix": TierOption("`hybridkv:1:`", "The beginning of every key."),
        "password_file": TierOption(
            NONE,
            "A file with the password, which is then in no command line. The daemon reads the file "
            "again when it opens the tier again, and when a server refuses a new connection.",
        ),
        "ca": TierOption(
            "the system's",
            "With TLS: a file with the certificate of the authority that signed the server's.",
        ),
        "db": TierOption(
            "`0`",
            "With a Unix socket: the number of the database. Over TCP it is the path, as in `/0`.",
        ),
    },
    "bucket": {
        "endpoint": TierOption(
            "the provider's",
            "The address of another server, like `http://127.0.0.1:9000` of an S3-compatible one.",
        ),
        "region": TierOption(NONE, "Of `s3`: the region of the bucket, like `eu-central-1`."),
        "account": TierOption("`AZURE_STORAGE_ACCOUNT_NAME`", "Of `az`: the storage account."),
    },
    "mooncake": {
        "local_hostname": TierOption(
            "`127.0.0.1`", "This node's address as other nodes reach it. Needed with `bytes=`."
        ),
        "protocol": TierOption("`tcp`", "`tcp` or `rdma`. RDMA was never tried."),
        "device": TierOption(NONE, "The RDMA devices, separated by commas."),
        "metadata": TierOption(
            "P2PHANDSHAKE", "The address of Mooncake's metadata server, if there is one."
        ),
        "admin": TierOption(
            "`9003`", "The port, or host and port, of the master's HTTP server. It lists the keys."
        ),
        "buffer": TierOption(
            "`512MiB`",
            "Memory shared with Mooncake's client. A quarter of it is the largest record.",
        ),
        "log": TierOption(NONE, "A file for the output of Mooncake's library."),
    },
    "inject": {
        "rate": TierOption("no bound", "Bytes per second of all calls together, like `1MiB`."),
        "latency": TierOption("`0`", "Seconds that are added to each call."),
        "fail": TierOption("`0`", "The share of items that fail, 0 to 1."),
        "lose": TierOption("`0`", "The share of items that are missing."),
        "damage": TierOption("`0`", "The share of items that come back with a flipped bit."),
        "seed": TierOption("random", "The seed of these decisions."),
    },
}
"""What a tier's URL takes, by kind of tier. A test checks the names."""


class DocumentedKey(NamedTuple):
    """A key of the settings, with the paragraph that describes it."""

    key: str
    field: dataclasses.Field[object]
    meaning: str


def documented(settings: type) -> Iterator[DocumentedKey]:
    """Yields the keys of each field that has a docstring.

    A paragraph that begins with "`key`: " describes that key, any other the field's own name.
    """
    known = {field.name: field for field in dataclasses.fields(settings)}
    body = ast.parse(textwrap.dedent(inspect.getsource(settings))).body[0]
    assert isinstance(body, ast.ClassDef)
    field = None
    for node in body.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            field = known.get(node.target.id)
        elif (
            field is not None
            and isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
        ):
            for paragraph in re.split(r"\n\s*\n", str(node.value.value)):
                text = " ".join(paragraph.split())
                named = _KEYED.match(text)
                yield DocumentedKey(
                    key=named[1] if named else field.name,
                    field=field,
                    meaning=text[named.end() :] if named else text,
                )
            field = None


def _default(field: dataclasses.Field[object]) -> str:
    value = field.default
    if value is None or value == () or value is dataclasses.MISSING:
        return NONE
    return f"`{json.dumps(value)}`"


def _settings(settings: type) -> str:
    rows = [
        [f"`{setting.key}`", _default(setting.field), _sentence(setting.meaning)]
        for setting in documented(settings)
    ]
    return table(["key", "default", "meaning"], rows)


def _tier_options(kind: str) -> str:
    rows = [
        [f"`{name}=`", option.default, option.meaning]
        for name, option in TIER_OPTIONS[kind].items()
    ]
    return table(["option", "default", "meaning"], rows)


def parser_of(command: str) -> argparse.ArgumentParser:
    """The parser of `hybridkv COMMAND`."""
    about = COMMANDS[command][1]
    parser = argparse.ArgumentParser(prog=f"hybridkv {command}", description=about)
    add_arguments(parser, command)
    return parser


def _daemon_settings() -> str:
    """Returns the table of the daemon's settings, with the name of each in each place."""
    rows = [["`--config FILE`", "`config`", f"`{CONFIG_VARIABLE}`", _sentence(CONFIG[1]["help"])]]
    for row in DAEMON_SETTINGS.values():
        action = next(a for a in parser_of("serve")._actions if row.option in a.option_strings)
        option = f"`{', '.join(action.option_strings)}`" if row.is_switch else _named(action)
        names = f"`{row.key}`", f"`{row.variable}`"
        rows.append([option, *names, _ABOUT.get(row.key) or _sentence(row.help)])
    return table(["option", "key", "variable", "meaning"], rows)


def _named(action: argparse.Action) -> str:
    value = action.metavar or (
        f"{{{','.join(map(str, action.choices))}}}" if action.choices else action.dest.upper()
    )
    if not action.option_strings:
        return f"`{value}`"
    return (
        f"`{', '.join(action.option_strings)}`"
        if action.nargs == 0
        else f"`{action.option_strings[-1]} {value}`"
    )


def _sentence(text: str) -> str:
    text = text.strip().replace("<", "&lt;")
    return text if not text or text.endswith(".") else f"{text}."


TABLES: Mapping[str, Callable[[], str]] = {
    "settings": partial(_settings, Settings),
    **{f"tier_options_{kind}": partial(_tier_options, kind) for kind in TIER_OPTIONS},
    "options_serve": _daemon_settings,
}


def main() -> int:
    """Print or write the pages."""
    return print_or_write_all({page: filled(page.read_text(), TABLES) for page in PAGES}, __doc__)


if __name__ == "__main__":
    sys.exit(main())
