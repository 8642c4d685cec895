"""One trainer's updates of an engine in a process of its own, as users run it.

Run as `python -m tests.engine.trainers SOCKET DIRECTORY`; prints a line of JSON for each answer:
what was asked, its tokens, how many tokens were cached, and what the engine computes then for the
same prompt under a salt of its own. Its workers have tests.engine.trainer as their extension.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.async_llm import AsyncLLM

from hybridkv.vllm.preflight import CONNECTOR
from tests.engine.support import LOOKUP_TIMEOUT_MS, prompt
from tests.engine.weights import ARGUMENTS, LENGTH, write_model

SLEEP_SECONDS = 0.5
"""Long enough for the idle step that a reset brings."""


class Served:
    """An engine in a process of its own, as users run it."""

    def __init__(self, socket_path: str, model: Path) -> None:
        extra: dict[str, object] = {"server": f"unix://{socket_path}", "audit": "off"}
        extra["lookup_timeout_ms"] = LOOKUP_TIMEOUT_MS
        extra["load_policy"] = "always"  # However long the weights are read on a loaded machine.
        transfer = json.dumps({**CONNECTOR, "kv_connector_extra_config": extra})
        trainer = "--worker-extension-cls=tests.engine.trainer.Trainer"
        words = [*ARGUMENTS, f"--model={model}", trainer, f"--kv-transfer-config={transfer}"]
        parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
        arguments = AsyncEngineArgs.from_cli_args(parser.parse_args(words))
        self.engine = AsyncLLM.from_engine_args(arguments)
        self._requests = 0

    async def _answer(self, number: int, salt: str | None = None) -> Any:
        """Returns the answer to a prompt.

        Under a `salt` of its own it finds nothing of other requests.
        """
        self._requests += 1
        sampling = SamplingParams(temperature=0.0, ignore_eos=True, detokenize=False, max_tokens=8)
        asked: Any = {"prompt_token_ids": prompt(number, LENGTH)}
        if salt is not None:
            asked["cache_salt"] = salt
        outputs = self.engine.generate(asked, sampling, f"r{self._requests}")
        return [output async for output in outputs][-1]

    async def ask(self, what: str, number: int = 1) -> None:
        """Answer a prompt, and print the answer."""
        answer = await self._answer(number)
        fresh = await self._answer(number, salt=what)
        line = {
            "name": what,
            "tokens": list(answer.outputs[0].token_ids),
            "fresh": list(fresh.outputs[0].token_ids),
            "cached": answer.num_cached_tokens,
        }
        print(json.dumps(line), flush=True)

    async def update(self, factor: float) -> None:
        """Change the weights by the trainer's own code."""
        await self.engine.collective_rpc("multiply", args=(factor,))


async def serve(socket_path: str, directory: Path) -> None:
    """Go through all orders in which trainers update and reset."""
    served = Served(socket_path, write_model(directory / "model", 1))
    engine = served.engine
    await served.ask("old")
    await engine.reset_prefix_cache()
    # Time for the answer to the question that the reset asks.
    await served.ask("other", 2)
    await engine.reset_prefix_cache()
    await asyncio.sleep(SLEEP_SECONDS)
    await served.update(2.0)
    await served.ask("new, reset first")
    await engine.reset_prefix_cache()
    await served.ask("new, reset")
    for factor, mode in ((0.5, "abort"), (2.0, "wait"), (0.5, "keep")):
        await engine.pause_generation(mode=mode, clear_cache=True)
        await asyncio.sleep(SLEEP_SECONDS)
        await served.update(factor)
        await engine.resume_generation()
        await served.ask(f"{'new' if factor > 1 else 'old'}, paused by {mode}")
    await served.update(2.0)
    await engine.reset_prefix_cache()
    await served.ask("new, updated first")
    await served.update(0.5)
    await served.ask("old, without a reset", 3)
    await engine.reset_prefix_cache()
    await served.ask("old, reset")
    await engine.sleep(1)
    await asyncio.sleep(SLEEP_SECONDS)
    await engine.wake_up()
    await served.ask("old, awake")
    engine.shutdown()


def main() -> None:
    """Serve with the daemon at a socket."""
    asyncio.run(serve(sys.argv[1], Path(sys.argv[2])))


if __name__ == "__main__":
    main()
