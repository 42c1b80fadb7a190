"""The command line: each command parses its arguments, calls one public function and prints what it returns.

Comes in: the words after `alpa-lite`. Goes out: text, or JSON with `--json`, and an exit code. Read `entry` first.

plan          plan a train step for a cluster, or compare clusters      `step_commands`
compare       compare planners and settings of other trainers           `step_commands`
check         compare a step that runs by its plan with jax.jit         `step_commands`
explain       show a saved plan, or the reasons for part of it          `file_commands`
diff          show what changes from one plan to another                `file_commands`
simulate      show the timeline of a plan, predicted or measured        `file_commands`
solve         solve a file with an intra-op problem                     `file_commands`
calibrate     measure this machine's devices                            `machine_commands`
doctor        check whether this machine is ready                       `machine_commands`
launch        run a program as several processes on this machine        `machine_commands`
bench, demo   compare planners; plan, train and compare on this machine `machine_commands`, `bench`, `demo`
completion    print a script that completes these commands in a shell   `entry`

`alpa-lite COMMAND --help` lists the options of a command. `entry` has the parser of all commands; `command` what they
share: output and error messages; `user_files` what a user names on the command line; `exit_codes` how commands end.
"""

from __future__ import annotations

import sys
from pathlib import Path

from alpa_lite.cli.exit_codes import Exit, reader_left


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code; see `alpa_lite.cli.entry.main`."""
    # The parser of all commands imports planners and JAX, for which neither a shell that starts nor a question for the
    # version should wait.
    words = sys.argv[1:] if argv is None else argv
    if words == ["--version"]:
        from alpa_lite import __version__

        return _printed(f"alpa_lite {__version__}\n")
    if len(words) == 2 and words[0] == "completion":
        script = Path(__file__).parent / "completions" / f"{words[1]}.txt"
        if script.is_file():
            return _printed(script.read_text())
    from alpa_lite.cli import entry

    return entry.main(argv)


def _printed(text: str) -> int:
    try:
        print(text, end="", flush=True)
    except BrokenPipeError:
        return reader_left()
    return Exit.DONE
