"""Constants of stopping criteria and memory layout, shared by kernels and their callers."""

INSIDE = 0.9
"""Fraction of a threshold at which compiled steps stop, so that the residual recomputed by the loop is below it too."""
ACCEPTED = 3.0
"""A residual within this factor of the target is accepted if it is within the tolerance: rounding may prevent a smaller one."""
LANES = 16
"""Samples that the kernel processes in SIMD lanes: one vector of float32, two of float64."""
SINGLE_ROUNDS, GAIN = 2, 1e-5
"""Rounds of sweeps that a float64 problem spends on corrections in float32, and the largest residual reduction per round."""
SMALLEST = 1e-18
"""A Hessian fits into float32, with room for products, if its diagonal lies between this and its inverse."""
