"""
The energy is a distance
========================

Twice the minimum of the energy is the squared distance of an affine image of the input from a convex set
(:doc:`/theory/energies`). So sublevel sets of the energy, the regions of inliers, are convex, and the square root of the energy
is Lipschitz in the input. In two dimensions this can be drawn.
"""

import matplotlib.pyplot as plt
import numpy as np

from lrrn import LRRNEnergyModel
from lrrn.certificates.energies import energy_constant

rng = np.random.default_rng(0)
angle = rng.uniform(0.2, 1.2, 300)
X = np.c_[np.cos(angle), np.sin(angle)] * rng.uniform(0.3, 2.0, (300, 1)) + rng.normal(0, 0.05, (300, 2))
model = LRRNEnergyModel(hidden_sizes=(8, 4), epochs=80, contamination=0.05, random_state=0).fit(X)

# %%
# Training data in a sector, the square root of twice the energy around them, and the threshold between inliers and outliers.

across, up = np.meshgrid(np.linspace(-1.5, 2.8, 160), np.linspace(-1.5, 2.8, 160))
grid = np.c_[across.ravel(), up.ravel()]
root = np.sqrt(2 * model.energy(grid)).reshape(across.shape)
figure, axis = plt.subplots(figsize=(6, 5))
filled = axis.contourf(across, up, root, levels=24, cmap="viridis_r")
axis.contour(across, up, root, levels=[np.sqrt(-2 * model.offset_)], colors="tab:red")
axis.plot(X[:, 0], X[:, 1], "k.", markersize=2)
axis.set(aspect="equal", title=r"$\sqrt{2 E}$; the red line is the threshold")
figure.colorbar(filled)
plt.show()

# %%
# Along any line :math:`\sqrt{2 E}` has a slope of at most :math:`K = \sqrt{\lVert W_0 \rVert^2 + \beta_0}`. So outlier
# decisions can be certified: a sample whose root energy is well above the threshold needs a large perturbation to get below it.

walk = np.linspace(-3, 3, 400)
line = np.outer(walk, [0.3, -0.95]) + X.mean(axis=0)
along = np.sqrt(2 * model.energy(line))
K = energy_constant(model.network_)
print(f"steepest slope {np.abs(np.diff(along) / np.diff(walk)).max() / np.hypot(0.3, 0.95):.3f}, proven bound K = {K:.3f}")

figure, axis = plt.subplots(figsize=(7, 3))
axis.plot(walk, along, label=r"$\sqrt{2 E}$ along a line")
axis.fill_between(walk, along - 0.3 * K, along + 0.3 * K, alpha=0.2, label="whatever a perturbation of 0.3 does")
axis.axhline(np.sqrt(-2 * model.offset_), color="tab:red", linewidth=1, label="threshold")
axis.set(xlabel="position on the line", ylim=(0, None))
axis.legend()
figure.tight_layout()
plt.show()
