"""`python -m benchmarks.demo MODEL_DIR [--svg FILE]`: a restart costs no prefill, on a real model.

A real `vllm serve` with hybridkv answers three questions about a long document. Then vLLM is
started again, the daemon is killed, and its RAM is freed. Each time vLLM's own cache is empty, and
the questions are asked again. Stdout gets the answers and a table. The status is 1 where an answer
changed or a hit did not happen.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from tests.engine.server import Server, Streamed
from tests.screenshots.svg import write_svg
from tests.waiting import until
from transformers import AutoTokenizer

from benchmarks.storing import daemon_values, wait_until_stored
from hybridkv.cli.arguments import ended_by_exception
from hybridkv.core.errors import HybridKVError
from hybridkv.core.settings import TRANSFER
from hybridkv.lab.daemon_process import DaemonProcess, ending_with_parent

ROOT = Path(__file__).parents[1]
LOGS = ROOT / "build" / "demo"
DOCUMENT = ("docs/design.md", "LICENSE")
DOCUMENT_TOKENS_MIN, DOCUMENT_TOKENS_MAX, CONTEXT_TOKENS = 1500, 6000, 8192
COMPUTE_SECONDS = 20.0
"""A slow machine gets the document's last tokens alone, which it computes in this time."""
OTHER_TOKENS = 512  # Of a question, its template and its answer.
QUESTIONS = (
    "What is a Contribution?",
    "What is a Derivative Work?",
    "What must a redistributed work contain?",
)
ANSWER_TOKENS = 20
WARM_TOKENS = 640  # Of a prompt that each engine is asked first: its first hit is audited.
WAIT_SECONDS = 120.0
RAM, KV_BYTES, DISK = "2GiB", 1 << 30, "4GiB"
COLUMNS = 100


@dataclass(frozen=True)
class Scene:
    """What happened, and the answers to all questions afterwards."""

    title: str
    answers: Sequence[Streamed]

    def tokens(self) -> list[list[int]]:
        """Returns the tokens of each answer."""
        return [answer.tokens for answer in self.answers]


def verdict(scene: Scene, computed: Scene, own: Scene) -> str:
    """Returns whether the answers of a scene are those that were computed.

    Kernels round a hit's last bits in another way than a prefill's. Where a tie turns over by that,
    vLLM's `own` hit turns it too, and the cache is right.
    """
    if scene.tokens() == computed.tokens():
        return "yes"
    return "as vLLM's own hit" if scene.tokens() == own.tokens() else "no"


def has_hit(scene: Scene) -> bool:
    """Whether the first question, which nothing else can help, came out of a cache."""
    return scene.answers[0].cached_tokens > scene.answers[0].prompt_tokens / 2


class Prompts:
    """The prompts of a model, as tokens. They have a document in common."""

    def __init__(self, model: Path) -> None:
        config = json.loads((model / "config.json").read_text())
        config = config.get("text_config", config)
        self.context = min(CONTEXT_TOKENS, config.get("max_position_embeddings", CONTEXT_TOKENS))
        self._tokenizer = AutoTokenizer.from_pretrained(model)
        tokens = self._encode("\n\n".join((ROOT / name).read_text() for name in DOCUMENT))
        self.document = tokens[-min(DOCUMENT_TOKENS_MAX, self.context - OTHER_TOKENS) :]
        self.warm = self.document[:WARM_TOKENS]

    def shorten(self, computed_per_second: float) -> None:
        """Cut the document for an engine that computes so many tokens in a second."""
        length = int(max(DOCUMENT_TOKENS_MIN, COMPUTE_SECONDS * computed_per_second))
        self.document = self.document[-length:]

    def ask(self, question: str) -> list[int]:
        """Returns the prompt that asks a question about the document."""
        text = f"{self._tokenizer.decode(self.document)}\n\n{question}"
        if not self._tokenizer.chat_template:
            return self._encode(f"{text}\nAnswer:")
        messages = [{"role": "user", "content": text}]
        options = {"add_generation_prompt": True, "tokenize": False}
        return self._encode(self._tokenizer.apply_chat_template(messages, **options))

    def decode(self, tokens: list[int]) -> str:
        """Returns the text of an answer up to its end, on one line."""
        ends = [at for at, token in enumerate(tokens) if token in self._tokenizer.all_special_ids]
        text: str = self._tokenizer.decode(tokens[: ends[0]] if ends else tokens)
        return " ".join(text.split())

    def _encode(self, text: str) -> list[int]:
        tokens: list[int] = self._tokenizer.encode(text, add_special_tokens=False, verbose=False)
        return tokens


