"""What tenants have stored by a real engine, and what commands and hints do with it.

Run as `python -m tests.engine.forgotten SOCKET forget|demote`; prints a line of JSON.
"""

import contextlib
import io
import json
import sys
from typing import Any

from hybridkv.cli.main import main as hybridkv
from hybridkv.client.control import ControlClient
from hybridkv.vllm.hints import DEMOTE
from tests.engine.hunt import Hunted
from tests.engine.support import LOOKUP_TIMEOUT_MS, arguments_of, prompt, stats
from tests.waiting import until

MODEL, CHUNKS = "gemma3", 3
TOKENS = CHUNKS * 128 + 20
ALICE, BOB, SCANS = 1, 2, range(100, 400)  # Prompts.


class Tenants:
    """An engine, and users each of whom has a salt."""

    def __init__(self, hunted: Hunted, socket_path: str) -> None:
        self._hunted, self.socket_path = hunted, socket_path

    def scan(self, number: int) -> None:
        """Store a new prompt of one chunk."""
        self._hunted.add(prompt(number, 148))
        self._hunted.drive()

    def hit_tokens(self, number: int, salt: str = "", demotes: bool = False) -> int:
        """Answer a prompt. Returns how much of it came from outside: the engine has nothing."""
        assert self._hunted.engine.reset_prefix_cache()
        extra = {"kv_transfer_params": {DEMOTE: True}} if demotes else None
        name = self._hunted.add(prompt(number, TOKENS), salt=salt, extra_args=extra)
        return int(self._hunted.drive()[name].num_cached_tokens)

    def value(self, name: str) -> float:
        """Returns a value of the daemon's stats. One that nothing has counted yet is 0."""
        return stats(self.socket_path).get(name, 0)

    def command(self, *words: str) -> Any:
        """Returns what a command prints, as JSON."""
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            status = hybridkv([*words, "--json", "--socket", self.socket_path])
        assert status == 0, printed.getvalue()
        return json.loads(printed.getvalue())

    def clear(self) -> None:
        """Empty RAM. Tiers keep what they have."""
        with ControlClient(self.socket_path) as control:
            control.clear_objects()


def forget(tenants: Tenants) -> dict[str, Any]:
    """Forget one of two tenants, and ask for the prompts of both."""
    for number, salt in ((ALICE, "alice"), (BOB, "bob")):
        tenants.hit_tokens(number, salt)
    tenants.hit_tokens(SCANS[0], "bob")  # Its steps commit what the others have stored.

    def is_below() -> bool:
        stored = tenants.value("objects_stored")
        below = [tenants.value(f"tier_{name}_objects_written") for name in ("disk", "valkey")]
        return min(below) >= stored > 0

    until(is_below, "both tiers have everything")
    outcome = tenants.command("forget", "--salt", "alice")
    groups = tenants.command("ls", "--salt", "alice")["groups"]
    bob = tenants.hit_tokens(BOB, "bob")
    tenants.clear()
    return {
        "removed": {name: place["removed"] for name, place in outcome["places"].items()},
        "proven": outcome["is_proven"],
        "left": groups,
        "bob, RAM": bob,
        "bob, tiers": tenants.hit_tokens(BOB, "bob"),
        "alice": tenants.hit_tokens(ALICE, "alice"),
    }


def demote(tenants: Tenants) -> dict[str, Any]:
    """Demote the younger one of two prompts, and let new ones take the room of what goes first."""
    tenants.hit_tokens(BOB)
    tenants.hit_tokens(ALICE, demotes=True)
    until(lambda: tenants.value("tier_disk_objects_written") > 0, "a tier has what is demoted")
    until(lambda: not tenants.value("writes_waiting"), "all of it is written")
    written = tenants.value("tier_disk_objects_written")
    per_prompt = tenants.value("objects") / 2
    for number in SCANS:
        if tenants.value("evicted"):
            break
        tenants.scan(number)
    evicted = tenants.value("evicted")
    before = tenants.value("chunks_hit_disk")
    bob = tenants.hit_tokens(BOB)
    after = tenants.value("chunks_hit_disk")
    alice = tenants.hit_tokens(ALICE)
    return {
        "written": written / per_prompt,
        "evicted": evicted / per_prompt,
        "bob": bob,
        "bob, from the tier": after - before,
        "alice": alice,
        "alice, from the tier": tenants.value("chunks_hit_disk") - after,
    }


def main() -> None:
    """Print what became of the prompts."""
    socket_path, scene = sys.argv[1:]
    extra = {"load_policy": "always", "lookup_timeout_ms": LOOKUP_TIMEOUT_MS}
    with Hunted(arguments_of(MODEL, socket_path, extra=extra)) as hunted:
        found = {"forget": forget, "demote": demote}[scene](Tenants(hunted, socket_path))
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
