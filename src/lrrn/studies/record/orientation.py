"""Figures that others published for the data sets of the record, and the targets of ours."""

from __future__ import annotations

PUBLISHED: dict[str, tuple[str, ...]] = {
    "mnist": (
        "Published elsewhere, at 1.58, deterministic: GloRo's 4C3F (Leino et al., 2021) certifies 62.8 %, and 95.7 % at 0.3; "
        "CRM's 4C3F (Fazlyab et al., 2023) 63.4 %; Singla and Feizi (2020) 69.8 %, against the runner-up class only; nearest "
        "prototypes (Voracek and Hein, 2022) 73.0 %. The paper's own networks have median radii of 0.698 at 97.2 % and 1.081 "
        "at 95.5 % accuracy.",
        "Randomised smoothing certifies 79.2 % at 1.58 and 98.9 % at 0.3 in the best published logs. These statements are "
        "about another classifier, a vote over 100,000 noisy copies of each image, and hold with high probability only.",
        "A perturbation that changes no pixel by more than 0.05 has a norm of at most 0.05 sqrt(784) = 1.40. So what is "
        "certified at 1.58 is certified against those too.",
    ),
    "cifar10": (
        "Published elsewhere, deterministic, at 36/255, 72/255 and 108/255: 1-Lipschitz ConvNets with five layers a block 59 "
        "to 63 / 45 to 49 / 32 to 36 % (tables of Singla, Singla and Feizi, 2022, and later ones); BRONet (Lai et al., 2025; "
        "68 million parameters) 70.6 / 57.2 / 42.5 %; AOL (Prach and Lampert, 2022) 64.0 % at 36/255 and 49.0 % at 108/255; "
        "GloRo's 6C2F (Leino et al., 2021) 58 to 60 % and BCP (Lee et al., 2020) 51.3 % at 36/255.",
    ),
}
"""Paragraphs of the report, by data set."""

TARGETS: dict[str, tuple[tuple[str, str, float], ...]] = {
    "mnist": (
        ("wide", "accuracy", 0.97),
        ("wide", "certified at 1.58", 0.80),
        ("accurate", "accuracy", 0.983),
        ("accurate", "certified at 0.3", 0.985),
        ("paper_a", "accuracy", 0.972),
        ("paper_a", "median radius", 1.2),
        ("paper_b", "accuracy", 0.955),
        ("paper_b", "median radius", 1.5),
    ),
    "fashion_mnist": (
        ("deep", "accuracy", 0.905),
        ("deep", "certified at 0.5", 0.80),
        ("deep", "certified at 1", 0.64),
    ),
    "cifar10": (
        ("conv", "accuracy", 0.64),
        ("conv", "certified at 36/255", 0.57),
        ("conv", "certified at 72/255", 0.48),
        ("conv", "certified at 108/255", 0.39),
    ),
}
"""Targets by data set: row, quantity and target value."""
