"""The parser of all commands, the function that runs one of them, and the scripts by which shells complete them.

    source <(alpa-lite completion bash)                    # in ~/.bashrc
    source <(alpa-lite completion zsh)                     # in ~/.zshrc, after compinit
    alpa-lite completion fish | source                     # in config.fish

The scripts are generated from the parser, so that no option is missing (`words_of`). For a value without suggestions,
files are proposed. They lie in the folder `completions`, since a shell that starts should not wait for the parser:
`make completions` writes them anew, and a test says when that is due.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import alpa_lite as al
from alpa_lite.cli.advise_command import ADVISE
from alpa_lite.cli.command import SUGGESTIONS, Command, SuggestingParser, answer, ended, json_alone
from alpa_lite.cli.exit_codes import Exit
from alpa_lite.cli.file_commands import DIFF, EXPLAIN, SIMULATE, SOLVE
from alpa_lite.cli.list_commands import CLUSTERS, PLANNERS_COMMAND
from alpa_lite.cli.machine_commands import BENCH, CALIBRATE, DEMO, DOCTOR, LAUNCH
from alpa_lite.cli.serve_command import SERVE
from alpa_lite.cli.step_commands import CHECK, COMPARE, IMPORT, PLAN
from alpa_lite.intra_op.problem_file import seconds_since_start


@dataclass(frozen=True, kw_only=True)
class Option:
    """An option as shells see it: its flags, its help text, whether a value follows, and the values to propose."""

    flags: tuple[str, ...]
    about: str
    takes_value: bool
    values: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class CommandWords:
    """A command as shells see it; `values` are the words proposed for its first argument, files if there are none."""

    about: str
    options: tuple[Option, ...]
    values: tuple[str, ...] = ()


def words_of(parser: argparse.ArgumentParser) -> dict[str, CommandWords]:
    """Return the commands of a parser by name."""
    # argparse has no public list of what was added to a parser.
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    about = {choice.dest: choice.help or "" for choice in commands._choices_actions}
    return {name: _words(about.get(name, ""), sub) for name, sub in commands.choices.items()}


def _words(about: str, parser: argparse.ArgumentParser) -> CommandWords:
    listed = [action for action in parser._actions if action.help != argparse.SUPPRESS]
    options = [
        Option(
            flags=tuple(action.option_strings),
            about=_one_line(action.help or ""),
            takes_value=action.nargs != 0,
            values=_values(action),
        )
        for action in listed
        if action.option_strings
    ]
    first = next((action for action in listed if not action.option_strings), None)
    return CommandWords(about=about, options=tuple(options), values=_values(first) if first is not None else ())


def _values(action: argparse.Action) -> tuple[str, ...]:
    return tuple(map(str, action.choices or getattr(action, SUGGESTIONS, ())))


def _one_line(text: str) -> str:
    """Return an option's help on one line, without the characters that shells or their completion would interpret."""
    return re.sub(r"[\[\]:'\"`$\\]", " ", text.replace("%%", "%")).split(";")[0].strip()


def _bash(words: Mapping[str, CommandWords]) -> str:
    """Return a completion script for bash."""
    cases: list[str] = []
    for name, command in words.items():
        flags = " ".join(flag for option in command.options for flag in option.flags)
        # One arm per option with a value: what follows the option is proposed from its own values.
        arms = [
            f"        {'|'.join(option.flags)}) {_bash_reply(option.values)} ;;"
            for option in command.options
            if option.takes_value
        ]
        inner = [
            "      case $previous in",
            *arms,
            f"        *) if [[ $word == -* ]]; then {_bash_reply(flags.split())}",
            f"           else {_bash_reply(command.values)}; fi ;;",
            "      esac ;;",
        ]
        cases.append("\n".join([f"    {name})", *inner]))
    return "\n".join(
        [
            "# Completion of alpa-lite for bash: source <(alpa-lite completion bash)",
            "_alpa_lite() {",
            "  local word=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD-1]}",
            "  COMPREPLY=()",
            # The first word is a command; all others depend on it.
            f"  if ((COMP_CWORD == 1)); then {_bash_reply([*words, '--help', '--version'])}; return; fi",
            "  case ${COMP_WORDS[1]} in",
            *cases,
            "  esac",
            "}",
            "complete -F _alpa_lite alpa-lite",
        ]
    )


def _bash_reply(values: Sequence[str]) -> str:
    """Return the line that sets the proposals for the current word: some values, or files."""
    how = f"-W {shlex.quote(' '.join(values))}" if values else "-f"
    return f'COMPREPLY=($(compgen {how} -- "$word"))'


