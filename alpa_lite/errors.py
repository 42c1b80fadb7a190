"""Exceptions of alpa_lite.

::

    AlpaLiteError
    ├── TraceError            the function or its arguments cannot be traced
    │   ├── BatchError        no batch dimension, or one that micro-batches do not divide
    │   └── NonAdditiveError  a batch reduction feeds back into per-sample work
    ├── PlanError             no plan can be made, or a plan does not belong to what it is used on
    │   ├── InfeasibleError   nothing fits into memory
    │   └── MismatchError     a plan made for another function, shape or cluster
    ├── ProblemFileError      a file that holds no intra-op problem
    ├── FigureError           a figure cannot be drawn
    ├── RuleError             a sharding rule does not fit its op, or is registered twice
    ├── VerificationError     an internal invariant does not hold: a defect in alpa_lite
    ├── ExecutionError        the devices at hand cannot run the plan
    │   └── HangError         a step does not end
    ├── CheckError            a step by its plan does not give what jax.jit gives
    └── CheckpointError       a state cannot be saved or restored
"""

from typing import Any, TypeVar

from cost_models.untrusted_text import message


class AlpaLiteError(Exception):
    """Base of everything that alpa_lite raises on purpose."""

    def __init__(self, *args: object) -> None:
        """Messages quote what was given: none fills more than a screen, or says anything to a terminal."""
        super().__init__(*(message(each) if isinstance(each, str) else each for each in args))


Kept = TypeVar("Kept", bound=Exception)


def without_frames(problem: Kept) -> Kept:
    """An exception to keep for later, with the frames that it passed forgotten.

    They hold all that was made on the way, and as one of them holds the exception, only the collector of cycles would
    ever let go of it.
    """
    chain: BaseException | None = problem
    while chain is not None:
        chain.__traceback__ = None
        chain = chain.__cause__ or chain.__context__
    return problem


class TraceError(AlpaLiteError, ValueError):
    """The function or its arguments cannot be traced."""


class BatchError(TraceError):
    """The batch dimension cannot be found, or micro-batches do not divide it."""


class NonAdditiveError(TraceError):
    """The step is not a sum over its samples, so micro-batches would change its meaning."""


class PlanError(AlpaLiteError, ValueError):
    """No plan can be made, or a plan does not belong to what it is used on."""


class InfeasibleError(PlanError):
    """No assignment fits into the memory of the devices."""


class MismatchError(PlanError):
    """A plan that was made for another function, other shapes or another cluster."""


class ProblemFileError(AlpaLiteError, ValueError):
    """A file that cannot be read as an intra-op problem."""


class FigureError(AlpaLiteError, RuntimeError):
    """A figure cannot be drawn, for want of matplotlib."""


class RuleError(AlpaLiteError, ValueError):
    """A sharding rule that does not fit the op it is asked about, or a second one for the same primitive."""


class VerificationError(AlpaLiteError, AssertionError):
    """An internal invariant does not hold. This is a defect of alpa_lite, please report it."""


class ExecutionError(AlpaLiteError, RuntimeError):
    """The devices at hand cannot run the plan."""


class HangError(ExecutionError):
    """Nothing of a step has ended for too long; the message names the instruction that it waits for."""


class CheckError(AlpaLiteError, ArithmeticError):
    """A step by its plan does not give what `jax.jit` gives.

    `report` is the comparison leaf by leaf (a `CheckReport`); None where the outputs do not have the same structure.
    """

    def __init__(self, message: str = "", report: Any = None) -> None:
        """See the class."""
        super().__init__(message)
        self.report = report


class CheckpointError(AlpaLiteError, RuntimeError):
    """A state cannot be saved, or a checkpoint cannot be restored."""


class UnusableFileWarning(UserWarning):
    """A file or checkpoint that cannot be used was passed over."""
