"""Solvers of the intra-op problem. A new one is a file with one class and an entry in ``SOLVERS``."""

from alpa_lite.intra_op.solvers.auto import AutoSolver as AutoSolver
from alpa_lite.intra_op.solvers.brute_force import BruteForce as BruteForce
from alpa_lite.intra_op.solvers.elimination import Elimination as Elimination
from alpa_lite.intra_op.solvers.elimination import TooWide as TooWide
from alpa_lite.intra_op.solvers.integer_program import IntegerProgram as IntegerProgram
from alpa_lite.intra_op.solvers.solver import Solver as Solver

SOLVERS: tuple[Solver, ...] = (BruteForce(), Elimination(), IntegerProgram(), AutoSolver())
"""One of each, for the tests that all solvers share."""
