"""Box-constrained QPs and their solutions: the interface between energies and solvers."""

from lrrn.qp.box_qp import DEFAULT_TOL, BoxQP, QPSolution, RoundingCoefficients, Status, kkt_residual, row_norms

__all__ = ["DEFAULT_TOL", "BoxQP", "QPSolution", "RoundingCoefficients", "Status", "kkt_residual", "row_norms"]
