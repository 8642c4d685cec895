"""A day of one model on real servers: what is asked of which server, in which order."""

import itertools
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.engine.server import Server, Streamed
from tests.waiting import until
from transformers import AutoTokenizer

from benchmarks.codec_speed import measure_coding, sample_of
from benchmarks.realday.results import (
    COMPUTED,
    FROM_DISK,
    LMCACHE,
    NATIVE,
    OWN_HIT,
    RESTARTED,
    Cost,
    Killed,
    ModelDay,
    Prompt,
    Ratios,
    Turns,
)
from benchmarks.storing import daemon_values, wait_until_stored
from hybridkv.client.control import ControlClient
from hybridkv.core.settings import TRANSFER
from hybridkv.lab.capacity import ConfigPreview, stored_token_bytes
from hybridkv.lab.configuration import inspect_model
from hybridkv.lab.daemon_process import DaemonProcess, ending_with_parent
from hybridkv.lab.prompts import engine_bounds, english
from hybridkv.tiers.coding import Codec, Coding
from hybridkv.wire.messages import describe_groups

ANSWER_TOKENS = 16
WARM_TOKENS = 700  # Of a prompt that is asked of each server first, and never counted.
TURN_TOKENS, FIRST_TURN_TOKENS = 256, 1024
USERS = 4
WAIT_SECONDS = 180.0
SHARE_SECONDS = 600.0  # On a machine that does much else an engine reads its weights slowly.
DAEMON_RAM = "5GiB"
TEXT_TOKENS = 200_000
_CLI = ("-m", "vllm.entrypoints.cli.main", "serve")
_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TORCHDYNAMO_DISABLE": "1"}


@dataclass(frozen=True)
class Plan:
    """The sizes of a day."""

    lengths: Sequence[int]
    """Tokens of the prompts that are asked along every way."""
    user_tokens: int
    turns: int
    rounds: int
    cost_tokens: int = 1024
    decoded_tokens: int = 32

    @property
    def context(self) -> int:
        """The tokens of the longest prompt and its answer."""
        turn = FIRST_TURN_TOKENS + self.turns * (TURN_TOKENS + ANSWER_TOKENS)
        longest = max(*self.lengths, self.user_tokens, turn, self.cost_tokens)
        return longest + max(ANSWER_TOKENS, self.decoded_tokens)


