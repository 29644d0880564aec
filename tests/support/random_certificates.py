"""Networks whose certificates are put to the test, and a search for what would refute one."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

import lrrn
from oracles import random_input, random_network

CASES = st.fixed_dictionaries(
    dict(
        sizes=st.sampled_from([(5, 3), (5, 4, 3), (3, 6, 4), (5, 4, 6, 3), (4, 5, 4, 5, 3), (4, 3, 5, 4, 3, 3)]),
        last_beta=st.sampled_from([0.0, 0.5, 1.0]),
        beta=st.sampled_from([0.0, 0.4, 1.0, 3.0]),
        gamma=st.sampled_from([0.1, 1.0, 2.0]),
        scale=st.sampled_from([0.5, 1.0, 3.0]),
        constraint=st.sampled_from(["free", "nonneg", "box", (-0.3, 0.5)]),
        output=st.sampled_from(["free", "nonneg", (-0.6, 0.7)]),
        seed=st.integers(0, 10_000),
    )
)


def make(case) -> lrrn.LRRN:
    sizes = case["sizes"]
    return random_network(
        sizes,
        beta=(case["beta"],) * (len(sizes) - 2) + (case["last_beta"],),
        gamma=case["gamma"],
        scale=case["scale"],
        constraint=case["constraint"],
        output_constraint=case["output"],
        seed=case["seed"],
    )


def worst_within(net, x, label, radius):
    """Label after the strongest perturbation of norm ``radius`` that a few gradient steps per rival class find."""
    found = torch.zeros(len(x), dtype=torch.bool)
    for rival in range(net.sizes[-1]):
        delta = 1e-3 * random_input(len(x), x.shape[1], seed=rival)
        for _ in range(8):
            delta = delta.detach().requires_grad_()
            y = net(x + delta)
            lead = y.gather(1, label[:, None])[:, 0] - y[:, rival]
            (slope,) = torch.autograd.grad(lead.sum(), delta)
            step = delta.detach() - 0.5 * radius[:, None] * slope / slope.norm(dim=1, keepdim=True).clamp(min=1e-12)
            delta = step * (radius / step.norm(dim=1).clamp(min=1e-300)).clamp(max=1.0)[:, None]
        # and straight to the edge of the ball
        for candidate in (delta, delta * (radius / delta.norm(dim=1).clamp(min=1e-300))[:, None]):
            inside = candidate * (1 - 1e-9)
            found |= net.infer(x + inside).output.argmax(-1) != label
    return found
