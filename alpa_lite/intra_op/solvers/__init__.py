"""Solvers of the intra-op problem. A new solver is one module with one class and an entry in ``SOLVERS``."""

from alpa_lite.intra_op.solvers.brute_force import BruteForce as BruteForce
from alpa_lite.intra_op.solvers.elimination import Elimination as Elimination
from alpa_lite.intra_op.solvers.elimination import TooWide as TooWide
from alpa_lite.intra_op.solvers.highs import Highs as Highs
from alpa_lite.intra_op.solvers.integer_program import IntegerProgram as IntegerProgram
from alpa_lite.intra_op.solvers.portfolio import Portfolio as Portfolio
from alpa_lite.intra_op.solvers.rounds import Rounds as Rounds
from alpa_lite.intra_op.solvers.solver import Control as Control
from alpa_lite.intra_op.solvers.solver import SolveProgress as SolveProgress
from alpa_lite.intra_op.solvers.solver import Solver as Solver

# `Rounds` is missing, since it holds the options of a search that only the portfolio starts.
SOLVERS: tuple[Solver, ...] = (BruteForce(), Elimination(), IntegerProgram(), Highs(), Portfolio())
"""One instance of each solver, for the tests that all solvers share."""