class Day:
    """One model's servers and daemon, in a directory of their own."""

    def __init__(
        self, model: Path, plan: Plan, dtype: str, directory: Path, say: Callable[[str], None]
    ) -> None:
        """`say` prints what is done next."""
        self._model, self._plan, self._directory, self._say = model, plan, directory, say
        self.result = ModelDay(model.name, dtype)
        self._tokenizer = AutoTokenizer.from_pretrained(model)
        self._text = self._tokens_of_text()
        self._warm_prompt = self._take(WARM_TOKENS)
        self._socket = str(directory / "daemon.sock")
        self._disk = directory / "disk"
        self._arguments: list[str] = []
        self._servers_started = 0

    def _tokens_of_text(self) -> Iterator[int]:
        """Yield the tokens of an English text again and again."""
        tokens = self._tokenizer(english(TEXT_TOKENS), add_special_tokens=False, verbose=False)
        return itertools.cycle(tokens["input_ids"])

    def _take(self, count: int) -> list[int]:
        """Return a prompt of the text that comes next, so that no two begin alike."""
        beginning: list[int] = self._tokenizer("")["input_ids"]
        return [*beginning, *itertools.islice(self._text, count - len(beginning))]

    def run(self, lmcache: str) -> ModelDay:
        """Do everything. `lmcache` is a Python that has vLLM and LMCache, or empty."""
        started = time.monotonic()
        self._read_configuration()
        plan = self._plan
        asked = [self._take(length) for length in plan.lengths]
        users = [self._take(plan.user_tokens) for _ in range(USERS)]
        self.result.prompts = [Prompt(len(prompt)) for prompt in asked]
        self.result.users = [Prompt(len(prompt)) for prompt in users]
        killed = [self._take(plan.user_tokens) for _ in range(2)]
        with ExitStack() as stack:
            daemon = stack.enter_context(DaemonProcess(self._socket, DAEMON_RAM))
            with self._hybridkv() as attached:
                with self._serve("without a connector", []) as plain:
                    self._warm_up(plain)
                    self._measure_cost(plain, attached)
                with self._serve("without a connector, started anew", []) as plain:
                    self._warm_up(plain)
                    self._measure_cost(plain, attached)
                    self._ask_all(plain, asked, COMPUTED)
                    self._ask_all(plain, asked, OWN_HIT)
                    self._ask_at_once(plain, users, COMPUTED)
                    self._ask_at_once(plain, users, OWN_HIT)
                    turns = self._make_turns(plain)
                    oracles = [plain.stream(prompt, ANSWER_TOKENS) for prompt in killed]
                daemon.stop()
                # The same memory, and a directory below it.
                below = ["--node", "realday", "--tier", f"disk://{self._disk}?bytes=16GiB"]
                daemon = stack.enter_context(DaemonProcess(self._socket, DAEMON_RAM, options=below))
                self._attach(attached)
                self._say("storing all prompts")
                for prompt in (*asked, *users, *killed):
                    attached.stream(prompt, 1)
                self._go_on(attached, turns[: self._restart_turn])
                wait_until_stored(self._socket, WAIT_SECONDS)
            with self._hybridkv() as attached:
                self._ask_all(attached, asked, RESTARTED)
                self._ask_at_once(attached, users, RESTARTED)
                self._go_on(attached, turns[self._restart_turn :])
                self._kill(daemon, attached, killed, oracles)
                wait_until_stored(self._socket, WAIT_SECONDS)
            daemon.end()  # It is gone, and its memory with it.
            daemon.start()
            with self._hybridkv() as attached:
                self._ask_all(attached, asked, FROM_DISK)
                self._ask_at_once(attached, users, FROM_DISK)
                self.result.lookups = _lookups(attached)
        self._measure_codecs(asked[0])
        self._measure_native(asked)
        self._measure_lmcache(asked, users, lmcache)
        self.result.seconds = time.monotonic() - started
        return self.result

    @property
    def _restart_turn(self) -> int:
        return self._plan.turns // 2

    def _read_configuration(self) -> None:
        """Ask vLLM for the model's layers, and bound the engines by them."""
        self._say("vLLM reads the configuration")
        own = [f"--dtype={self.result.dtype}", "--enforce-eager", "--enable-prompt-tokens-details"]
        transfer = f"--kv-transfer-config={json.dumps(self._transfer())}"
        preview = inspect_model(str(self._model), [*own, transfer]).preview
        if preview is None or preview.geometry is None:
            sys.exit(f"{self._model}: vLLM or hybridkv does not serve it; see `hybridkv doctor`")
        self._check_context(preview)
        bounds = engine_bounds(preview, self._plan.context, 2)
        self._arguments = [*own, *bounds.arguments([], {})]
        geometry = preview.geometry
        self.result.chunk_tokens = geometry.chunk_tokens
        by_group = (stored_token_bytes(geometry, group) for group in geometry.groups)
        self.result.stored_token_bytes = float(sum(by_group))
        self._say(f"each engine gets {bounds}, the daemon {DAEMON_RAM} of RAM")

    def _check_context(self, preview: ConfigPreview) -> None:
        if preview.max_model_len < self._plan.context:
            what = f"{self._model}: its context of {preview.max_model_len} tokens is too short"
            sys.exit(f"{what} for {self._plan.context}; shorter --lengths work")

    def _transfer(self) -> dict[str, object]:
        extra = {"server": f"unix://{self._socket}"}
        return {**TRANSFER, "kv_connector_extra_config": extra}

    @contextmanager
    def _serve(
        self, what: str, arguments: Sequence[str], python: str = sys.executable
    ) -> Iterator[Server]:
        """Run `vllm serve` of the model."""
        self._say(f"vllm serve, {what}")
        self._servers_started += 1
        server = Server(
            [*self._arguments, *arguments],
            self._directory / f"server-{self._servers_started}.log",
            {**_ENVIRONMENT, "PATH": f"{Path(python).parent}:{os.environ['PATH']}"},
            (python, *_CLI, str(self._model)),
        )
        with server:
            yield server

    def _warm_up(self, server: Server) -> None:
        """Ask a first prompt twice. What is slow or audited at a first hit is over then."""
        for _ in range(2):
            server.stream(self._warm_prompt, 4)

    @contextmanager
    def _hybridkv(self, *options: str) -> Iterator[Server]:
        """Run `vllm serve` with hybridkv, until it is warm and shares what the daemon has."""
        words = [*options, "--kv-transfer-config", json.dumps(self._transfer())]
        with self._serve("with hybridkv", words) as server:
            self._attach(server)
            self._warm_up(server)
            with ControlClient(self._socket) as control:
                engine = control.engines()[-1]
            self.result.groups = describe_groups(engine.geometry.groups)
            yield server

    def _attach(self, server: Server) -> None:
        """Ask short prompts until the engine has a session, which its steps make.

        An engine that does not know all its weights yet shares with no other.
        """

        def is_attached() -> bool:
            server.stream(self._warm_prompt[:8], 2)
            unread = server.total("vllm:hybridkv_weights_unread")
            return bool(daemon_values(self._socket)["sessions"]) and not unread

        until(is_attached, "the engine shares what the daemon has", SHARE_SECONDS)

    def _ask_all(self, server: Server, asked: Sequence[list[int]], way: str) -> None:
        for prompt, row in zip(asked, self.result.prompts, strict=True):
            row.answers[way] = answer = server.stream(prompt, ANSWER_TOKENS)
            self._say_answer(f"{way}, {row.tokens} tokens", answer)

    def _ask_at_once(self, server: Server, users: Sequence[list[int]], way: str) -> None:
        with ThreadPoolExecutor(len(users)) as pool:
            answers = [*pool.map(lambda prompt: server.stream(prompt, ANSWER_TOKENS), users)]
        for row, answer in zip(self.result.users, answers, strict=True):
            row.answers[way] = answer
        slowest = max(answers, key=lambda answer: answer.first_seconds)
        self._say_answer(f"{way}, {len(users)} users at once, the slowest", slowest)

    def _say_answer(self, what: str, answer: Streamed) -> None:
        seconds = f"{answer.first_seconds:.2f} s to the first token"
        self._say(f"{what}: {seconds}, {answer.cached_tokens} cached")

    def _measure_cost(self, plain: Server, attached: Server) -> None:
        """Ask both servers the same new prompts in turns, and compare their times."""
        self._say(f"{self._plan.rounds} rounds of new prompts, with the connector and without")
        if self.result.cost is None:
            self.result.cost = Cost(self._plan.cost_tokens, self._plan.decoded_tokens)
        ratios = Ratios()
        for number in range(self._plan.rounds + 1):
            prompt = self._take(self._plan.cost_tokens)
            order = (attached, plain) if number % 2 else (plain, attached)
            answers = {server: server.stream(prompt, self._plan.decoded_tokens) for server in order}
            ours, theirs = answers[attached], answers[plain]
            if number:  # The first round makes both warm.
                ratios.prefill.append(ours.first_seconds / theirs.first_seconds)
                decoded = [each.seconds - each.first_seconds for each in (ours, theirs)]
                ratios.decode.append(decoded[0] / decoded[1])
        self.result.cost.starts.append(ratios)
        prefill, decode = statistics.median(ratios.prefill), statistics.median(ratios.decode)
        self._say(f"ratio of prefill {prefill:.3f}, of decode {decode:.3f}")

    def _make_turns(self, plain: Server) -> list[list[int]]:
        """Talk to the server without a connector, which forgets all at its restart."""
        self.result.turns = Turns(self._restart_turn)
        prompt, prompts = self._take(FIRST_TURN_TOKENS), []
        for number in range(self._plan.turns):
            if number == self._restart_turn:
                plain.post("/reset_prefix_cache")
            prompts.append(prompt)
            answer = plain.stream(prompt, ANSWER_TOKENS)
            self.result.turns.without.append(answer)
            prompt = [*prompt, *answer.tokens, *itertools.islice(self._text, TURN_TOKENS)]
        self._say_answer("a turn after the restart, without hybridkv", self._first_turn(False))
        return prompts

    def _first_turn(self, with_cache: bool) -> Streamed:
        turns = self.result.turns
        assert turns is not None
        return (turns.with_cache if with_cache else turns.without)[self._restart_turn]

    def _go_on(self, server: Server, prompts: Sequence[list[int]]) -> None:
        """Take the next turns of the conversation."""
        assert self.result.turns is not None
        answers = self.result.turns.with_cache
        answers += [server.stream(prompt, ANSWER_TOKENS) for prompt in prompts]
        if len(answers) == self._plan.turns:
            self._say_answer("a turn after the restart, with hybridkv", self._first_turn(True))

    def _kill(
        self,
        daemon: DaemonProcess,
        server: Server,
        prompts: Sequence[list[int]],
        oracles: Sequence[Streamed],
    ) -> None:
        """Kill the daemon while it serves a hit on a prompt, and ask the other one of the next."""
        during, afterwards = prompts
        with ThreadPoolExecutor(1) as pool, ControlClient(self._socket) as control:
            before = control.stats().values["lookups"]
            asked = pool.submit(server.stream, during, ANSWER_TOKENS)
            until(
                lambda: control.stats().values["lookups"] != before,
                "the daemon is asked about the prompt",
                WAIT_SECONDS,
            )
            daemon.kill()
            answers = [asked.result()]
        self._say_answer("the daemon was killed during a hit", answers[0])
        daemon.start()
        self._attach(server)
        answers.append(server.stream(afterwards, ANSWER_TOKENS))
        self._say_answer("with the next daemon", answers[1])
        pairs = zip(answers, oracles, strict=True)
        is_same = all(answer.tokens == oracle.tokens for answer, oracle in pairs)
        self.result.killed = Killed(answers[0], answers[1], is_same)

    def _measure_codecs(self, prompt: list[int]) -> None:
        """Compress what is in the directory, and the KV of an engine with bfloat16."""
        others = self._directory / "bfloat16"
        below = ["--node", "realday", "--tier", f"disk://{others}?bytes=4GiB"]
        with (
            DaemonProcess(self._socket, "1GiB", options=below),
            self._hybridkv("--dtype=bfloat16") as server,
        ):
            server.stream(prompt, 1)
            wait_until_stored(self._socket, WAIT_SECONDS)
        for dtype, directory in ((self.result.dtype, self._disk), ("bfloat16", others)):
            row = measure_coding(Coding(Codec.ZPLANES), sample_of(directory))
            self.result.codecs.append({**row, "dtype": dtype})
            self._say(f"zplanes on this KV, {dtype}: ratio {row['ratio']}")

    def _measure_native(self, asked: Sequence[list[int]]) -> None:
        """Ask a server with vLLM's own offloading, once its own cache is empty."""
        try:
            with self._serve(NATIVE, ["--kv-offloading-size", "4"]) as server:
                self._warm_up(server)
                for prompt in asked:
                    server.stream(prompt, 1)
                server.post("/reset_prefix_cache")
                self._ask_all(server, asked, NATIVE)
            self.result.peers[NATIVE] = "its own cache emptied; a restart loses all"
        except (AssertionError, OSError) as error:
            self._refused(NATIVE, error)

    def _refused(self, peer: str, error: Exception) -> None:
        """Keep why a peer does not run: the last error that its engine logged."""
        log = (self._directory / f"server-{self._servers_started}.log").read_text(errors="replace")
        errors = re.findall(r"\w*(?:Error|Exception): (.+)$", log, re.MULTILINE)
        said = [line for line in errors if "Engine core init" not in line]
        # vLLM quotes what a worker process says.
        why = (said or [str(error)])[-1].removeprefix("Worker failed with error '").split("', ")[0]
        self.result.peers[peer] = f'does not run: "{why.strip()[:200]}"'
        self._say(f"{peer} {self.result.peers[peer]}")

    def _measure_lmcache(
        self, asked: Sequence[list[int]], users: Sequence[list[int]], python: str
    ) -> None:
        """Store with LMCache's server, restart vLLM, and ask again."""
        if not python:
            self.result.peers[LMCACHE] = "not run: no --lmcache"
            return
        try:
            with _lmcache_server(python, self._directory / "lmcache.log") as port:
                extra = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port}
                transfer = {
                    "kv_connector": "LMCacheMPConnector",
                    "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
                    "kv_role": "kv_both",
                    "kv_connector_extra_config": extra,
                }
                words = ["--kv-transfer-config", json.dumps(transfer)]
                with self._serve(LMCACHE, words, python) as server:
                    self._warm_up(server)
                    for prompt in (*asked, *users):
                        server.stream(prompt, 1)
                    time.sleep(2)  # It says nowhere when all is stored.
                with self._serve(f"{LMCACHE}, restarted", words, python) as server:
                    self._warm_up(server)
                    self._ask_all(server, asked, LMCACHE)
                    self._ask_at_once(server, users, LMCACHE)
            self.result.peers[LMCACHE] = f"{_version_of(python, 'lmcache')}, vLLM restarted"
        except (AssertionError, OSError, subprocess.SubprocessError) as error:
            self._refused(LMCACHE, error)


