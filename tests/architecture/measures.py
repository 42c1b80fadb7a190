"""Measure the structure of the packages: `python -m tests.architecture.measures` prints the table.

Imports count wherever they stand, inside functions too; those under `TYPE_CHECKING` never run and do not.
"""

from __future__ import annotations

import ast
import io
import statistics
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[2]
PACKAGES = ("alpa_lite", "cost_models")


@dataclass(frozen=True, kw_only=True)
class Module:
    """One source file.

    Attributes:
        name: dotted; that of the package for an ``__init__`` file.
        imports: modules of the packages that it imports from.
    """

    name: str
    path: Path
    tree: ast.Module
    text: str
    imports: frozenset[str]

    @property
    def num_lines(self) -> int:
        """Lines of the file, blank ones included."""
        return len(self.text.splitlines())

    @property
    def is_package(self) -> bool:
        """Whether it is an ``__init__`` file."""
        return self.path.name == "__init__.py"

    @property
    def classes(self) -> Iterator[ast.ClassDef]:
        """All class definitions."""
        return (node for node in ast.walk(self.tree) if isinstance(node, ast.ClassDef))

    @property
    def functions(self) -> Iterator[ast.FunctionDef]:
        """All function definitions."""
        return (node for node in ast.walk(self.tree) if isinstance(node, ast.FunctionDef))

    @cached_property
    def tokens(self) -> list[tokenize.TokenInfo]:
        """All tokens of the file."""
        return list(tokenize.generate_tokens(io.StringIO(self.text).readline))


@dataclass(frozen=True)
class Structure:
    """All modules of the packages, by name."""

    modules: dict[str, Module]

    @cached_property
    def readers(self) -> dict[str, set[str]]:
        """The modules that import each module."""
        found: dict[str, set[str]] = defaultdict(set)
        for module in self.modules.values():
            for name in module.imports:
                found[name].add(module.name)
        return found

    @cached_property
    def files(self) -> list[Module]:
        """The modules that are no ``__init__`` files."""
        return [module for module in self.modules.values() if not module.is_package]

    @cached_property
    def read_by_one_neighbour(self) -> list[Module]:
        """Modules with one reader, which lies in their own folder."""

        def alone(module: Module) -> bool:
            readers = self.readers[module.name]
            return len(readers) == 1 and all(_folder(reader) == _folder(module.name) for reader in readers)

        return [module for module in self.files if alone(module)]

    @cached_property
    def loose(self) -> list[Module]:
        """Modules at the top of `alpa_lite` that are in no room."""
        return [module for module in self.files if _folder(module.name) == "alpa_lite"]

    def types_of_several_meanings(self) -> dict[str, list[str]]:
        """Public names of classes that are defined more than once, with their modules."""
        found: dict[str, list[str]] = defaultdict(list)
        for module in self.modules.values():
            for node in module.classes:
                if not node.name.startswith("_"):
                    found[node.name].append(module.name)
        return {name: places for name, places in found.items() if len(places) > 1}

    def stems_of_several_modules(self) -> dict[str, list[str]]:
        """Names of files that occur more than once, with their modules."""
        found: dict[str, list[str]] = defaultdict(list)
        for module in self.files:
            if not module.path.stem.startswith("__"):
                found[module.path.stem].append(module.name)
        return {stem: places for stem, places in found.items() if len(places) > 1}

    def longest_chain(self) -> list[str]:
        """The longest list of modules that import one another in a row; raises `RecursionError` for a cycle."""
        longest: dict[str, list[str]] = {}

        def chain(name: str) -> list[str]:
            if name not in longest:
                longest[name] = [name, *max(map(chain, self.modules[name].imports), key=len, default=[])]
            return longest[name]

        return max(map(chain, self.modules), key=len)

    def wide_functions(self, most: int = 5) -> list[str]:
        """Private functions, and methods of private classes, with more parameters than ``most``."""
        return [
            f"{module.name}.{node.name}"
            for module in self.modules.values()
            for node in module.functions
            if _num_parameters(node) > most
        ]

    def wide_dataclasses(self, most: int = 12) -> list[str]:
        """Dataclasses with more fields than ``most``."""
        return [
            f"{module.name}.{node.name}"
            for module in self.modules.values()
            for node in module.classes
            if any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)
            and sum(isinstance(child, ast.AnnAssign) for child in node.body) > most
        ]

    def num_any(self) -> int:
        """How often `Any` stands in the code."""
        return sum(t.type == tokenize.NAME and t.string == "Any" for m in self.modules.values() for t in m.tokens)

    def share_of_comments(self) -> float:
        """Lines with a comment, as a share of lines with code; directives to checkers do not count."""
        comments, code = 0, 0
        for module in self.modules.values():
            skipped = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
            code += len({t.start[0] for t in module.tokens if t.type not in skipped})
            comments += sum(
                t.type == tokenize.COMMENT and not t.string.startswith(("# pyright", "# ruff", "# type"))
                for t in module.tokens
            )
        return comments / code


def structure() -> Structure:
    """Read all modules of the packages."""
    paths = {path for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    names = {_dotted(path): path for path in sorted(paths)}
    return Structure({name: _read(name, path, names) for name, path in names.items()})


def _dotted(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _folder(name: str) -> str:
    return name.rpartition(".")[0]


def _read(name: str, path: Path, names: dict[str, Path]) -> Module:
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    imports = frozenset(target for target in _imported(tree, names) if target != name)
    return Module(name=name, path=path, tree=tree, text=text, imports=imports)


def _imported(tree: ast.Module, names: dict[str, Path]) -> Iterator[str]:
    typing_only = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for child in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in names)
        elif isinstance(node, ast.ImportFrom) and node.module in names:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in names else node.module


def _num_parameters(node: ast.FunctionDef) -> int:
    arguments = node.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return len([argument for argument in named if argument.arg not in ("self", "cls")])


def table() -> Table:
    """The measures, one row each."""
    found = structure()
    lines = [module.num_lines for module in found.files]
    chain = found.longest_chain()
    rows = {
        "modules / lines": f"{len(found.modules)} / {sum(m.num_lines for m in found.modules.values()):,}",
        "median lines of a module, longest": f"{statistics.median(lines):.0f}, {max(lines)}",
        "modules above 400 lines": str(sum(number > 400 for number in lines)),
        "loose modules at the top of the package": ", ".join(sorted(module.path.stem for module in found.loose)),
        "longest chain of imports": str(len(chain)),
        "modules that one neighbour reads": f"{len(found.read_by_one_neighbour) / len(found.files):.0%}",
        "dataclasses with more than 12 fields": str(len(found.wide_dataclasses())),
        "functions with more than 5 parameters": str(len(found.wide_functions())),
        "functions with more than 6 parameters": str(len(found.wide_functions(6))),
        "`Any`": str(found.num_any()),
        "comments, share of lines of code": f"{found.share_of_comments():.1%}",
        "public types with several meanings": str(len(found.types_of_several_meanings())),
        "file names that occur twice": ", ".join(found.stems_of_several_modules()),
    }
    shown = Table("measure", "now")
    for measure, now in rows.items():
        shown.add_row(measure, now)
    return shown


if __name__ == "__main__":
    Console(width=120).print(table())
    for place in structure().longest_chain():
        print(place)
