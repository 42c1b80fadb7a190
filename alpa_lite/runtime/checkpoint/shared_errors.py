"""Report errors on some processes of a job in the same words on all of them.

A lost process breaks the connections of the others, and the errors that they see are not the cause: it is determined
here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from alpa_lite.runtime.checkpoint.untrusted import shown
from alpa_lite.runtime.job.consensus import everywhere
from alpa_lite.runtime.job.shutdown import processes, roll_call

_MOST_LETTERS = 1000


class ConsequenceError(OSError):
    """An error that follows from another one, possibly on another process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """The reason of an error with a checkpoint, without a full stop; and a sentence of advice."""

    reason: str
    advice: str


def agreed_trouble(problem: Exception | None) -> Trouble | None:
    """Return the error of any process, given that of this one; collective. None: there was none."""
    # Before the exchange of errors, in which a lost process would be awaited in vain.
    if problem is not None and (here := roll_call()) is not None and (lost := here.silent()):
        return Trouble(
            reason=f"there is no word from {processes(lost)} ({reason_of(problem)})",
            advice="Start the job again to go on from there.",
        )
    said = everywhere(None if problem is None else [reason_of(problem), isinstance(problem, ConsequenceError)])
    if not any(said):
        return None
    causes = [None if each is None or each[1] else str(each[0]) for each in said]
    # Consequences are reported only where nobody knows a cause.
    reason = in_words(causes if any(causes) else [each and str(each[0]) for each in said])
    return Trouble(reason=reason, advice="Look for space and for the right to write there.")


def reason_of(error: BaseException) -> str:
    """Return the innermost cause, in one line, without the description of all files that TensorStore adds."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = " ".join(str(error).partition("[tensorstore_spec")[0].split()) or type(error).__name__
    return shown(text, _MOST_LETTERS)


def in_words(reasons: Sequence[str | None]) -> str:
    """Return what each process reports, with their numbers unless all report the same."""
    if len({*reasons}) == 1:
        return reasons[0] or ""
    found: dict[str, list[int]] = {}
    for process, reason in enumerate(reasons):
        found.setdefault(reason or "", []).append(process)
    return "; ".join(f"{reason} ({processes(which)})" for reason, which in found.items() if reason)
