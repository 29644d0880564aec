"""Constants of stopping and of layout that kernels and the code around them share."""

INSIDE = 0.9
"""Share of a threshold that compiled steps go to, so that the residual as recomputed by the loop agrees."""
ACCEPTED = 3.0
"""A residual within this factor of the aim will do, if it is within the tolerance: rounding may not allow more."""
LANES = 16
"""Samples the kernel works on side by side: one vector of float32, two of float64."""
SINGLE_ROUNDS, GAIN = 2, 1e-5
"""Rounds of sweeps that a float64 problem spends on corrections in float32, and the largest residual reduction per round."""
SMALLEST = 1e-18
"""Float32 holds a Hessian whose diagonal lies between this and its inverse, with room for products."""