def _lookups(server: Server) -> dict[str, int]:
    """Return how the connector decided its lookups, and what it loaded from where."""
    counts: dict[str, int] = {}
    for sample in server.metrics():
        name, labels = sample.name, sample.labels
        if name == "vllm:hybridkv_lookups_total":
            key = f"{labels['result']}: {labels['reason']}"
        elif name == "vllm:hybridkv_loaded_tokens_by_tier_total":
            key = f"tokens from {labels['tier']}"
        else:
            continue
        counts[key] = counts.get(key, 0) + int(sample.value)
    return {key: count for key, count in counts.items() if count}


@contextmanager
def _lmcache_server(python: str, log_path: Path) -> Iterator[int]:
    """Run LMCache's server. Yields its port, at which it is asked once it listens."""
    port, http_port = _free_port(), _free_port()
    words = [str(Path(python).parent / "lmcache"), "server", "--host", "127.0.0.1"]
    words += ["--port", str(port), "--http-host", "127.0.0.1", "--http-port", str(http_port)]
    words += ["--l1-size-gb", "4", "--eviction-policy", "LRU", "--supported-transfer-mode", "auto"]
    with log_path.open("wb") as log:
        process = subprocess.Popen(ending_with_parent(words), stdout=log, stderr=log)
    try:
        until(lambda: _listens(http_port, process), "LMCache's server listens", WAIT_SECONDS)
        yield port
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _listens(port: int, process: "subprocess.Popen[bytes]") -> bool:
    assert process.poll() is None, "LMCache's server ended; see lmcache.log"
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


def _version_of(python: str, package: str) -> str:
    """Return a package and its version, as another environment has it."""
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    words = [python, "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    return f"{package} {done.stdout.strip()}"
