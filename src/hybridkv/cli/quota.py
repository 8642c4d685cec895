"""`hybridkv quota`: the most that a tenant may take of RAM, shown and set at run time."""

import argparse
import time

from hybridkv.cli.arguments import JSON, SOCKET, Argument, command, control_of, option, switch
from hybridkv.cli.ls import tenant_text
from hybridkv.cli.survey import SALT, read_salt
from hybridkv.cli.terminal import PlainConsole, new_table, plain, print_json
from hybridkv.client.control import ControlClient
from hybridkv.core.errors import ConfigError
from hybridkv.core.keys import tenant_of
from hybridkv.core.sizes import format_size, parse_size
from hybridkv.wire.messages import QuotaReport

NONE, DEFAULT = "none", "default"
ROWS_MAX = 40
SETTLE_SECONDS = 10.0
POLL_SECONDS = 0.02


def _bound(text: str) -> int | None:
    """Returns a bound in bytes. None = no bound. Raises ConfigError."""
    return None if text == NONE else parse_size(text, "quota")


@command(
    SALT._replace(
        keywords=SALT.keywords
        | {"help": "the cache_salt whose bound is set; - reads it from standard input"}
    ),
    switch("--default", "set the bound of all that have none of their own"),
    Argument(
        "size",
        {
            "nargs": "?",
            "metavar": "SIZE",
            "help": f'"2GiB", {NONE} for no bound, {DEFAULT} for the one of all others',
        },
    ),
    option("--rows COUNT", f"how many tenants to print (default: {ROWS_MAX}; 0: all)", type=int),
    SOCKET,
    JSON,
)
def run_quota(arguments: argparse.Namespace) -> int:
    """Print all bounds, after setting one if that is asked for. Returns 1 where none is kept."""
    salt, size = read_salt(arguments.salt), arguments.size
    is_setting = salt is not None or arguments.default
    if is_setting != (size is not None) or (salt is not None and arguments.default):
        what = "quota: a size needs one of --salt and --default, and they need a size"
        raise ConfigError(what, '"--default 4GiB" works')
    if size == DEFAULT and salt is None:
        raise ConfigError("quota: the default is what is set here", f'"{NONE}" works')
    with control_of(arguments) as control:
        quotas = control.quotas()
        if salt is not None and quotas.has_user_tenants:
            what = "salt: with --user-quota the daemon bounds users, and knows no salts"
            raise ConfigError(what, "--default works")
        if is_setting:
            tenant = 0 if salt is None else tenant_of(salt)
            bound = None if size == DEFAULT else _bound(size)
            control.set_quota(tenant, bound, size == DEFAULT)
        quotas = _settled(control)
    if arguments.json:
        print_json(_document(quotas))
    else:
        _print_quotas(quotas, ROWS_MAX if arguments.rows is None else arguments.rows)
    return int(bool(is_setting and quotas.error))


def _settled(control: ControlClient) -> QuotaReport:
    """Returns the bounds once objects are counted and evicted for them, or after a while."""
    until = time.monotonic() + SETTLE_SECONDS
    while not (quotas := control.quotas()).is_settled and time.monotonic() < until:
        time.sleep(POLL_SECONDS)
    return quotas


def _document(quotas: QuotaReport) -> dict[str, object]:
    return {
        "default": quotas.default,
        "served_default": quotas.served_default,
        "has_user_tenants": quotas.has_user_tenants,
        "is_settled": quotas.is_settled,
        "path": quotas.path,
        "error": quotas.error,
        "tenants": {
            f"{quota.tenant:016x}": {
                "bound": quota.bound_bytes,
                "held": quota.held_bytes,
                "is_own": quota.is_own,
            }
            for quota in quotas.quotas
        },
    }


def _bound_text(bound: int | None) -> str:
    return NONE if bound is None else format_size(bound)


def _print_quotas(quotas: QuotaReport, rows_max: int) -> None:
    tenant = "user" if quotas.has_user_tenants else "tenant"
    rows = sorted(quotas.quotas, key=lambda quota: quota.held_bytes, reverse=True)
    shown = rows[: rows_max or None]
    if shown:
        table = new_table([tenant, "bound", "", "in RAM"], left=[tenant, ""])
        for quota in shown:
            # Nothing is counted that no bound is for.
            held = "not counted" if quota.bound_bytes is None else format_size(quota.held_bytes)
            origin = "its own" if quota.is_own else "default"
            bound = _bound_text(quota.bound_bytes)
            table.add_row(tenant_text(quota.tenant), bound, origin, held)
        PlainConsole(100).print(table)
    if len(rows) > len(shown):
        print(f"{len(rows) - len(shown):,} more tenants (--rows 0 prints all)")
    print(f"every other {tenant} has the bound: {_bound_text(quotas.default)}")
    served = quotas.served_default
    if served is not None and quotas.default != served:
        option_name = "--user-quota" if quotas.has_user_tenants else "--salt-quota"
        print(f"the next start has its {option_name} of {format_size(served)} again")
    if not quotas.is_settled:
        print("objects are still counted or evicted for a bound")
    if quotas.error:
        what = f"{quotas.path} cannot be used ({plain(quotas.error)})"
        print(f"{what}: bounds set at run time last until the daemon ends")
