"""Time an epoch of predictive coding with pcx. It runs in a separate Python environment, so it imports nothing of this library.

Arguments: samples, batch size, rounds, time budget of an epoch in seconds, then the widths. Prints one line of JSON.
"""

from __future__ import annotations

import json
import sys
import time
from itertools import pairwise
from typing import Any

import jax
import numpy as np
import optax
import pcx
import pcx.functional as pxf
import pcx.nn as pxnn
import pcx.predictive_coding as pxc
import pcx.utils as pxu

STEPS = 8
"""Number of inference steps per batch."""


class Network(pxc.EnergyModule):  # type: ignore[misc]
    """Layers with a node after each; the last node holds the target."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        self.layers = [pxnn.Linear(below, above) for below, above in pairwise(sizes)]
        self.vodes = [pxc.Vode() for _ in sizes[1:]]
        self.vodes[-1].h.frozen = True

    def __call__(self, x: Any, y: Any) -> Any:
        """Pass one sample through the nodes."""
        for layer, vode in zip(self.layers[:-1], self.vodes[:-1], strict=True):
            x = vode(jax.nn.relu(layer(x)))
        self.vodes[-1](self.layers[-1](x))
        if y is not None:
            self.vodes[-1].set("h", y)
        return self.vodes[-1].get("u")


PER_SAMPLE = pxu.M(pxc.VodeParam | pxc.VodeParam.Cache).to((None, 0))


@pxf.vmap(PER_SAMPLE, in_axes=(0, 0), out_axes=0)  # type: ignore[untyped-decorator]
def forward(x: Any, y: Any, *, model: Network) -> Any:
    """Set every node to the prediction of the layer below."""
    return model(x, y)


@pxf.vmap(PER_SAMPLE, in_axes=(0,), out_axes=(None, 0), axis_name="batch")  # type: ignore[untyped-decorator]
def energy(x: Any, *, model: Network) -> Any:
    """Return the mean energy of the batch."""
    y = model(x, None)
    return jax.lax.pmean(model.energy().sum(), "batch"), y


@pxf.jit()  # type: ignore[untyped-decorator]
def step(x: Any, y: Any, *, model: Network, weights: Any, nodes: Any) -> None:
    """Infer the hidden nodes with the output clamped, then update the weights once."""
    model.train()
    with pxu.step(model, pxc.STATUS.INIT, clear_params=pxc.VodeParam.Cache):
        forward(x, y, model=model)
    inference = pxf.value_and_grad(pxu.M_hasnot(pxc.VodeParam, frozen=True).to([False, True]), has_aux=True)(energy)
    for _ in range(STEPS):
        with pxu.step(model, clear_params=pxc.VodeParam.Cache):
            _, slope = inference(x, model=model)
        nodes.step(model, slope["model"])
    with pxu.step(model, clear_params=pxc.VodeParam.Cache):
        _, slope = pxf.value_and_grad(pxu.M(pxnn.LayerParam).to([False, True]), has_aux=True)(energy)(x, model=model)
    weights.step(model, slope["model"])


def main(samples: int, batch: int, rounds: int, budget: float, sizes: list[int]) -> dict[str, Any]:
    """Time epochs, on fewer samples if the budget requires it."""
    generator = np.random.default_rng(0)
    pcx.RKG.seed(0)
    x = generator.random((samples, sizes[0]), np.float32) * (generator.random((samples, sizes[0])) < 0.2)
    y = np.eye(sizes[-1], dtype=np.float32)[generator.integers(0, sizes[-1], samples)]
    model = Network(sizes)
    with pxu.step(model, pxc.STATUS.INIT, clear_params=pxc.VodeParam.Cache):
        forward(x[:batch], y[:batch], model=model)
        nodes = pxu.Optim(lambda: optax.sgd(0.1 * batch), pxu.M_hasnot(pxc.VodeParam, frozen=True)(model))
        weights = pxu.Optim(lambda: optax.adam(1e-3), pxu.M(pxnn.LayerParam)(model))

    def epoch(n: int) -> float:
        order = generator.permutation(n)
        start = time.perf_counter()
        for rows in order[: n // batch * batch].reshape(-1, batch):
            step(x[rows], y[rows], model=model, weights=weights, nodes=nodes)
        jax.block_until_ready([layer.nn.weight.get() for layer in model.layers])
        return time.perf_counter() - start

    some = min(samples, 20 * batch)
    epoch(some)
    affordable = int(budget / epoch(some) * some) // batch * batch
    n = samples if affordable >= samples else max(affordable, batch)
    return {"seconds": [epoch(n) for _ in range(rounds)], "samples": n}


if __name__ == "__main__":
    given = sys.argv[1:]
    print(json.dumps(main(int(given[0]), int(given[1]), int(given[2]), float(given[3]), [int(size) for size in given[4:]])))
