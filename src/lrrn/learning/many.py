"""Train many small networks concurrently: seeds, folds, points of a grid.

Each network trains in its own thread. On a CUDA device its steps are launched as graphs on its own stream. Steps of a small
network leave most of the device idle, so those of other networks run concurrently. On the CPU, the kernels release the global
interpreter lock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

from lrrn.learning.cuda_graph import STREAMS
from lrrn.learning.settings import Data
from lrrn.learning.trainer import Trainer
from lrrn.network import LRRN
from lrrn.runtime.threads import workers

MOST_ON_DEVICE = 8
"""Maximum number of networks that train concurrently on a CUDA device: more contend for Python and increase no throughput."""


def fit_many(
    trainers: Sequence[Trainer],
    data: Data | Sequence[Data],
    validate: Callable[[LRRN], float] | None = None,
    *,
    resume: bool = False,
    at_once: int | None = None,
) -> list[list[dict[str, Any]]]:
    """Train several networks concurrently. Each result is bitwise equal to that of training alone.

    Parameters
    ----------
    trainers : sequence of Trainer
        One for each network, each with its own objective, settings and optional checkpoint.
    data : Data or sequence of Data
        Training data: the same for all, or one for each trainer.
    validate, resume
        As in :meth:`Trainer.fit`; ``validate`` is called from several threads.
    at_once : int, optional
        Number of networks that train concurrently. Default: ``MOST_ON_DEVICE`` on a CUDA device, elsewhere the number of
        threads. On a CUDA device at most 32, since each needs a stream of its own.

    Returns
    -------
    list of list of dict
        The history of each.

    Raises
    ------
    Exception
        The exception of the first trainer that failed; the others complete their training first. On Ctrl-C each stops after
        its current step, or its current captured steps, and writes its checkpoint, if it has one.
    """
    parts = [data] * len(trainers) if isinstance(data, Data) else list(data)
    if len(parts) != len(trainers):
        raise ValueError(f"there should be data for all or for each of {len(trainers)} trainers; got {len(parts)} parts")
    networks = {id(trainer.net) for trainer in trainers}
    if len(networks) != len(trainers):
        raise ValueError(f"every trainer needs a network of its own; {len(trainers)} trainers share {len(networks)}")
    on_device = any(part.x.is_cuda for part in parts)
    if at_once is None:
        at_once = MOST_ON_DEVICE if on_device else workers()
    if at_once < 1:
        raise ValueError(f"at_once must be at least 1; got {at_once}")
    if on_device:
        # where two share a stream, a graph of one that ends may free the workspace of a graph of the other
        at_once = min(at_once, STREAMS)
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