def _zsh(words: Mapping[str, CommandWords]) -> str:
    """Return a completion script for zsh."""
    lines = [
        "#compdef alpa-lite",
        "# Completion of alpa-lite for zsh: source <(alpa-lite completion zsh), after compinit",
        "_alpa_lite() {",
        "  if ((CURRENT == 2)); then",
        f"    local -a commands=({' '.join(shlex.quote(f'{name}:{_one_line(c.about)}') for name, c in words.items())})",
        "    _describe command commands",
        "    return",
        "  fi",
        "  local command=$words[2]",
        # `_arguments` numbers words from the command on, so that the name of the program must go.
        "  shift words; ((CURRENT--))",
        "  case $command in",
    ]
    for name, command in words.items():
        # The star allows an option to be given more than once, as `--cluster` may be.
        specs = [_zsh_option(flag, option) for option in command.options for flag in option.flags]
        rest = f"*:value:({' '.join(command.values)})" if command.values else "*:file:_files"
        lines.append(f"    {name}) _arguments {' '.join(map(shlex.quote, [*specs, rest]))} ;;")
    return "\n".join([*lines, "  esac", "}", "compdef _alpa_lite alpa-lite"])


def _zsh_option(flag: str, option: Option) -> str:
    value = ""
    if option.takes_value:
        value = f":value:({' '.join(option.values)})" if option.values else ":value:_files"
    return f"*{flag}[{option.about}]{value}"


def _fish(words: Mapping[str, CommandWords]) -> str:
    """Return a completion script for fish."""
    lines = [
        "# Completion of alpa-lite for fish: alpa-lite completion fish | source",
        "complete -c alpa-lite -n __fish_use_subcommand -f",
    ]
    for name, command in words.items():
        lines.append(
            f"complete -c alpa-lite -n __fish_use_subcommand -a {name} -d {shlex.quote(_one_line(command.about))}"
        )
        # fish has one flat list of rules, each with the condition under which it holds.
        here = f"complete -c alpa-lite -n {shlex.quote(f'__fish_seen_subcommand_from {name}')}"
        if command.values:
            lines.append(f"{here} -f -a {shlex.quote(' '.join(command.values))}")
        for option in command.options:
            flags = " ".join(f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}" for flag in option.flags)
            # -x: the value comes from the list and is no file; -r: a value is required, of any kind.
            value = f" -x -a {shlex.quote(' '.join(option.values))}" if option.values else " -r"
            lines.append(f"{here} {flags}{value if option.takes_value else ''} -d {shlex.quote(option.about)}")
    return "\n".join(lines)


_FOLDER = Path(__file__).parent / "completions"

SHELLS: Mapping[str, Callable[[Mapping[str, CommandWords]], str]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}


def run_completion(given: argparse.Namespace) -> int:
    """Print the completion script of a shell."""
    script = SHELLS[given.shell](words_of(given.all_commands))
    answer(given, script, lambda: {"shell": given.shell, "script": script})
    return Exit.DONE


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=tuple(SHELLS), help="the shell to complete in")


COMPLETION = Command(
    name="completion",
    about="print a script that completes these commands in a shell",
    example="bash >> ~/.bashrc",
    run=run_completion,
    add_arguments=_arguments,
)


# In the order of use, in which `--help` and the proposals of shells list them.
COMMANDS: tuple[Command, ...] = (
    PLAN, COMPARE, IMPORT, ADVISE, CHECK, EXPLAIN, DIFF, SIMULATE, SOLVE, SERVE, CLUSTERS, PLANNERS_COMMAND, CALIBRATE,
    DOCTOR, LAUNCH, BENCH, DEMO, COMPLETION,
)  # fmt: skip


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands and their options."""
    parser = SuggestingParser(
        prog="alpa-lite",
        description="Spread a JAX train step over devices, and see why.",
        epilog="example:\n  alpa-lite plan train.py:example --cluster p3.16xlarge --output plan.json\n\n"
        "exit codes: 0 done, 1 error, 2 wrong usage, 3 nothing fits, 130 interrupted, 141 the reader left",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"alpa_lite {al.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_to(commands)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code; expected errors are printed as their message."""
    # Counted from the start of the process, since `solve --timeout` promises the time that a user sees.
    begun = time.perf_counter() - (seconds_since_start() if argv is None else 0.0)  # imports take time too
    words, parser = sys.argv[1:] if argv is None else argv, build_parser()
    given = parser.parse_args(words)
    given.words, given.begun, given.all_commands = words[1:], begun, parser
    return ended(given.command, json_alone(given)(lambda: given.run(given)))


def write_completions() -> None:
    """Write the completion scripts of all shells into the package."""
    words = words_of(build_parser())
    for shell, script in SHELLS.items():
        (_FOLDER / f"{shell}.txt").write_text(script(words) + "\n")
