"""Whether a checkpoint of supervised training came from the same pretraining as the run that is to continue it."""

from __future__ import annotations

import math
import os

from lrrn.learning import Settings
from lrrn.learning.checkpoint import KIND
from lrrn.learning.schedules import schedule
from lrrn.runtime import ranks, storage


def check_same_pretraining(path: str | os.PathLike[str], settings: Settings | None, n: int, may_end: bool) -> None:
    """Raise ValueError if the pretraining that a checkpoint records had other epochs or another learning rate.

    The checkpoint itself has settings of its own stage only, so what is compared are the records of the epochs.

    Parameters
    ----------
    path : path-like
        A checkpoint that was found to be undamaged.
    settings : Settings or None
        Of the pretraining of this run, None if there is none.
    n : int
        Number of samples.
    may_end : bool
        Whether there are callbacks, which may have ended the pretraining early.
    """
    header = ranks.current().on_main(lambda: storage.read(path, KIND)[2])
    records = [record for record in header["position"]["history"] if record["stage"] == "pretrain"]
    epochs = 0 if settings is None else settings.epochs
    ended = may_end or any("stopped_by" in record for record in records)
    if len(records) > epochs or (len(records) < epochs and not (ended and records)):
        raise _another_run(path, f"pretrain_epochs: {len(records)} there, {epochs} here")
    if settings is None or any(header["settings"].get(name) != getattr(settings, name) for name in ("batch_size", "schedule")):
        return  # these decide the rates too, and training refuses them by name
    for record, expected in zip(records, _rates(settings, n), strict=False):
        rate = record.get("learning_rate")
        fits = isinstance(rate, int | float) and math.isclose(rate, expected, rel_tol=1e-6, abs_tol=1e-12)
        # an epoch that the time ended has the rate of the step it came to
        if "stopped_by" not in record and not fits:
            when = f"learning rate at the end of epoch {record.get('epoch')} of pretraining"
            raise _another_run(path, f"{when}: {rate} there, {expected} here")


def _rates(settings: Settings, n: int) -> list[float]:
    """Return the learning rate of the last step of every epoch."""
    factor, steps = schedule(settings.schedule), -(-n // settings.batch_size)
    moments = [epoch * steps - 1 for epoch in range(1, settings.epochs + 1)]
    return [settings.learning_rate * factor(moment / (settings.epochs * steps)) for moment in moments]


def _another_run(path: str | os.PathLike[str], detail: str) -> ValueError:
    return ValueError(
        f"{path} belongs to another run ({detail}). Start again without resuming, or restore pretrain_epochs and "
        "pretrain_learning_rate"
    )
