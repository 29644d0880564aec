"""
Certified balls
===============

In two dimensions a certificate can be drawn. Around every point there is a ball in which the label is proven not to change, so
no ball crosses the decision boundary. The closer the balls come to it, the tighter the certificate.
"""

import matplotlib.pyplot as plt
import numpy as np
import torch
from sklearn.datasets import make_moons

import lrrn
from lrrn.attacks import minimal_perturbation

X, y = make_moons(300, noise=0.08, random_state=0)
clf = lrrn.LRRNClassifier(hidden_sizes=(32, 32), objective="margin", gamma=1.0, epochs=60, random_state=0).fit(X, y)
net = clf.network_
print(f"accuracy {clf.score(X, y):.3f}, Lipschitz constant at most {clf.lipschitz_:.2f}")

# %%
# The same network and the same points, certified by the paper's formula, by the multiplier bound (a global Lipschitz bound with
# one multiplier per unit), and by the local radius (from the state of each unit at the sample). Crosses are the nearest
# adversarial examples that an attack has found: no ball can be larger than the distance to them.

points = torch.tensor(X[:40])
attack = minimal_perturbation(net, points, torch.tensor(clf.predict(X[:40])))
across, up = np.meshgrid(np.linspace(-1.8, 2.8, 220), np.linspace(-1.4, 1.9, 160))
labels = clf.predict(np.c_[across.ravel(), up.ravel()]).reshape(across.shape)

figure, axes = plt.subplots(1, 3, figsize=(12, 3.4), sharey=True)
for axis, method in zip(axes, ("paper", "multiplier", "local"), strict=True):
    radius = lrrn.certify(net, points, method).radius
    axis.contourf(across, up, labels, levels=[-0.5, 0.5, 1.5], colors=["#dbe9f6", "#fde3cf"])
    for (a, b), r, label in zip(X[:40], radius, y[:40], strict=True):
        axis.add_patch(plt.Circle((a, b), float(r), color="tab:blue" if label == 0 else "tab:orange", alpha=0.35, linewidth=0))
    axis.plot(X[:40, 0], X[:40, 1], "k.", markersize=3)
    axis.plot(attack.x[:, 0], attack.x[:, 1], "x", color="tab:red", markersize=4)
    axis.set(aspect="equal", xlim=(-1.8, 2.8), ylim=(-1.4, 1.9))
    share = float((radius / attack.distance).median())
    axis.set_title(f"{method}: {share:.0%} of the way to an attack", fontsize=10)
figure.tight_layout()
plt.show()

# %%
# The balls may overlap each other but never the other class. Their size depends on the trained function: a flatter one has
# larger balls, and the margin objective encourages it.

inside = lrrn.certify(net, points, "local").radius <= attack.distance
print(f"balls that an attack got inside of: {int((~inside).sum())} of {len(inside)}")
