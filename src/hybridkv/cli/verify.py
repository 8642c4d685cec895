"""`hybridkv verify`: what hybridkv.lab.verify proves, as a table."""

import argparse
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from hybridkv.cli.arguments import JSON, command, model, option
from hybridkv.cli.terminal import PlainConsole, new_table, print_json
from hybridkv.core.errors import HybridKVError
from hybridkv.core.sizes import format_size
from hybridkv.lab.engine_process import NotServedError
from hybridkv.lab.judging import VerifyArm
from hybridkv.lab.models import bundled_models
from hybridkv.lab.verify import Verification

LEFT = ("arm", "tokens", "log-probs", "bytes", "compared with")
COLUMNS = (
    *("arm", "prompt", "from outside", "expected", "TTFT ms", "slowest step ms", "stored"),
    *("loaded", *LEFT[1:]),
)
_SHOWN = {True: "same", False: "DIFFERENT", None: "-"}


@command(
    *model(bundled_models(), "%(default)s", "a model directory or hub name", "qwen3next"),
    JSON,
    option("--ram SIZE", "memory of the daemon under test (default: %(default)s)", default="1GiB"),
)
def run_verify(arguments: argparse.Namespace) -> int:
    """Run all arms; 0 = every answer and every byte is right and every expected hit happened."""
    console = Console(stderr=True)

    def say(text: str) -> None:
        console.print(text, style="dim", highlight=False, markup=False)

    model: str = arguments.model
    with tempfile.TemporaryDirectory(prefix="hybridkv-verify-") as directory:
        log_path = Path(tempfile.gettempdir()) / f"hybridkv-verify-{os.getpid()}.log"
        try:
            words = model, arguments.vllm_arguments, arguments.ram
            proof = Verification(*words, Path(directory), log_path, say)
            arms = proof.run()
        except HybridKVError as error:
            if arguments.json:
                print_json({"ok": False, "model": model, "error": str(error)})
            raise
    ok = all(arm.ok for arm in arms)
    if ok:
        log_path.unlink(missing_ok=True)
    if arguments.json:
        told = {
            name: getattr(proof, name) for name in ("chunk_tokens", "groups", "distinct_tokens")
        }
        told |= {"seconds": round(proof.seconds, 1), "arms": [asdict(arm) for arm in arms]}
        print_json({"ok": ok, "model": model, **told})
    elif arms[0].not_served is not None:
        print(f"NOT SERVED: {NotServedError.TEXT} ({proof.seconds:.0f} s)")
    else:
        title = f"hybridkv verify {model}: chunk {proof.chunk_tokens} tokens, groups {proof.groups}"
        _print_table(title, arms)
        verdict = "every answer and every byte is right" if ok else "DIFFERENT: see the red rows"
        print(f"{verdict} ({proof.seconds:.0f} s)")
    return int(not ok)


def _print_table(title: str, arms: Sequence[VerifyArm]) -> None:
    table = new_table(COLUMNS, LEFT, title)
    for arm in arms:
        table.add_row(
            arm.name,
            *map(str, (arm.prompt_tokens, arm.external_tokens, arm.expected_external_tokens)),
            *(f"{value:.0f}" for value in (arm.ttft_ms, arm.slowest_decode_step_ms)),
            *map(format_size, (arm.bytes_stored, arm.bytes_loaded)),
            *(_SHOWN[same] for same in (arm.same_tokens, arm.same_logprobs, arm.same_bytes)),
            arm.oracle,
            style=None if arm.ok else "bold red",
        )
    PlainConsole(160).print(table)
