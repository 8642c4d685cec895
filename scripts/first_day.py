"""A first day, typed and looked at. scripts/first-day runs it with a fresh environment's Python.

    first_day.py WHEEL NEXT_WHEEL

It prints a page of Markdown, and progress on stderr. It ends with a sentence and status 1 where
something is not as promised.
"""

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerFast

ROOT = Path(__file__).parents[1]
TURNS, TURN_TOKENS, ANSWER_TOKENS = 10, 150, 8
QUESTIONS, QUESTION_TOKENS = 16, 1500
BLOCK_TOKENS = 128  # A hit ends where a block ends. The first one of a day ends a block earlier.
SECONDS_MAX = 300.0  # For any single step.
ARENAS = Path("/dev/shm")
BIN = Path(sys.executable).parent
WRAPPER = textwrap.TextWrapper(100, break_long_words=False, break_on_hyphens=False)
SETTINGS = (
    '{"kv_connector": "HybridKVConnector", "kv_role": "kv_both", '
    '"kv_connector_extra_config": {"server": "unix://%s"}}'
)


class Texts(NamedTuple):
    """What is said to the model: the user's turns of one conversation, and long questions."""

    turns: list[str]
    questions: list[str]


class Reply(NamedTuple):
    """An answer of the server, and what it says of the prompt."""

    request_id: str
    text: str
    prompt_tokens: int
    cached_tokens: int


def expect(is_so: bool, promise: str) -> None:
    """End the script where a promise is not kept."""
    if not is_so:
        sys.exit(f"scripts/first-day: this was promised, and is not so: {promise}")


def until(is_so: Callable[[], object], promise: str) -> None:
    """Wait until something is so, and end the script where that takes SECONDS_MAX."""
    deadline = time.monotonic() + SECONDS_MAX
    while not is_so():
        expect(time.monotonic() < deadline, promise)
        time.sleep(0.1)


def make_texts(directory: Path) -> Texts:
    """Return texts of this repository for the tokenizer of the model in a directory."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
    documents = (ROOT / "docs").glob("*.md")
    pages = sorted(page for page in documents if page.name != "first-day.md")
    tokens = [tokenizer.encode(page.read_text()) for page in pages]
    long = max(tokens, key=len)
    turns = [long[at * TURN_TOKENS :][:TURN_TOKENS] for at in range(TURNS)]
    questions = [page[:QUESTION_TOKENS] for page in tokens if len(page) >= QUESTION_TOKENS]
    decode = tokenizer.decode
    return Texts([decode(turn) for turn in turns], [decode(page) for page in questions[:QUESTIONS]])


class Day:
    """A home directory with a daemon and a server, and the page of what happens there."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.socket_path = home / "run" / "hybridkv" / "daemon.sock"
        self.environment = {
            **os.environ,
            "HOME": str(home),
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "XDG_RUNTIME_DIR": str(home / "run"),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        }
        (home / "run").mkdir()

    def write(self, *paragraphs: str) -> None:
        """Add paragraphs to the page."""
        for paragraph in paragraphs:
            if paragraph.startswith("#"):
                print(f"{paragraph.lstrip('# ')} ...", file=sys.stderr, flush=True)
            text = paragraph.replace(str(self.home), "~")
            is_prose = not text.startswith(("#", "`" * 3, "|"))
            print(WRAPPER.fill(text) if is_prose else text, end="\n\n", flush=True)

    def type(self, *words: str, shown: str = "", lines: int = 12) -> str:
        """Run a command that ends with 0, and show it with its last lines. Returns its output."""
        done = subprocess.run(
            words,
            env=self.environment,
            cwd=self.home,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SECONDS_MAX,
            check=False,
        )
        seen = done.stdout.rstrip()
        expect(done.returncode == 0, f"`{' '.join(words)}` ends with 0, and not with: {seen}")
        text = "\n".join(seen.splitlines()[-lines:])
        self.write(f"```\n$ {shown or ' '.join(words)}\n{text}\n```".replace("\n\n```", "\n```"))
        return seen

    def ask_daemon(self, command: str, *words: str) -> dict[str, Any]:
        """Return what a command of `hybridkv` prints with --json."""
        done = subprocess.run(
            ("hybridkv", command, *words, "--json"),
            env=self.environment,
            capture_output=True,
            timeout=SECONDS_MAX,
            check=True,
        )
        document: dict[str, Any] = json.loads(done.stdout)
        return document

    def start_service(self) -> "subprocess.Popen[bytes]":
        """Start the daemon as systemd starts a unit of type notify: it is up once it says so."""
        words = ("hybridkv", "serve", "--ram", "256MiB", "--metrics-port", "-1")
        name = str(self.home / "run" / "notify")
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
            manager.bind(name)
            manager.settimeout(SECONDS_MAX)
            environment = {**self.environment, "NOTIFY_SOCKET": name}
            service = subprocess.Popen(words, env=environment, cwd=self.home)
            notice = manager.recv(100).decode()
        os.unlink(name)
        self.write(f"```\n$ {' '.join(words)}\n```", f"It notifies the manager: `{notice}`.")
        return service


