"""
Regress and reconstruct
=======================

The same weights encode an input and reconstruct it. An energy model trained on digits, without labels, shows both directions:
activations predicted from the input, and the reconstruction of the image from the activations.
"""

import matplotlib.pyplot as plt
import numpy as np
import torch

from lrrn import LRRNEnergyModel, datasets

X, _ = datasets.load("digits", "train")
X_test, y_test = datasets.load("digits", "test")
model = LRRNEnergyModel(hidden_sizes=(32, 16), epochs=40, random_state=0).fit(X)
net = model.network_

# %%
# The filters are the rows of :math:`W_0`. Units detect them in the input and reconstruct the input from them: red adds ink,
# blue removes it.

figure, axes = plt.subplots(2, 16, figsize=(10, 1.6))
for axis, filter_ in zip(axes.flat, net.W[0].detach().numpy(), strict=True):
    reach = abs(filter_).max()
    axis.imshow(filter_.reshape(8, 8), cmap="RdBu_r", vmin=-reach, vmax=reach)
    axis.set_axis_off()
plt.show()

# %%
# Digits, and their reconstructions from the first and the second layer: :math:`W_0^\top z_1 - c_0`, and the same from
# :math:`z_1 = W_1^\top z_2 - c_1`, clipped at zero. The deeper the layer, the coarser the reconstruction. The last three
# columns are mirrored digits, which are out of distribution: the model reconstructs them less well, and their energy is higher.

some = np.concatenate([X_test[:6], X_test[6:9].reshape(-1, 8, 8)[:, :, ::-1].reshape(-1, 64)])
x = torch.tensor(some, dtype=torch.float64)
solution = net.infer(x)
z1, z2 = solution.activations
W, c = [w.detach().double() for w in net.W], [b.detach().double() for b in net.c]
first = z1 @ W[0] - c[0]
second = (z2 @ W[1] - c[1]).clamp(min=0) @ W[0] - c[0]

figure, axes = plt.subplots(3, len(some), figsize=(10, 3.6))
for row, (images, label) in enumerate([(x, "input"), (first, "from $z_1$"), (second, "from $z_2$")]):
    for column, image in enumerate(images):
        axes[row, column].imshow(image.reshape(8, 8), cmap="Greys", vmin=0, vmax=1)
        axes[row, column].set(xticks=[], yticks=[])
    axes[row, 0].set_ylabel(label)
for axis, energy in zip(axes[0], solution.energy, strict=True):
    axis.set_title(f"E = {energy:.2f}", fontsize=9)
figure.tight_layout()
plt.show()

# %%
# The other direction: the regression from the input against the activation at the minimum. On the line the two terms agree, as
# they nearly do after training. Units whose regression is negative are zero: the rectifier (ReLU).

predicted = x @ W[0].mT + net.b[0].detach().double()
figure, axis = plt.subplots(figsize=(4.5, 4))
axis.plot(predicted.flatten(), z1.flatten(), ".", alpha=0.4)
ends = [float(predicted.min()), float(predicted.max())]
axis.plot(ends, ends, color="0.6", linewidth=1)
axis.set(xlabel="$W_0 x + b_0$", ylabel="$z_1^*$", title="prediction and truce")
figure.tight_layout()
plt.show()
