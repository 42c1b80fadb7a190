"""Run the Python of some pages, each page in a module of its own: `python run_pages.py PAGE...`.

What a page shows in a `text` block after a `python` block must have been printed.

One process for all, since most of the time goes into importing JAX and measuring the devices. Prints a JSON object:
page → traceback, empty when the page runs and prints what it shows.
"""

import contextlib
import io
import json
import re
import sys
import traceback
import types
from pathlib import Path

BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHOWN = re.compile(r"^```\n\n```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def code_of(page: Path) -> str:
    """The blocks of a page in order, each on the lines where it stands."""
    text, code = page.read_text(), ""
    for match in BLOCK.finditer(text):
        lines_before = text.count("\n", 0, match.start(1))
        code += "\n" * (lines_before - code.count("\n")) + match[1]
    return code


def run(page: Path, number: int) -> str:
    """The traceback of a page, empty when it runs and prints what it shows."""
    module = types.ModuleType(f"page_{number}")
    sys.modules[module.__name__] = module  # dataclasses look their module up
    try:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(code_of(page), str(page), "exec"), module.__dict__)
    except Exception:
        return traceback.format_exc()
    missing = [shown for shown in SHOWN.findall(page.read_text()) if shown not in printed.getvalue()]
    return f"The page shows\n{missing[0]}but what was printed is\n{printed.getvalue()}" if missing else ""


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        outcome = {page: run(Path(page), number) for number, page in enumerate(sys.argv[1:])}
    print(json.dumps(outcome))
