"""Solvers for :class:`~lrrn.qp.BoxQP`: one module per algorithm, all driven by the loop in ``loop.py``."""

from lrrn.solvers.accelerated import Accelerated
from lrrn.solvers.base import SOLVERS, Solver, Stepper, register
from lrrn.solvers.coordinate_descent import CoordinateDescent
from lrrn.solvers.loop import solve, solve_fixed
from lrrn.solvers.newton import Newton
from lrrn.solvers.reference import Reference

for _solver in (Reference(), CoordinateDescent(), Accelerated(), Newton()):
    register(_solver)

__all__ = ["SOLVERS", "Solver", "Stepper", "register", "solve", "solve_fixed"]
