"""The exceptions of alpa_lite, in one tree.

::

    AlpaLiteError
    ├── TraceError            the function or its arguments cannot be traced
    │   ├── BatchError        no batch dimension, or one that micro-batches do not divide
    │   └── NonAdditiveError  a batch reduction feeds back into per-sample work
    ├── PlanError             no plan can be made, or a plan does not belong to what it is used on
    │   ├── InfeasibleError   nothing fits into memory
    │   └── MismatchError     a plan made for another function, shape or cluster
    ├── ProblemFileError      a file that holds no intra-op problem
    ├── ServingProblemError   a serving problem whose parts do not fit, or a file that holds none
    ├── FigureError           a figure cannot be drawn
    ├── RuleError             a sharding rule does not fit its op, or is registered twice
    ├── VerificationError     an internal invariant does not hold: a defect in alpa_lite
    ├── ExecutionError        the devices at hand cannot run the plan
    │   └── HangError         a step does not end
    ├── CheckError            a step by its plan does not give what jax.jit gives
    ├── CheckpointError       a state cannot be saved or restored
    └── cost_models.checks.CostModelError
        └── ClusterError      a description of hardware that cannot be used
"""

from typing import Any, TypeVar

from cost_models.checks import AlpaLiteError as AlpaLiteError

Kept = TypeVar("Kept", bound=Exception)


def without_frames(problem: Kept) -> Kept:
    """Return an exception that is to be stored, with its traceback removed, and those of its causes.

    The frames of a traceback keep their local variables alive. One of these is usually the exception itself, so that
    only the cyclic garbage collector could ever free them.
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
    """No assignment fits into the memory of the devices, or no workers serve a workflow as it was asked."""


class MismatchError(PlanError):
    """A plan that was made for another function, other shapes or another cluster."""


class ProblemFileError(AlpaLiteError, ValueError):
    """A file that cannot be read as an intra-op problem."""


class ServingProblemError(AlpaLiteError, ValueError):
    """A serving problem whose parts do not fit together, or a file that cannot be read as one."""


class FigureError(AlpaLiteError, RuntimeError):
    """A figure cannot be drawn, because matplotlib is not installed."""


class RuleError(AlpaLiteError, ValueError):
    """A sharding rule does not fit its op, or is the second one registered for a primitive."""


class VerificationError(AlpaLiteError, AssertionError):
    """An internal invariant does not hold. This is a defect of alpa_lite, please report it."""


class ExecutionError(AlpaLiteError, RuntimeError):
    """The devices at hand cannot run the plan."""


class HangError(ExecutionError):
    """A step makes no progress within the time limit; the message names the instruction that it waits for."""


class CheckError(AlpaLiteError, ArithmeticError):
    """The results of a parallel step differ from those of `jax.jit`.

    `report` is the comparison of the outputs, leaf by leaf (a `CheckReport`); None if their tree structures differ.
    """

    def __init__(self, message: str = "", report: Any = None) -> None:
        """Store the message and the report."""
        super().__init__(message)
        self.report = report


class CheckpointError(AlpaLiteError, RuntimeError):
    """A state cannot be saved, or a checkpoint cannot be restored."""


class UnusableFileWarning(UserWarning):
    """A file or checkpoint was skipped, because it cannot be used."""
