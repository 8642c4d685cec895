"""Seconds to the first token, prefill and decode apart: `python -m benchmarks.disaggregated`.

Two servers of a bundled model share a daemon, and vllm-router asks one after the other. Each prompt
is new where it is computed. The first two rows have the prefiller alone. --nixl DIRECTORY has the
packages of NIXL (`pip install --no-deps --target DIRECTORY nixl==1.5.1 nixl-cu13==1.5.1`). Then two
more servers pass KV by vLLM's NixlConnector.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.engine.routers import PrefillDecodeRouter
from tests.engine.server import Server, Streamed, stream_answer

from benchmarks.rows import print_rows
from hybridkv.lab.daemon_process import DaemonProcess
from hybridkv.lab.models import bundled_arguments, bundled_environment, bundled_models

RAM = "1GiB"
VOCABULARY, ANSWER_TOKENS = 2000, 8
ROLES = ("kv_producer", "kv_consumer")
NIXL_PORT = 5600  # vLLM's own first one.


@dataclass(frozen=True)
class Work:
    """What each way is asked."""

    model: str
    prompts: int
    tokens: int


class Pair:
    """Two servers with a role each, and a router before them."""

    def __init__(
        self,
        work: Work,
        transfer: Mapping[str, object],
        variables: Mapping[str, str],
        directory: Path,
        stack: ExitStack,
    ) -> None:
        def start(role: str) -> Server:
            config = json.dumps({**transfer, "kv_role": role})
            arguments = [
                f"--model={bundled_models()[work.model]}",
                *bundled_arguments(work.model),
                f"--max-model-len={2 * work.tokens}",
                f'--hf-overrides={{"max_position_embeddings": {2 * work.tokens}}}',
                f"--kv-transfer-config={config}",
                "--enable-prompt-tokens-details",
            ]
            port = str(NIXL_PORT + ROLES.index(role))
            environment = {
                **bundled_environment(work.model),
                **variables,
                "VLLM_NIXL_SIDE_CHANNEL_PORT": port,
            }
            return stack.enter_context(Server(arguments, directory / f"{role}.log", environment))

        with ThreadPoolExecutor() as pool:
            self.prefill, self.decode = pool.map(start, ROLES)
        router = PrefillDecodeRouter(self.prefill.url, self.decode.url, directory / "router.log")
        self.url = f"http://127.0.0.1:{stack.enter_context(router).port}"


def ask(work: Work, seed: int, where: str) -> list[Streamed]:
    """Ask for one answer after the other. Equal seeds have equal prompts."""
    rng = random.Random(seed)
    prompts = [
        [rng.randrange(2, VOCABULARY) for _ in range(work.tokens)] for _ in range(work.prompts)
    ]
    return [stream_answer(where, prompt, ANSWER_TOKENS) for prompt in prompts]


def row(way: str, answers: list[Streamed]) -> dict[str, object]:
    """Returns a row about the answers, without the first one."""
    first = [answer.first_seconds for answer in answers[1:]]
    return {
        "way": way,
        "first token s": round(statistics.median(first), 3),
        "from, to": f"{min(first):.3f}, {max(first):.3f}",
        "cached": ", ".join(sorted({str(answer.cached_tokens) for answer in answers[1:]})),
    }


@contextmanager
def pair_with(
    work: Work, transfer: Mapping[str, object], variables: Mapping[str, str]
) -> Iterator[Pair]:
    """Two servers with the router, and a log of each."""
    with tempfile.TemporaryDirectory(prefix="hybridkv-bench-") as name, ExitStack() as stack:
        yield Pair(work, transfer, variables, Path(name), stack)


def measure_hybridkv(work: Work) -> list[dict[str, object]]:
    """Returns the rows with a daemon between the servers."""
    with (
        tempfile.TemporaryDirectory(prefix="hybridkv-bench-") as name,
        DaemonProcess(str(Path(name) / "d.sock"), RAM) as daemon,
    ):
        server = {"server": f"unix://{daemon.socket_path}", "audit": "off"}
        transfer = {"kv_connector": "HybridKVConnector", "kv_connector_extra_config": server}
        with pair_with(work, transfer, {}) as pair:
            alone = pair.prefill.url
            ask(work, 0, pair.url)
            return [
                row("one engine, computed", ask(work, 1, alone)),
                row("one engine, its own hit", ask(work, 1, alone)),
                row("router, hybridkv", ask(work, 2, pair.url)),
                row("decoder alone, the prompt is stored", ask(work, 1, pair.decode.url)),
            ]


def measure_nixl(work: Work, packages: str) -> list[dict[str, object]]:
    """Returns the row with NIXL between the servers."""
    transfer = {"kv_connector": "NixlConnector", "kv_buffer_device": "cpu"}
    variables = {
        "PYTHONPATH": packages,
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "UCX_TLS": "tcp,self",
        "UCX_NET_DEVICES": "lo",
    }
    with pair_with(work, transfer, variables) as pair:
        ask(work, 0, pair.url)
        return [row("router, NIXL", ask(work, 2, pair.url))]


def main() -> int:
    """Print a row for each way."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.disaggregated", description=__doc__)
    parser.add_argument("--model", default="qwen3", help="a bundled model (default: %(default)s)")
    parser.add_argument("--prompts", type=int, default=9, help="default: %(default)s")
    parser.add_argument("--tokens", type=int, default=4000, help="of a prompt (default: 4000)")
    parser.add_argument("--nixl", metavar="DIRECTORY", help="packages of NIXL (default: no NIXL)")
    parser.add_argument("--json", action="store_true", help="print one JSON array")
    options = parser.parse_args()
    work = Work(options.model, options.prompts, options.tokens)
    rows = measure_hybridkv(work)
    if options.nixl:
        rows += measure_nixl(work, options.nixl)
    print_rows(rows, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
