"""Many small networks at once: seeds, folds, points of a grid.

Each network trains in a thread of its own. On a CUDA device its steps are launched as graphs on a stream of its own, and steps
of small networks leave most of the device idle, so those of other networks run beside them. On the CPU the kernels release the
interpreter lock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

from lrrn.learning.settings import Data
from lrrn.learning.trainer import Trainer
from lrrn.network import LRRN
from lrrn.runtime.threads import workers

MOST_ON_DEVICE = 8
"""Networks that train at a time on a CUDA device: more of them wait for each other in Python, and are no faster in all."""


def fit_many(
    trainers: Sequence[Trainer],
    data: Data | Sequence[Data],
    validate: Callable[[LRRN], float] | None = None,
    *,
    resume: bool = False,
    at_once: int | None = None,
) -> list[list[dict[str, Any]]]:
    """Train several networks side by side; each ends as if it had been trained alone, to the bit.

    Parameters
    ----------
    trainers : sequence of Trainer
        One for each network, each with objective, settings and, if wanted, checkpoint of its own.
    data : Data or sequence of Data
        What to learn from: the same for all, or one for each trainer.
    validate, resume
        As in :meth:`Trainer.fit`; ``validate`` is called from several threads.
    at_once : int, optional
        How many to train at a time. Default: ``MOST_ON_DEVICE`` on a CUDA device, elsewhere as many as there are threads.

    Returns
    -------
    list of list of dict
        The history of each.

    Raises
    ------
    Exception
        What the first that failed raised; the others have been trained to their end. On Ctrl-C each stops after the step, or
        the captured steps, it is at and leaves its checkpoint, if it has one.
    """
    parts = [data] * len(trainers) if isinstance(data, Data) else list(data)
    if len(parts) != len(trainers):
        raise ValueError(f"there should be data for all or for each of {len(trainers)} trainers; got {len(parts)} parts")
    networks = {id(trainer.net) for trainer in trainers}
    if len(networks) != len(trainers):
        raise ValueError(f"every trainer needs a network of its own; {len(trainers)} trainers share {len(networks)}")
    if at_once is None:
        at_once = MOST_ON_DEVICE if any(part.x.is_cuda for part in parts) else workers()
    if at_once < 1:
        raise ValueError(f"at_once must be at least 1; got {at_once}")
    with ThreadPoolExecutor(at_once, "lrrn-fit") as pool:
        futures = [pool.submit(trainer.fit, part, validate, resume) for trainer, part in zip(trainers, parts, strict=True)]
        try:
            wait(futures)
        except KeyboardInterrupt:
            for future, trainer in zip(futures, trainers, strict=True):
                if not future.cancel():
                    trainer.interrupt()
            wait(futures)
            raise
    failures = [error for future in futures if (error := future.exception()) is not None]
    if failures:
        if len(failures) > 1:
            failures[0].add_note(f"{len(failures)} of {len(futures)} trainings failed; this is the first of these errors")
        raise failures[0]
    return [future.result() for future in futures]
