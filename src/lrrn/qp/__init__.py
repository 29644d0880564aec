"""The one problem type, a box-constrained QP, and its solution: where energies and solvers meet."""

from lrrn.qp.box_qp import DEFAULT_TOL, BoxQP, QPSolution, RoundingCoefficients, Status, kkt_residual, row_norms

__all__ = ["DEFAULT_TOL", "BoxQP", "QPSolution", "RoundingCoefficients", "Status", "kkt_residual", "row_norms"]
