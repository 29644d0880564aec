"""Draw the figure of the README: labels, certified balls and an energy on two moons. Requires the extra `docs`."""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib
import numpy as np
import torch
from sklearn.datasets import make_moons

import lrrn
from lrrn.attacks import minimal_perturbation

matplotlib.use("Agg")
from matplotlib import pyplot as plt

REGIONS, POINTS = ["#dbe9f6", "#fde3cf"], ["#1f6fb4", "#d9660f"]
BOX = (-1.8, 2.8, -1.35, 1.85)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("docs/images/overview.png"))
    options = parser.parse_args()
    X, y = make_moons(300, noise=0.08, random_state=0)
    settings = {"hidden_sizes": (32, 32), "random_state": 0}
    classifier = lrrn.LRRNClassifier(objective="margin", gamma=1.0, epochs=60, **settings).fit(X, y)
    model = lrrn.LRRNEnergyModel(epochs=60, **settings).fit(X)
    across, up = np.meshgrid(np.linspace(*BOX[:2], 300), np.linspace(*BOX[2:], 210))
    grid = np.c_[across.ravel(), up.ravel()]
    labels = classifier.predict(grid).reshape(across.shape)
    root = np.sqrt(2 * model.energy(grid)).reshape(across.shape)

    figure, axes = plt.subplots(1, 3, figsize=(12, 3.1), layout="constrained")
    for axis in axes[:2]:
        axis.contourf(across, up, labels, levels=[-0.5, 0.5, 1.5], colors=REGIONS)
    axes[0].scatter(*X.T, c=[POINTS[k] for k in y], s=8)
    axes[0].set_title(
        f"a prediction: {classifier.score(X, y):.1%} right, Lipschitz constant $\\leq$ {classifier.lipschitz_:.2f}"
    )

    some = X[:45]
    radii = classifier.certified_radius(some, method="local")
    predicted = torch.tensor(classifier.predict(some))
    attack = minimal_perturbation(classifier.network_, torch.tensor(some), predicted)
    for place, radius, label in zip(some, radii, predicted, strict=True):
        axes[1].add_patch(plt.Circle(place, radius, color=POINTS[int(label)], alpha=0.35, linewidth=0))
    axes[1].plot(*some.T, "k.", markersize=3)
    axes[1].plot(*attack.x.T, "x", color="#c92a2a", markersize=4)
    share = float(np.median(radii / attack.distance.numpy()))
    axes[1].set_title(f"a proof: {share:.0%} of the way to the nearest attack ($\\times$)")

    filled = axes[2].contourf(across, up, root, levels=20, cmap="viridis_r")
    axes[2].plot(*X.T, "k.", markersize=2)
    axes[2].set_title("an energy: low for familiar inputs")
    figure.colorbar(filled, ax=axes[2])
    for axis in axes:
        axis.set(aspect="equal", xlim=BOX[:2], ylim=BOX[2:], xticks=[], yticks=[])
        axis.title.set_fontsize(10)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.output, dpi=100, metadata={"Software": None})
    print(f"median radius {np.median(radii):.3f}, {share:.1%} of the way to an attack; drawn to {options.output}")


if __name__ == "__main__":
    main()
