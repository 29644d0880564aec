"""Fig. 3: loss and test accuracy over the epochs of supervised learning."""

from __future__ import annotations

from lrrn.reports.page import line_chart
from lrrn.studies.common.runs import DATA, DECAYS, Run, Scale
from lrrn.studies.common.sections import Comparison, Figure, Results, Section
from lrrn.studies.paper import decay_tables

PRINTED = {"mnist": 0.972, "kmnist": 0.857, "fashion_mnist": 0.856}
"""Final accuracies in the caption of the paper's Fig. 3."""


def runs(scale: Scale) -> list[Run]:
    """Return the required training runs."""
    return decay_tables.runs_of("contrastive", DECAYS[0], scale)


def curves(title: str, stem: str, several: list[Run], results: Results) -> list[Figure]:
    """Return charts of loss and accuracy, with one curve per training set, for the first seed."""
    loss, accuracy = {}, {}
    for run in several:
        if run.seed == 0 and run in results.by_run:
            records = [record for record in results.by_run[run]["history"] if record["stage"] == "train"]
            epochs = [record["epoch"] for record in records]
            loss[DATA[run.data]] = (epochs, [record["loss"] for record in records])
            accuracy[DATA[run.data]] = (epochs, [record["test_accuracy"] for record in records])
    if not loss:
        return []
    return [
        Figure(f"{stem}-loss.svg", f"{title}: loss", line_chart("epoch", "training loss", loss, log_y=True)),
        Figure(f"{stem}-accuracy.svg", f"{title}: test accuracy", line_chart("epoch", "test accuracy", accuracy, zero=False)),
    ]


def sections(results: Results, scale: Scale) -> list[Section]:
    """Draw the learning curves and compare final accuracies."""
    section = Section("Fig. 3: learning curves")
    section.text = [
        "The caption of Fig. 3 gives 85.6 % for FMNIST and 85.7 % for KMNIST; Table 2 has them the other way round. Rows are "
        "compared with the caption here and with the table above."
    ]
    for name, paper in PRINTED.items():
        group = [run for run in runs(scale) if run.data == name]
        section.comparisons.append(
            Comparison(
                DATA[name], "final accuracy", paper, results.each(group, "accuracy"), below=0.004, form="{:.4f}",
                note=results.why_not(group),
            )
        )  # fmt: skip
    section.figures = curves("Supervised learning from random weights", "supervised", runs(scale), results)
    return [section]
