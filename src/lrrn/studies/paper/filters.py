"""Filters: the first layer's weights as images, for every activation, training set and learning method."""

from __future__ import annotations

import numpy as np

from lrrn.reports.page import png, sheet
from lrrn.studies.common.runs import DATA, DECAYS, Run, Scale
from lrrn.studies.common.sections import Figure, Results, Section
from lrrn.studies.paper import decay_tables, table1

CONSTRAINTS = {"free": "linear", "nonneg": "ReLU-like", "box": "hard sigmoid"}


def unsupervised(scale: Scale) -> list[Run]:
    """Return the unsupervised networks: every activation on every training set."""
    others = [
        Run("energy", name, constraint=constraint, scale=scale)
        for constraint in ("free", "box")
        for name in ("mnist", "kmnist", "kmnist_7011", "fashion_mnist")
    ]
    return [run for run in table1.runs(scale) if run.seed == 0] + others


def supervised(kind: str, scale: Scale) -> list[Run]:
    """Return one network per training set."""
    return [run for run in decay_tables.runs_of(kind, DECAYS[0], scale) if run.seed == 0]


def runs(scale: Scale) -> list[Run]:
    """Return the required training runs."""
    return unsupervised(scale) + supervised("contrastive", scale) + supervised("pretrained", scale)


def sections(results: Results, scale: Scale) -> list[Section]:
    """Draw the grids of filters."""
    section = Section("Filters of the first layer")
    section.text = ["Each filter is scaled alone: white is zero, red positive, blue negative."]
    sheets = [(run, "filters", f"unsupervised 784-32-32, {CONSTRAINTS[run.constraint]} units") for run in unsupervised(scale)]
    sheets += [(run, "filters", "supervised 784-64-64-10") for run in supervised("contrastive", scale)]
    for stage, what in (("pretrained", "unsupervised"), ("filters", "unsupervised, then supervised")):
        epochs = f"{scale.pretrain_epochs} epochs" if stage == "pretrained" else "fine-tuned"
        sheets += [(run, stage, f"{what} 784-64-64-10, {epochs}") for run in supervised("pretrained", scale)]
    for run, stage, what in sheets:
        weights = results.filters(run, stage)
        if weights is not None:
            images = np.asarray(weights, dtype=np.float64).reshape(len(weights), 28, 28)
            name = f"filters-{run.kind}-{run.data}" + (f"-{run.constraint}" if run.kind == "energy" else "")
            name += "-before" if stage == "pretrained" else ""
            section.figures.append(Figure(f"{name}.png", f"{DATA[run.data]}, {what}", png(sheet(images, 16))))
    missing = len(sheets) - len(section.figures)
    if missing:
        section.text.append(f"{missing} of {len(sheets)} sheets are missing: their networks were not trained.")
    return [section]
