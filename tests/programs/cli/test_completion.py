"""`hybridkv completion`: the scripts work in their shells."""

import shutil
import subprocess

import pytest

from hybridkv.cli.completion import SHELLS
from hybridkv.cli.main import COMMANDS, main, options_of
from tests.waiting import DEADLINE_SECONDS

ASK = """
COMP_WORDS=(hybridkv "$@") COMP_CWORD=$#
_hybridkv
printf '%s\\n' "${COMPREPLY[@]}"
"""


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The script that the command prints."""
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


def completed(text: str, *words: str) -> list[str]:
    """What bash offers for the last of these words."""
    command = ["bash", "-c", f"{text}\n{ASK}", "bash", *words]
    run = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=DEADLINE_SECONDS
    )
    assert run.stderr == ""
    return run.stdout.split()


def test_bash_completes_commands_and_options(capsys: pytest.CaptureFixture[str]) -> None:
    text = script("bash", capsys)
    assert set(completed(text, "")) == {*COMMANDS, "--help", "--version"}
    assert completed(text, "st") == ["stop", "stats"]
    assert completed(text, "serve", "--metrics") == [
        "--metrics-host",
        "--metrics-port",
        "--metrics-token",
    ]
    for name, options in options_of().items():
        assert set(completed(text, name, "--")) == set(options)
    assert completed(text, "replay", "file") == [], "a file's name is the shell's own to complete"


@pytest.mark.parametrize("shell", sorted(SHELLS))
def test_every_shell_is_told_of_every_option(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = script(shell, capsys)
    prefix = "-l " if shell == "fish" else "--"
    for name, options in options_of().items():
        assert name in text
        assert all(f"{prefix}{option[2:]}" in text for option in options)
    if shutil.which(shell):
        run = subprocess.run(
            [shell, "-n"],
            input=text,
            text=True,
            capture_output=True,
            check=False,
            timeout=DEADLINE_SECONDS,
        )
        assert (run.returncode, run.stderr) == (0, "")


def test_a_shell_that_is_not_known(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["completion", "tcsh"])
    assert ended.value.code == 2
    assert "choose from 'bash', 'zsh', 'fish'" in capsys.readouterr().err