class Demo:
    """A model's engine and daemon, and what was seen of them."""

    def __init__(self, model: Path, directory: Path, console: Console) -> None:
        """`directory` is for the socket and the disk tier."""
        self._model, self._console = model, console
        self._started = time.monotonic()
        self._prompts = Prompts(model)
        self._socket = str(directory / "daemon.sock")
        options = ["--node", "demo", "--tier", f"disk://{directory}/disk?bytes={DISK}"]
        self._daemon = DaemonProcess(self._socket, RAM, options=options)
        self._scenes: list[Scene] = []

    def run(self) -> bool:
        """Play all scenes. Returns whether everything is as promised."""
        cores = len(os.sched_getaffinity(0))
        self._say(f"vllm serve {self._model.name} in float32 on {cores} cores, with hybridkv")
        with self._daemon:
            with self._engine() as engine:
                self._ask(engine, "computed")
                self._ask(engine, "vLLM's own cache")
                wait_until_stored(self._socket, WAIT_SECONDS)
            self._say("vLLM ends and starts again; the daemon stays")
            with self._engine() as engine:
                self._ask(engine, "vLLM restarted")
                self._say("kill -9 ends the daemon; the next one takes over its memory")
                self._daemon.kill()
                self._go_on_with_next_daemon(engine)
                self._ask(engine, "daemon killed")
                wait_until_stored(self._socket, WAIT_SECONDS)
                self._say("the daemon ends and its RAM is freed; the next one has the disk alone")
                self._daemon.end()
                self._go_on_with_next_daemon(engine)
                self._ask(engine, "RAM freed: disk")
        return self._sum_up()

    @contextmanager
    def _engine(self) -> Iterator[Server]:
        """Run `vllm serve`, which is connected to the daemon and warm."""
        extra = {"server": f"unix://{self._socket}"}
        transfer = {**TRANSFER, "kv_connector_extra_config": extra}
        arguments = [
            *("--dtype=float32", "--enforce-eager", "--enable-prompt-tokens-details"),
            *(f"--max-model-len={self._prompts.context}", f"--kv-cache-memory-bytes={KV_BYTES}"),
            f"--kv-transfer-config={json.dumps(transfer)}",
        ]
        command = [str(Path(sys.executable).with_name("vllm")), "serve", str(self._model)]
        log_path = LOGS / f"vllm-{len(self._scenes)}.log"
        with Server(arguments, log_path, {}, ending_with_parent(command)) as engine:
            self._connect(engine)
            computed = engine.stream(self._prompts.warm, 1)
            if not self._scenes:
                self._prompts.shorten(computed.prompt_tokens / computed.first_seconds)
                what = f"{len(self._prompts.document)} tokens of {' and '.join(DOCUMENT)}"
                self._say(f"it is asked about {what}")
            engine.post("/reset_prefix_cache")
            engine.stream(self._prompts.warm, 1)
            yield engine

    def _go_on_with_next_daemon(self, engine: Server) -> None:
        """Start a daemon for an engine that runs, and empty the engine's own cache."""
        self._daemon.start()
        self._connect(engine)
        engine.post("/reset_prefix_cache")

    def _connect(self, engine: Server) -> None:
        """Ask short prompts until the daemon knows the engine, which looks for it in its steps."""

        def has_session() -> bool:
            engine.stream(self._prompts.warm[:8], 2)
            return bool(daemon_values(self._socket)["sessions"])

        until(has_session, "the engine is connected to the daemon", WAIT_SECONDS)

    def _ask(self, engine: Server, title: str) -> None:
        """Ask all questions, and show the answers the first time."""
        answers = []
        for question in QUESTIONS:
            answers.append(engine.stream(self._prompts.ask(question), ANSWER_TOKENS))
            if not self._scenes:
                text = escape(self._prompts.decode(answers[-1].tokens))
                self._print(Padding(f"[bold]{question}[/] {text} ...", (0, 0, 0, 9)))
        self._scenes.append(Scene(title, answers))
        seconds = ", ".join(f"{answer.first_seconds:.2f}" for answer in answers)
        self._say(f"{title}: the first tokens after {seconds} s")

    def _sum_up(self) -> bool:
        """Print the table. Returns whether all is as promised."""
        table = Table(title="Seconds to the first token, and tokens that were cached")
        table.add_column("")
        for number, _ in enumerate(QUESTIONS, 1):
            table.add_column(f"question {number}", justify="right")
        table.add_column("same answers")
        computed, own = self._scenes[:2]
        verdicts = [verdict(scene, computed, own) for scene in self._scenes]
        for scene, words in zip(self._scenes, verdicts, strict=True):
            cells = [f"{each.first_seconds:.2f} s, {each.cached_tokens}" for each in scene.answers]
            table.add_row(scene.title, *cells, words)
        self._print(table)
        missed = [scene.title for scene in self._scenes[1:] if not has_hit(scene)]
        for title in missed:
            self._print(f"[bold]No hit[/] in the scene '{title}'.")
        same = "no" if "no" in verdicts else "yes"
        seconds = time.monotonic() - self._started
        self._print(f"The same answers: [bold]{same}[/]. All of it took {seconds:.0f} s.")
        return same == "yes" and not missed

    def _say(self, text: str) -> None:
        """Print what is done or was seen, and when."""
        self._print(f"{time.monotonic() - self._started:4.0f} s  {text}")

    def _print(self, what: RenderableType) -> None:
        self._console.print(what, highlight=False)


def main() -> int:
    """Play the demo in a directory of its own, which goes with all processes at its end."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.demo", description=__doc__)
    parser.add_argument("model", type=Path, help="a directory with a checkpoint and a tokenizer")
    parser.add_argument("--svg", type=Path, help="a file for a picture of what is printed")
    options = parser.parse_args()
    model = options.model.absolute()
    if not (model / "config.json").is_file():
        parser.error(
            f"{model} has no config.json; smollm2, gemma or a checkpoint's directory works"
        )
    LOGS.mkdir(parents=True, exist_ok=True)
    console = Console(width=COLUMNS, record=options.svg is not None)
    try:
        # A short name: paths of sockets have a limit of 107 bytes.
        with ended_by_exception(), tempfile.TemporaryDirectory(prefix="hkv-") as directory:
            is_as_promised = Demo(model, Path(directory), console).run()
    except (AssertionError, OSError, HybridKVError, ValueError) as error:
        what = str(error).partition("\n")[0].rstrip(":")
        print(f"error: {what}; the logs of vLLM are in {LOGS}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    if options.svg:
        write_svg(console, "scripts/demo", options.svg)
    return int(not is_as_promised)


if __name__ == "__main__":
    sys.exit(main())