class Server:
    """`vllm serve` on loopback."""

    def __init__(self, day: Day) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self._log_path = day.home / "vllm.log"
        settings = SETTINGS % day.socket_path
        words = [
            *("vllm", "serve", str(day.home / "model"), "--served-model-name", "tiny"),
            *("--host", "127.0.0.1", "--port", str(self._port)),
            *("--dtype", "float32", "--enforce-eager", "--max-model-len", "2048"),
            *("--kv-cache-memory-bytes", str(24 << 20), "--enable-prompt-tokens-details"),
        ]
        line = " ".join(words)
        for option in ("--dtype", "--kv-cache"):
            line = line.replace(f" {option}", f" \\\n    {option}")
        day.write(f"```\n$ {line} \\\n    --kv-transfer-config '{settings}'\n```")
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [*words, "--kv-transfer-config", settings],
                env=day.environment,
                cwd=day.home,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        until(self._is_up, "vLLM serves")

    def _is_up(self) -> bool:
        end = self._log_path.read_text(errors="replace")[-3000:]
        expect(self._process.poll() is None, f"vLLM goes on, and does not end with: {end}")
        try:
            return bool(self._get("/health") is not None)
        except OSError:
            return False

    def _get(self, path: str, body: object = None) -> bytes:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"http://127.0.0.1:{self._port}{path}", data, headers)
        with urllib.request.urlopen(request, timeout=SECONDS_MAX) as reply:
            content: bytes = reply.read()
        return content

    def log_line(self, text: str) -> str:
        """Return the message of the log's first line that contains a text."""
        lines = self._log_path.read_text(errors="replace").splitlines()
        line = next((line for line in lines if text in line), "")
        expect(bool(line), f"the log of vLLM has a line with '{text}'")
        return text + line.partition(text)[2]

    def chat(self, messages: Sequence[dict[str, str]]) -> Reply:
        """Ask for the next turn of a conversation."""
        body = {
            "model": "tiny",
            "messages": messages,
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
        }
        reply = json.loads(self._get("/v1/chat/completions", body))
        usage = reply["usage"]
        return Reply(
            request_id=reply["id"],
            text=reply["choices"][0]["message"]["content"],
            prompt_tokens=usage["prompt_tokens"],
            cached_tokens=(usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0,
        )

    def counter(self, name: str) -> float:
        """Return a counter of vLLM's /metrics, summed over its labels."""
        lines = self._get("/metrics").decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))

    def stop(self) -> None:
        """End vLLM as a service manager does."""
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(SECONDS_MAX)

    def close(self) -> None:
        """End vLLM and its engine's processes whatever they do, unless `stop` has."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def converse(server: Server, turns: Sequence[str]) -> Iterator[tuple[list[dict[str, str]], Reply]]:
    """Yield each turn's messages, and the reply to them, which the next turn's messages contain."""
    messages: list[dict[str, str]] = []
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        reply = server.chat(messages)
        yield list(messages), reply
        messages.append({"role": "assistant", "content": reply.text})


class Load:
    """Two callers who ask one question after another. Counts right answers and keeps faults."""

    def __init__(self, server: Server, answers: dict[str, str]) -> None:
        self._server, self._answers = server, answers
        self._is_over = threading.Event()
        self.answered = 0
        self.faults: list[object] = []

    def _call(self, questions: Sequence[str]) -> None:
        for question in itertools.cycle(questions):
            if self._is_over.is_set():
                return
            try:
                text = self._server.chat([{"role": "user", "content": question}]).text
            except OSError as error:
                self.faults.append(error)
                return
            if text == self._answers[question]:
                self.answered += 1
            else:
                self.faults.append(f"another answer to: {question[:60]}")

    @contextmanager
    def running(self) -> Iterator[None]:
        """Ask while the block runs."""
        orders = [list(self._answers), list(reversed(self._answers))]
        callers = [threading.Thread(target=self._call, args=(order,)) for order in orders]
        for caller in callers:
            caller.start()
        try:
            yield
        finally:
            self._is_over.set()
            for caller in callers:
                caller.join()

    def go_on(self) -> None:
        """Wait for one more answer to each question, on the average."""
        enough = self.answered + len(self._answers)
        until(lambda: bool(self.faults) or self.answered >= enough, "requests are answered")
        expect(not self.faults, f"every answer is right under load, and not: {self.faults}")


def run_day(day: Day, wheel: Path, next_wheel: Path, stack: ExitStack) -> None:
    """Do everything, and write the page."""
    day.write(
        "# A first day",
        "`scripts/first-day` typed all of this in a fresh environment, on a machine without a GPU, "
        "and wrote this page. The model of `hybridkv model` is a small Gemma 3 with random "
        "weights, so its answers make no sense; but a wrong byte in the cache would change them.",
        "## Install",
    )
    constraints = ROOT / "requirements" / "engine.txt"
    pip = (sys.executable, "-m", "pip", "install", "-q", "--upgrade", "-c", str(constraints))
    day.type(*pip, str(wheel), shown=f"pip install {wheel.name}")
    day.type("hybridkv", "--version")
    day.type("hybridkv", "model", str(day.home / "model"))
    texts = make_texts(day.home / "model")

    day.write("## Start the daemon", "A service manager starts it (`ops/systemd`):")
    service = day.start_service()
    stack.callback(service.send_signal, signal.SIGINT)
    day.type("hybridkv", "ping")

    day.write("## Serve a model", "Its own cache has room for some of the prompts that follow.")
    server = Server(day)
    stack.callback(server.close)
    day.write("vLLM's log says what is cached:", f"```\n{server.log_line('hybridkv: groups')}\n```")

    day.write("## Chat", f"A conversation of {TURNS} turns. Each prompt has all turns before it.")
    table = ["| turn | tokens of the prompt | of these cached |", "|---|---|---|"]
    prompts, replies = [], list[Reply]()
    for messages, reply in converse(server, texts.turns):
        prompts.append(messages)
        replies.append(reply)
        table.append(f"| {len(replies)} | {reply.prompt_tokens} | {reply.cached_tokens} |")
    day.write("\n".join(table))
    expect(len({reply.text for reply in replies}) > 1, "an answer shows what was asked")
    answers, chunks = {}, replies[-1].prompt_tokens // BLOCK_TOKENS
    for question in texts.questions:
        reply = server.chat([{"role": "user", "content": question}])
        answers[question] = reply.text
        chunks += reply.prompt_tokens // BLOCK_TOKENS
    until(lambda: day.ask_daemon("stats").get("objects_stored", 0) >= chunks, "all is stored")
    # Arenas of one socket have names that differ in their last part alone.
    mine = Path(day.ask_daemon("stats")["arena"]).name.rpartition("-")[0]

    day.write("## Stop vLLM", "SIGTERM ends vLLM. The daemon and its memory stay.")
    server.stop()
    expect(day.ask_daemon("ping")["pid"] == service.pid, "the daemon is still there")
    day.type("hybridkv", "ping")

    day.write("## Start it again", "The same command, and the last turn once more:")
    server = Server(day)
    stack.callback(server.close)
    reply = server.chat(prompts[-1])
    expect(reply.text == replies[-1].text, "the answer after a restart is the same")
    least = (reply.prompt_tokens // BLOCK_TOKENS - 1) * BLOCK_TOKENS
    expect(reply.cached_tokens >= least, f"{least} tokens are cached, not {reply.cached_tokens}")
    day.write(
        f"The answer is the same, and of its {reply.prompt_tokens} tokens {reply.cached_tokens} "
        "came out of the daemon's memory:"
    )
    day.type("hybridkv", "explain", reply.request_id, lines=30)

    day.write(
        "## Upgrade the daemon",
        "Two callers ask one question after another meanwhile. The package of the next version is "
        "installed, SIGTERM ends the daemon, and the service manager starts the new one:",
    )
    load = Load(server, answers)
    with load.running():
        load.go_on()
        day.type(*pip, str(next_wheel), shown=f"pip install --upgrade {next_wheel.name}")
        service.terminate()
        expect(service.wait(SECONDS_MAX) == 0, "the daemon ends with 0")
        service = day.start_service()
        stack.callback(service.send_signal, signal.SIGINT)
        recovered = day.ask_daemon("stats").get("objects_recovered", 0)
        expect(recovered >= chunks, "the daemon takes over the memory of the one before")
        until(
            lambda: load.faults or day.ask_daemon("stats").get("tokens_loaded", 0) > 0, "hits go on"
        )
        load.go_on()
    expect(server.counter("vllm:hybridkv_faults_total") == 0, "nothing failed in the connector")
    day.type("hybridkv", "--version")
    day.write(
        f"The new daemon took over {recovered} objects. {load.answered} questions were answered "
        "meanwhile, each as before, and none failed."
    )

    day.write("## Stop everything", "`--free` gives the memory back too:")
    server.stop()
    day.type("hybridkv", "stop", "--free")
    expect(service.wait(SECONDS_MAX) == 0, "the daemon ends with 0")
    expect(not day.socket_path.exists(), "no socket is left")
    expect(not [*ARENAS.glob(f"{mine}-*")], "nothing is left in /dev/shm")
    day.write("Nothing is left in `/dev/shm`.")


def main() -> None:
    """Run the day in a directory of its own, which goes with all processes at its end."""
    wheel, next_wheel = (Path(word) for word in sys.argv[1:])
    # A short name: paths of sockets have a limit of 107 bytes.
    with tempfile.TemporaryDirectory(prefix="hkv-") as home, ExitStack() as stack:
        run_day(Day(Path(home)), wheel, next_wheel, stack)


if __name__ == "__main__":
    main()
