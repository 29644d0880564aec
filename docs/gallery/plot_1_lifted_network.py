r"""
The lifted network
==================

A feed-forward network computes its layers one after the other. In a *lifted* network all activations are unknowns of an
optimisation problem, and an energy measures how well they fit together. Two terms couple neighbouring layers. The regression
term is small if the layer below predicts the layer above, :math:`z_{k+1} \approx W_k z_k + b_k`. The reconstruction term is
small if the layer above reconstructs the layer below with the same weights, :math:`W_k^\top z_{k+1} \approx z_k + c_k`. One may
think of two springs. The prediction is the top layer of the activations that minimise the energy.
"""

import matplotlib.pyplot as plt
import torch
from matplotlib.patches import FancyArrowPatch

from lrrn import LRRNClassifier, datasets

X, y = datasets.load("digits", "train")
X_test, y_test = datasets.load("digits", "test")
clf = LRRNClassifier(hidden_sizes=(16, 12), epochs=20, random_state=0).fit(X, y)
net = clf.network_

# %%
# Here are the layers of a trained network on one digit: the 64 pixels, two hidden layers of 16 and 12 units, and ten scores.
# Arrows up are regressions, arrows down reconstructions; the output layer only regresses (:math:`\beta_2 = 0`).

x = torch.tensor(X_test[:1], dtype=torch.float64)
solution = net.infer(x)
layers = [x[0].numpy(), *(z[0].numpy() for z in solution.activations)]

figure, axis = plt.subplots(figsize=(9, 5))
for height, values in enumerate(layers):
    scale = max(abs(values).max(), 1e-9)
    places = [(i - (len(values) - 1) / 2) * (7 / max(len(values), 12)) for i in range(len(values))]
    axis.scatter(
        places, [height] * len(values), c=values / scale, cmap="RdBu_r", vmin=-1, vmax=1, s=90, edgecolors="0.4", zorder=3
    )
names = ["$z_0 = x$", "$z_1$", "$z_2$", "$z_3$: scores"]
for height, label in enumerate(names):
    axis.text(-4.6, height, label, va="center", fontsize=12)
for k, beta in enumerate(net.beta):
    axis.add_patch(FancyArrowPatch((-0.3, k + 0.12), (-0.3, k + 0.88), arrowstyle="-|>", mutation_scale=18, color="tab:blue"))
    axis.text(-0.45, k + 0.5, f"$W_{k} z_{k} + b_{k}$", ha="right", va="center", color="tab:blue")
    if beta > 0:
        down = FancyArrowPatch((0.3, k + 0.88), (0.3, k + 0.12), arrowstyle="-|>", mutation_scale=18, color="tab:red")
        axis.add_patch(down)
        axis.text(0.45, k + 0.5, f"$W_{k}^\\top z_{k + 1} - c_{k}$", ha="left", va="center", color="tab:red")
axis.set(xlim=(-5, 4.5), ylim=(-0.4, 3.4))
axis.set_axis_off()
plt.show()

# %%
# The two terms of every layer at the minimum add up to the energy of the input. The regression term of the output is zero,
# since the output has no constraint and no reconstruction term. The other terms balance each other.

terms = []
below = x
for k, above in enumerate(solution.activations):
    W, b, c = (parameters[k].detach().double() for parameters in (net.W, net.b, net.c))
    regression, reconstruction = above - below @ W.mT - b, above @ W - below - c
    weight = net.gamma**k / 2
    terms.append((f"layer {k}\nregresses", weight * float(regression.square().sum()), "tab:blue"))
    terms.append((f"layer {k}\nreconstructs", weight * net.beta[k] * float(reconstruction.square().sum()), "tab:red"))
    below = above

figure, axis = plt.subplots(figsize=(7, 3))
axis.bar([t[0] for t in terms], [t[1] for t in terms], color=[t[2] for t in terms])
axis.set_ylabel("share of the energy")
axis.set_title(f"energy {sum(t[1] for t in terms):.3f}, the same as {float(solution.energy):.3f} from the library")
figure.tight_layout()
plt.show()

# %%
# The balance of the two terms bounds the Lipschitz constant: activations that follow the layer below too strongly would
# reconstruct it badly. :doc:`/theory/lipschitz` has the proof.
