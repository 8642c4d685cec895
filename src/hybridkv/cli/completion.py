"""`hybridkv completion`: a script by which a shell completes commands and options."""

import argparse
from collections.abc import Callable, Mapping

from hybridkv.cli.arguments import command, option

Options = Mapping[str, list[str]]  # The options of each command.
Commands = Mapping[str, str]  # The description of each command.


def bash(commands: Commands, options: Options) -> str:
    """Returns the script for `source <(hybridkv completion bash)`."""
    cases = "\n".join(f"    {name}) words='{' '.join(options[name])}' ;;" for name in commands)
    return f"""_hybridkv() {{
  local words='' current="${{COMP_WORDS[COMP_CWORD]}}"
  case "${{COMP_WORDS[1]}}" in
{cases}
  esac
  if [ "$COMP_CWORD" -eq 1 ]; then
    words='{" ".join(commands)} --help --version'
  elif [ "${{current#-}}" = "$current" ]; then
    return
  fi
  COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _hybridkv hybridkv
"""


def zsh(commands: Commands, options: Options) -> str:
    """Returns the script for `source <(hybridkv completion zsh)`, after compinit."""
    names = "\n".join(f"    '{name}:{_quoted(about)}'" for name, about in commands.items())
    cases = "\n".join(f"    {name}) words=({' '.join(options[name])}) ;;" for name in commands)
    return f"""#compdef hybridkv
_hybridkv() {{
  local -a words_of commands
  commands=(
{names}
  )
  if (( CURRENT == 2 )); then
    _describe 'command' commands
    return
  fi
  case "${{words[2]}}" in
{cases.replace("words=", "words_of=")}
  esac
  if [[ "${{words[CURRENT]}}" == -* ]]; then
    compadd -- $words_of
  else
    _files
  fi
}}
compdef _hybridkv hybridkv
"""


def fish(commands: Commands, options: Options) -> str:
    """Returns the script for `hybridkv completion fish | source`."""
    lines = [
        f"complete -c hybridkv -n __fish_use_subcommand -f -a {name} -d '{_quoted(about)}'"
        for name, about in commands.items()
    ]
    for name in commands:
        condition = f"-n '__fish_seen_subcommand_from {name}'"
        lines += [
            f"complete -c hybridkv {condition} -l {word.removeprefix('--')}"
            for word in options[name]
        ]
    return "\n".join(lines) + "\n"


SHELLS: Mapping[str, Callable[[Commands, Options], str]] = {"bash": bash, "zsh": zsh, "fish": fish}


def _quoted(text: str) -> str:
    """Text for a shell's single quotes, without "'" and ":", which ends a name in zsh."""
    return text.replace("'", "").replace(":", ",")


@command(option("shell", "the shell that reads the script", choices=list(SHELLS)))
def run_completion(arguments: argparse.Namespace) -> int:
    """Print the script of one shell."""
    commands: Commands = arguments.commands
    print(SHELLS[arguments.shell](commands, arguments.options_of()), end="")
    return 0
