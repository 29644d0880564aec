"""Table 1: energies of unsupervised 784-32-32 networks on in-distribution and out-of-distribution images."""

from __future__ import annotations

from lrrn.studies.common.runs import DATA, Run, Scale
from lrrn.studies.common.sections import Comparison, Results, Section

TESTS = ("mnist", "kmnist", "fashion_mnist", "mirrored", "gaussian")
PRINTED = {
    "mnist": ((13.7, 5.1), (26.4, 6.0), (35.9, 8.3), (21.5, 6.8), (48.0, 3.8)),
    "kmnist": ((59.5, 24.1), (36.5, 12.9), (52.1, 16.0), (43.8, 15.6), (78.9, 4.5)),
    "fashion_mnist": ((55.4, 30.8), (26.8, 11.5), (12.6, 6.7), (17.4, 11.0), (65.0, 3.9)),
}
"""Mean and standard deviation, by row and column, as printed in the paper."""


def runs(scale: Scale) -> list[Run]:
    """Return the required training runs."""
    names = ["mnist"] * scale.seeds + ["kmnist", "kmnist_7011", "fashion_mnist"]
    seeds = [*range(scale.seeds), 0, 0, 0]
    return [Run("energy", name, seed=seed, scale=scale) for name, seed in zip(names, seeds, strict=True)]


def settled(trained_on: str, test: str) -> tuple[float, float]:
    """Return the paper's figure. Its 3 x 3 block is read as transposed: the column is the training set."""
    if test in PRINTED:
        return PRINTED[test][TESTS.index(trained_on)]
    return PRINTED[trained_on][TESTS.index(test)]


def sections(results: Results, scale: Scale) -> list[Section]:
    """Compare with the paper."""
    section = Section("Table 1: energies of unsupervised networks")
    section.text = [
        "784-32-32, non-negative units, beta (1, 1), gamma 1/8, SGD with rate 0.005 and batches of 10. The paper's figures are "
        "energies without their factor 1/2, and the 3 x 3 block of its table is printed transposed: the column is the training "
        "set. Both readings are set side by side below. Targets: means within 5 %, standard deviations within 10 %.",
    ]
    by_data = {name: [run for run in runs(scale) if run.data == name] for name in DATA}
    readings = []
    for name, group in by_data.items():
        for test in TESTS:
            if name == "kmnist_7011":
                paper: tuple[float | None, float | None] = (None, None)
            else:
                paper = settled(name, test)
            row = f"trained on {DATA[name]}, tested on {DATA.get(test, test)}"
            for what, figure, within in (("mean", paper[0], 0.05), ("std", paper[1], 0.1)):
                ours = results.each(group, test, f"{what} without 1/2")
                section.comparisons.append(
                    Comparison(row, what, figure, ours, within=within, form="{:.1f}", note=results.why_not(group))
                )
            means = results.each(group, test, "mean without 1/2")
            if test in PRINTED and name in PRINTED and test != name and means:
                mean = sum(means) / len(means)
                printed = PRINTED[name][TESTS.index(test)][0]
                readings.append(
                    [row, f"{mean:.1f}", f"{mean / 2:.1f}"]
                    + [f"{value:.1f} ({100 * (mean / value - 1):+.0f} %)" for value in (printed, settled(name, test)[0])]
                )
    section.tables.append(
        (
            "The two readings of the 3 x 3 block, off its diagonal",
            ["row", "ours, without 1/2", "ours, with 1/2", "paper, as printed", "paper, transposed"],
            readings,
        )
    )
    auroc = []
    for name, group in by_data.items():
        values = [results.each(group, test, "auroc") for test in TESTS]
        if any(values):
            auroc.append([DATA[name], *(f"{sum(v) / len(v):.3f}" if v else "-" for v in values)])
    section.tables.append(
        ("AUROC of the energy, own test images against others (ours alone)", ["trained on", *map(_title, TESTS)], auroc)
    )
    return [section]


def _title(test: str) -> str:
    return DATA.get(test, test)
