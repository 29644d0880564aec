r"""
The energy of one unit
======================

The smallest lifted network has one input :math:`x`, one unit :math:`z \ge 0` and one weight :math:`w`. Its energy is
:math:`\frac{1}{2} (z - w x)^2 + \frac{\beta}{2} (w z - x)^2`. It shows the main properties of an LRRN.
"""

import matplotlib.pyplot as plt
import numpy as np
import torch

import lrrn


def unit(w, beta):
    """A network of one layer and one nonnegative unit, without biases."""
    net = lrrn.LRRN(
        (1, 1), beta=(beta,), output_constraint="nonneg", bias=False, reconstruction_bias=False, dtype=torch.float64
    )
    with torch.no_grad():
        net.W[0].fill_(w)
    return net


# %%
# For every input the energy is a parabola in :math:`z`, restricted to :math:`z \ge 0`. If its vertex lies at :math:`z > 0` the
# unit is active; otherwise it is zero. The minimiser, in red, is piecewise linear with a kink: a rectifier (ReLU).

w, beta = 1.5, 1.0
net = unit(w, beta)
x, z = np.meshgrid(np.linspace(-2, 2, 201), np.linspace(-0.5, 2.5, 151))
energy = 0.5 * (z - w * x) ** 2 + 0.5 * beta * (w * z - x) ** 2
inputs = torch.linspace(-2, 2, 81, dtype=torch.float64)[:, None]
best = net.infer(inputs).output

figure, axis = plt.subplots(figsize=(7, 4))
filled = axis.contourf(x, z, np.sqrt(energy), levels=20, cmap="Greys")
axis.fill_between([-2, 2], -0.5, 0, color="white", alpha=0.8, hatch="//", edgecolor="0.7", linewidth=0)
axis.plot(inputs, best, color="tab:red", linewidth=2.5, label="$z^*(x)$")
axis.set(xlabel="$x$", ylabel="$z$", title=r"$\sqrt{E(z; x)}$, and where it is least for each $x$")
axis.legend(loc="upper left")
figure.colorbar(filled)
plt.show()

# %%
# The minimum of the energy is an out-of-distribution score. With :math:`w = 1` an input :math:`x \ge 0` is reconstructed
# perfectly and has energy zero. A nonnegative unit cannot reconstruct negative inputs, and their energy grows.

figure, axis = plt.subplots(figsize=(7, 3))
for w in (0.5, 1.0, 1.5):
    axis.plot(inputs, unit(w, 1.0).infer(inputs).energy, label=f"$w = {w}$")
axis.set(xlabel="$x$", ylabel="least energy", title=r"$\min_z E(z; x)$, $\beta = 1$")
axis.legend()
figure.tight_layout()
plt.show()

# %%
# The slope of the active branch is :math:`f(w) = (1 + \beta) w / (1 + \beta w^2)`. However large the weight, it does not exceed
# :math:`(\sqrt{\beta} + 1/\sqrt{\beta}) / 2`: with :math:`\beta = 1` no unit ever amplifies, with :math:`\beta = 0` the slope
# is the weight itself. Dots are slopes of computed predictions, lines the formula.

weights = np.linspace(0, 4, 200)
figure, axis = plt.subplots(figsize=(7, 3.5))
for beta, colour in ((0.0, "0.5"), (0.25, "tab:orange"), (1.0, "tab:blue"), (4.0, "tab:green")):
    axis.plot(weights, (1 + beta) * weights / (1 + beta * weights**2), color=colour, label=rf"$\beta = {beta:g}$")
    for w in (0.25, 0.5, 1.0, 2.0, 3.0):
        ends = unit(w, beta).infer(torch.tensor([[1.0], [2.0]], dtype=torch.float64)).output
        axis.plot(w, float(ends[1] - ends[0]), "o", color=colour)
axis.set(xlabel="weight $w$", ylabel="slope of $z^*(x)$", ylim=(0, 2.2))
axis.legend()
figure.tight_layout()
plt.show()
