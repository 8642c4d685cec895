"""Waits until an engine in this process stores what it computes and loads what is stored."""

import time
from typing import Any

from hybridkv.core.packed import SLOT_BYTES
from tests.waiting import until

SLOTS = 12  # More than the chunks of a test's first prompt, and fewer than a small arena has.
GREETING_SECONDS = 5.0  # A daemon that hangs, as a test may want it, is not waited for longer.


def await_write_slots(engine: Any) -> None:
    """Return once an engine has write slots of each size, from every daemon that greets it.

    A young daemon grants them as its memory grows. Without them a first prompt is not stored, and
    without a greeting it is not looked up.
    """
    connector = engine.engine_core.engine_core.scheduler.connector
    children = getattr(connector, "children", None)
    connectors = [connector] if children is None else [child.connector for child in children.all]
    roles = [
        role for each in connectors if (role := getattr(each, "scheduler_role", None)) is not None
    ]
    for role in roles:
        _await(role)


def _await(role: Any) -> None:
    link, deadline = role.session.link, time.monotonic() + GREETING_SECONDS

    def has_slots() -> bool:
        role.exchange_messages(time.monotonic())
        is_greeted = link.welcome is not None
        if is_greeted:
            role.reserve_slots(time.monotonic())
        pools = role.stores.credits.pools.values()
        is_full = all(len(pool.tickets) // SLOT_BYTES >= min(SLOTS, pool.target) for pool in pools)
        is_vain = not is_greeted and (not link.is_served or time.monotonic() > deadline)
        return is_vain or (is_greeted and is_full)

    until(has_slots, "the engine has write slots of each size")
