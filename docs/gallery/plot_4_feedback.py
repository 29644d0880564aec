"""
Feedback: clamping a label
==========================

In a lifted network later layers influence earlier ones. Clamp the output to a label, minimise over the other layers again, and
compare the energies: the difference is the energy gap. Contrastive learning minimises it for the correct label.
"""

import matplotlib.pyplot as plt
import numpy as np
import torch

from lrrn import LRRN, LRRNClassifier, datasets

X, y = datasets.load("digits", "train")
X_test, y_test = datasets.load("digits", "test")
# the contrastive loss for the labels, and a free-energy term for the images, so that the network reconstructs them
settings = {"objective": "semi_supervised", "free_energy_weight": 0.1, "self_training": 0.0}
clf = LRRNClassifier(hidden_sizes=(48, 32), gamma=1.0, epochs=30, random_state=0, **settings).fit(X, y)
net = clf.network_
print(f"accuracy {clf.score(X_test, y_test):.3f}")

# %%
# Take the test digit with the smallest margin, the one the network is least certain of, and clamp it to each label in turn. The
# clamped output changes the layers below, and with them the reconstruction from the first layer: a little, since the input is
# fixed. The changes are drawn below, red where a label adds ink and blue where it removes some.

scores = np.sort(clf.decision_function(X_test), axis=1)
doubtful = int(np.argmin(scores[:, -1] - scores[:, -2]))
x = torch.tensor(X_test[[doubtful]], dtype=torch.float64)
free = net.infer(x)
labels = torch.eye(10, dtype=torch.float64)
clamped = net.infer(x.expand(10, -1), labels)
gaps = (clamped.energy - free.energy).numpy()


def drawn(z):
    return z @ net.W[0].detach().double() - net.c[0].detach().double()


figure, axes = plt.subplots(2, 11, figsize=(11, 2.7))
axes[0, 0].imshow(x.reshape(8, 8), cmap="Greys", vmin=0, vmax=1)
axes[0, 0].set_title("input", fontsize=9)
axes[1, 0].imshow(drawn(free.activations[0]).reshape(8, 8), cmap="Greys", vmin=0, vmax=1)
axes[1, 0].set_xlabel("free", fontsize=9)
change = drawn(clamped.activations[0]) - drawn(free.activations[0])
reach = float(change.abs().max())
for label in range(10):
    axes[0, label + 1].imshow(drawn(clamped.activations[0][[label]]).reshape(8, 8), cmap="Greys", vmin=0, vmax=1)
    axes[0, label + 1].set_title(f"as {label}", fontsize=9)
    axes[1, label + 1].imshow(change[label].reshape(8, 8), cmap="RdBu_r", vmin=-reach, vmax=reach)
for axis in axes.flat:
    axis.set(xticks=[], yticks=[])
figure.tight_layout()
plt.show()

# %%
# The energy gap of each label. Two labels have the smallest gaps, nearly equal: the network is undecided between them.

figure, axis = plt.subplots(figsize=(7, 3))
colours = ["tab:blue" if label == int(free.output.argmax()) else "0.6" for label in range(10)]
axis.bar(range(10), gaps, color=colours)
axis.set(xticks=range(10), xlabel="label the output is clamped to", ylabel="energy gap")
axis.set_title(f"predicted {int(free.output.argmax())}, truth {y_test[doubtful]}")
figure.tight_layout()
plt.show()

# %%
# The discount :math:`\gamma` sets the strength of feedback: layer :math:`k` is weighted by :math:`\gamma^k`. With the same
# weights and a smaller discount, a clamped label moves the first layer less. In the limit the network is feed-forward, and
# contrastive learning is back-propagation (:doc:`/theory/learning`).

discounts = [2.0**-k for k in range(11)]
moves = []
for gamma in discounts:
    other = LRRN(net.sizes, beta=net.beta, gamma=gamma, dtype=torch.float64)
    other.load_state_dict(net.state_dict())
    rest = other.infer(x.expand(10, -1), labels, tol=1e-9).activations[0] - other.infer(x, tol=1e-9).activations[0]
    moves.append(float(rest.norm(dim=-1).mean()))
figure, axis = plt.subplots(figsize=(6, 3.2))
axis.loglog(discounts, moves, "o-")
axis.set(xlabel=r"discount $\gamma$", ylabel="move of $z_1$ when a label\nis clamped, mean")
figure.tight_layout()
plt.show()
