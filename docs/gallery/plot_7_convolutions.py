r"""
Convolutions
============

The weights of a layer may be a convolution :math:`A`. Regression is then a convolution of the image, and reconstruction the
transposed convolution of the activations: kernels are pasted into the image, each with the strength of its unit.
"""

import matplotlib.pyplot as plt
import torch

from lrrn import Conv, LRRNEnergyModel, datasets

X, _ = datasets.load("digits", "train")
X_test, _ = datasets.load("digits", "test")
model = LRRNEnergyModel(hidden_sizes=(Conv(12, kernel=4, stride=2),), image_shape=(1, 8, 8), epochs=20, random_state=0).fit(X)
net = model.network_

# %%
# The kernels, learned without labels: edges and strokes of several directions. Each unit sees 4 x 4 pixels and is at least zero.

kernels = net.W[0].detach()[:, 0]
figure, axes = plt.subplots(2, 6, figsize=(9, 3.2))
for axis, kernel in zip(axes.flat, kernels, strict=True):
    size = float(kernel.abs().max())
    axis.imshow(kernel, cmap="RdBu_r", vmin=-size, vmax=size)
    axis.axis("off")
figure.suptitle("kernels")
plt.show()

# %%
# Digits, and what the activations reconstruct of them, :math:`A^\top z_1 - c_0`. The energy is half the squared difference of
# the two, plus that of the activations and their regression: low for digits, high for images that no kernels make up.

noise = torch.rand(3, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
x = torch.cat([torch.tensor(X_test[:5], dtype=torch.float64), noise])
solution = net.infer(x)
back = net.energy_snapshot(torch.float64).reconstruct(solution.activations[0], 1)
figure, axes = plt.subplots(2, 8, figsize=(10, 3))
for column in range(8):
    for row, image in enumerate((x[column], back[column])):
        axes[row, column].imshow(image.reshape(8, 8), cmap="gray_r", vmin=0, vmax=1)
        axes[row, column].axis("off")
    axes[0, column].set_title(f"energy {float(solution.energy[column]):.2f}", fontsize=9)
plt.show()
