"""What went wrong on some processes of a job, in the same words on all of them.

A process that is lost breaks the connections of the others, and what they see of it is not the cause: it is looked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from alpa_lite.runtime.checkpoint.untrusted import shown
from alpa_lite.runtime.job.consensus import everywhere
from alpa_lite.runtime.job.shutdown import processes, roll

_MOST_LETTERS = 1000


class ConsequenceError(OSError):
    """What went wrong because something else did, on another process maybe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """What went wrong with a checkpoint, without a full stop; and a sentence on what to do."""

    reason: str
    advice: str


def agreed_trouble(problem: Exception | None) -> Trouble | None:
    """What went wrong on any process, of what did on this one; all call it. None: nothing did."""
    if problem is not None and (here := roll()) is not None and (lost := here.silent()):
        return Trouble(
            reason=f"there is no word from {processes(lost)} ({reason_of(problem)})",
            advice="Start the job again to go on from there.",
        )
    said = everywhere(None if problem is None else [reason_of(problem), isinstance(problem, ConsequenceError)])
    if not any(said):
        return None
    causes = [None if each is None or each[1] else str(each[0]) for each in said]
    reason = in_words(causes if any(causes) else [each and str(each[0]) for each in said])
    return Trouble(reason=reason, advice="Look for space and for the right to write there.")


def reason_of(error: BaseException) -> str:
    """The innermost cause, in one line, without the description of all files that TensorStore adds."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = " ".join(str(error).partition("[tensorstore_spec")[0].split()) or type(error).__name__
    return shown(text, _MOST_LETTERS)


def in_words(reasons: Sequence[str | None]) -> str:
    """What each process says; which one, where they do not say the same."""
    if len({*reasons}) == 1:
        return reasons[0] or ""
    found: dict[str, list[int]] = {}
    for process, reason in enumerate(reasons):
        found.setdefault(reason or "", []).append(process)
    return "; ".join(f"{reason} ({processes(which)})" for reason, which in found.items() if reason)
