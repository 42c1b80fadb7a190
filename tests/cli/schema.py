"""The documented schema of `--json`: the keys that docs/command-line.md names, command by command."""

from pathlib import Path

from alpa_lite import cli

PAGE = Path(cli.__file__).parents[2] / "docs" / "command-line.md"

FREE = {"breakdown_seconds", "mesh", "specs", "shapes", "versions", "settings", "cluster", "dims", "decisions"}
"""Keys of objects whose own keys are names (of arguments, axes, packages), or are told elsewhere."""


def documented(command, found):
    """Data of a command without their envelope, once the page is seen to tell all keys, those of objects within too."""
    assert (found.pop("schema"), found.pop("version")) == (f"alpa-lite/{command}", 1)
    unknown = _keys(found) - names_of(command)
    assert not unknown, f"{PAGE.name} does not tell what {sorted(unknown)} of alpa-lite {command} are"
    return found


def names_of(command):
    """The words in code quotes of the section of a command, and of those that it refers to."""
    sections = {part.split("`")[1]: part for part in PAGE.read_text().split("\n### ")[1:]}
    text = sections[f"alpa-lite {command}"]
    referred = [name for name in sections if name != f"alpa-lite {command}" and f"`{name}`" in text]
    return {word for name in (f"alpa-lite {command}", *referred) for word in sections[name].split("`")[1::2]}


def _keys(value):
    if isinstance(value, dict):
        inner = (_keys(item) for key, item in value.items() if key not in FREE)
        return set(value).union(*inner)
    return set().union(*map(_keys, value)) if isinstance(value, list) else set()
