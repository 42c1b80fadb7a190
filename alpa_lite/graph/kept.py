"""Answers that are kept on what they are about, for as long as it lives."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

Subject = TypeVar("Subject")
Rest = ParamSpec("Rest")
Answer = TypeVar("Answer")


def kept(
    function: Callable[Concatenate[Subject, Rest], Answer],
) -> Callable[Concatenate[Subject, Rest], Answer]:
    """Ask only once for equal further arguments, which must be hashable.

    The answers stand in the `__dict__` of the first argument, which must never change. A table of the function's own
    would keep every graph alive that was ever asked about, or, if it is bounded, forget those of a large step while
    they are needed.
    """
    name = f"_kept_{function.__module__}.{function.__qualname__}"

    @wraps(function)
    def answer(subject: Subject, *rest: Rest.args, **options: Rest.kwargs) -> Answer:
        known: dict[Any, Answer] = subject.__dict__.setdefault(name, {})
        key = (rest, *options.items()) if options else rest
        if key not in known:
            known[key] = function(subject, *rest, **options)
        return known[key]

    return answer
