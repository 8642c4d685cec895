"""A first day with the wheel: serve, chat, stop vLLM, hit, upgrade under load, free everything."""

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from tokenizers import ByteLevelBPETokenizer
from transformers import PreTrainedTokenizerFast

from hybridkv import __version__
from hybridkv.daemon.filesystem import stale_arenas
from hybridkv.lab.models import bundled_environment, bundled_models
from tests.engine.server import Server
from tests.engine.support import VOCABULARY, arguments_of
from tests.waiting import DEADLINE_SECONDS, until

pytestmark = [pytest.mark.engine, pytest.mark.soak, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[3]
MODEL, CHUNK = "gemma3", 128
TEMPLATE = "{% for one in messages %}{{ one.role }}: {{ one.content }}\n{% endfor %}assistant:"
ROOM = ("--max-model-len=2048", f"--kv-cache-memory-bytes={24 << 20}")
"""The engine's own cache has room for a few of the questions: the others come from outside."""
QUESTIONS = 8
QUESTION_CHARACTERS = 4000
HITS = "vllm:external_prefix_cache_hits_total"
NEXT_VERSION = f"{__version__}.post1"


class Installed:
    """The package as a user has it: a wheel in a directory, and commands in `bin` of that."""

    def __init__(self, directory: Path) -> None:
        self._site, self._wheels = directory / "site", directory / "wheels"
        self.socket_path = directory / "hybridkv" / "daemon.sock"
        self.environment = {
            "PYTHONPATH": f"{self._site}:{os.environ.get('PYTHONPATH', '')}",
            "XDG_RUNTIME_DIR": str(directory),
        }

    def install(self, source: Path) -> None:
        """Build a wheel from `source` and install it, over another one too."""
        wheels = self._wheels / str(len(list(self._wheels.glob("*"))))
        _run("build", "--wheel", "--no-isolation", "--outdir", str(wheels), str(source))
        (wheel,) = wheels.glob("*.whl")
        words = ("--no-deps", "--no-index", "--upgrade", "--target", str(self._site), str(wheel))
        _run("pip", "install", *words)

    def command(self, *words: str) -> list[str]:
        """The command line of `hybridkv`."""
        return [str(self._site / "bin" / "hybridkv"), *words]

    def says(self, *words: str) -> str:
        """What a command prints; it ends with 0."""
        done = subprocess.run(
            self.command(*words),
            env={**os.environ, **self.environment},
            capture_output=True,
            text=True,
            timeout=DEADLINE_SECONDS,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def tells(self, *words: str) -> Mapping[str, Any]:
        """Return what a command prints with --json."""
        document: dict[str, Any] = json.loads(self.says(*words, "--json"))
        return document

    def counted(self, name: str) -> int:
        """A counter of the daemon, which `hybridkv stats` has from its first event on."""
        count: int = self.tells("stats").get(name, 0)
        return count

    @contextmanager
    def serving(self) -> Iterator["subprocess.Popen[bytes]"]:
        """`hybridkv serve`, once it answers; where it still runs it is ended with its memory."""
        words = self.command("serve", "--ram", "256MiB", "--metrics-port", "-1")
        with subprocess.Popen(words, env={**os.environ, **self.environment}) as daemon:
            try:
                until(lambda: self._answers(daemon.pid), "the daemon answers")
                yield daemon
            finally:
                daemon.send_signal(signal.SIGINT)

    def _answers(self, pid: int) -> bool:
        words = self.command("ping", "--json")
        environment = {**os.environ, **self.environment}
        done = subprocess.run(words, env=environment, capture_output=True, check=False)
        return done.returncode == 0 and json.loads(done.stdout)["pid"] == pid


def _run(module: str, *words: str) -> None:
    command = [sys.executable, "-m", module, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def next_version(directory: Path) -> Path:
    """The source of this package with another version."""
    directory.mkdir()
    for name in ("src", "pyproject.toml", "README.md", "LICENSE"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, directory / name)
    package = directory / "src" / "hybridkv" / "__init__.py"
    package.write_text(package.read_text().replace(f'"{__version__}"', f'"{NEXT_VERSION}"'))
    return directory


def make_model(directory: Path) -> tuple[list[str], int]:
    """MODEL with a tokenizer and a chat template; questions to it, and the chunks that they have.

    The tokenizer is trained on our documents, and the questions are the beginnings of those.
    """
    directory.mkdir()
    shutil.copy(bundled_models()[MODEL] / "config.json", directory)
    pages = sorted((ROOT / "docs").glob("*.md"))
    trained = ByteLevelBPETokenizer()
    trained.train([str(page) for page in pages], VOCABULARY, show_progress=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=trained._tokenizer)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    questions = [page.read_text()[:QUESTION_CHARACTERS] for page in pages][:QUESTIONS]
    return questions, sum(len(tokenizer.encode(text)) // CHUNK for text in questions)


def chat(server: Server, question: str) -> str:
    """The answer to a chat with one long message."""
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": question}],
        "max_tokens": 8,
        "temperature": 0,
        "ignore_eos": True,
    }
    reply = json.loads(server.post("/v1/chat/completions", body))
    answer: str = reply["choices"][0]["message"]["content"]
    return answer


class Load:
    """Two callers who ask one question after another; a context manager."""

    def __init__(self, server: Server, answers: Mapping[str, str]) -> None:
        """`answers` are the right ones by question."""
        self._server, self._answers = server, answers
        self._is_over = threading.Event()
        self._answered = 0
        self.faults: list[object] = []
        """Every answer that was wrong, and every error instead of one."""
        questions = list(answers)
        orders = questions, questions[QUESTIONS // 2 :] + questions[: QUESTIONS // 2]
        self._callers = [threading.Thread(target=self._call, args=(order,)) for order in orders]

    def __enter__(self) -> "Load":
        for caller in self._callers:
            caller.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._is_over.set()
        for caller in self._callers:
            caller.join()

    def goes_on(self) -> None:
        """As many answers more as there are questions, each of them right."""
        enough = self._answered + QUESTIONS
        until(lambda: bool(self.faults) or self._answered >= enough, "requests are answered")
        assert self.faults == []

    def _call(self, questions: Sequence[str]) -> None:
        for question in itertools.cycle(questions):
            if self._is_over.is_set():
                return
            try:
                answer = chat(self._server, question)
            except OSError as error:
                self.faults.append(error)
                return
            self._answered += 1
            if answer != self._answers[question]:
                self.faults.append((question[:40], answer, self._answers[question]))


def test_a_first_day(tmp_path: Path) -> None:
    installed = Installed(tmp_path)
    installed.install(ROOT)
    assert installed.says("--version").startswith(f"hybridkv {__version__}, ")
    questions, chunks = make_model(tmp_path / "model")
    arguments = arguments_of(
        MODEL, str(installed.socket_path), f"--model={tmp_path / 'model'}", *ROOM
    )
    arguments.remove("--skip-tokenizer-init")
    environment = {**bundled_environment(MODEL), **installed.environment}

    with ExitStack() as stack:
        daemon = stack.enter_context(installed.serving())
        with Server(arguments, tmp_path / "first.log", environment) as server:
            answers = {question: chat(server, question) for question in questions}
            assert len(set(answers.values())) == QUESTIONS, "an answer shows what was asked"
            assert server.total(HITS) == 0
            until(lambda: installed.counted("objects_stored") >= chunks, "all is stored")
            server.close(signal.SIGTERM)
        assert installed.tells("ping")["pid"] == daemon.pid

        with Server(arguments, tmp_path / "second.log", environment) as server:
            assert chat(server, questions[0]) == answers[questions[0]]
            assert server.total(HITS) >= CHUNK
            with Load(server, answers) as load:
                load.goes_on()
                installed.install(next_version(tmp_path / "next"))
                daemon.terminate()
                assert daemon.wait(DEADLINE_SECONDS) == 0
                upgraded = stack.enter_context(installed.serving())
                assert installed.counted("objects_recovered") >= chunks, "the cache is kept"
                until(lambda: installed.counted("tokens_loaded") > 0, "hits go on")
                load.goes_on()
            assert load.faults == []
            assert server.total("vllm:hybridkv_daemon_connects_total") == 2
            assert server.total("vllm:hybridkv_faults_total") == 0
            assert installed.says("--version").startswith(f"hybridkv {NEXT_VERSION}, ")
            server.close(signal.SIGTERM)

        stopped = installed.tells("stop", "--free")
        assert (stopped["pid"], stopped["freed"]) == (upgraded.pid, True)
        assert upgraded.wait(DEADLINE_SECONDS) == 0
        assert not installed.socket_path.exists()
        assert stale_arenas(installed.socket_path) == [], "nothing is left in /dev/shm"
