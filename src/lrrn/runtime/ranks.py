"""Ranks: the processes that torchrun starts for one piece of work, and what they say to each other.

Training and scoring ask :func:`current` who takes part. That is this process alone unless it is inside :func:`joined`, so that
a script that uses torch.distributed for something else does not find its models waiting for each other.
"""

from __future__ import annotations

import json
import os
import pickle
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")
TIMEOUT = timedelta(days=1)
"""How long a rank waits for the others, who may be reading from a slower disk. That a rank has died is noticed at once."""
PATIENCE = timedelta(minutes=15)
"""How long ranks wait for each other at the start."""


class RankLostError(ConnectionError):
    """Another rank has died or cannot be reached."""


@final
@dataclass(frozen=True)
class Ranks:
    """Who takes part, and as which of them.

    Parameters
    ----------
    index : int, default=0
        Number of this rank; rank 0 alone writes and prints.
    size : int, default=1
        How many there are.
    connected : bool, default=False
        Whether there is a process group. One rank can have one too.
    """

    index: int = 0
    size: int = 1
    connected: bool = False

    @property
    def is_main(self) -> bool:
        """Whether this is the rank that writes files and prints."""
        return self.index == 0

    def part(self, n: int) -> slice:
        """Return this rank's share of ``n`` things in a row; shares differ by one at most and may be empty."""
        return slice(n * self.index // self.size, n * (self.index + 1) // self.size)

    def add_up(self, tensor: Tensor) -> None:
        """Replace a tensor by its sum over all ranks; every rank gets the same bits."""
        if self.connected:
            with _in_touch():
                dist.all_reduce(tensor)

    def copy_main(self, tensor: Tensor) -> None:
        """Replace a tensor by rank 0's."""
        if self.connected:
            with _in_touch():
                dist.broadcast(tensor, src=0)

    def gather(self, value: T) -> list[T]:
        """Return every rank's value, in order, on every rank."""
        if not self.connected:
            return [value]
        values: list[Any] = [None] * self.size
        with _in_touch():
            dist.all_gather_object(values, value)
        return values

    def on_main(self, work: Callable[[], T]) -> T:
        """Do something on rank 0 alone and return its result on all; an error there is raised by all."""
        if not self.connected:
            return work()
        told: list[Any] = [None, None]  # the result, or what went wrong
        if self.is_main:
            try:
                told[0] = work()
            except Exception as error:
                with _in_touch():
                    dist.broadcast_object_list([None, _portable(error)], src=0)
                raise
        with _in_touch():
            dist.broadcast_object_list(told, src=0)
        if told[1] is not None:
            raise told[1]
        return told[0]

    def check_same(self, what: str, values: dict[str, Any]) -> None:
        """Raise on every rank, with the names of what differs, unless all were given the same."""
        everyone = self.gather({key: json.dumps(value, default=repr) for key, value in values.items()})
        for index, other in enumerate(everyone):
            differing = [key for key in sorted({*everyone[0], *other}) if everyone[0].get(key) != other.get(key)]
            if differing:
                key = differing[0]
                raise ValueError(
                    f"ranks 0 and {index} were given different {what}: {', '.join(differing)} "
                    f"({key}: {everyone[0].get(key)} and {other.get(key)}). Start all ranks with the same command and data"
                )


_current = Ranks()


def current() -> Ranks:
    """Return the ranks of the surrounding :func:`joined`, or this process alone."""
    return _current


@contextmanager
def joined(device: str = "auto") -> Iterator[Ranks]:
    """Take part in what torchrun started: inside, fits and scores are shared by all ranks, who must all do the same.

    Without torchrun (or other launchers that set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT) it does nothing, so that one
    script serves both. A process group that exists already is used and left as it is.

    Parameters
    ----------
    device : {"auto", "cpu", "cuda"}, default="auto"
        Where the models will be. On CUDA the ranks of a machine take a GPU each and talk through NCCL, otherwise through Gloo.
    """
    global _current
    started = dist.is_available() and dist.is_initialized()
    if not started and not {"RANK", "WORLD_SIZE"} <= {*os.environ}:
        yield _current
        return
    if not dist.is_available():
        raise RuntimeError("this build of torch has no torch.distributed; run without torchrun, or install another build")
    from torch.distributed.rendezvous import rendezvous

    on_gpu = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    if on_gpu:
        _take_gpu()
    if not started:
        with _in_touch():
            store, index, size = next(iter(rendezvous("env://", timeout=PATIENCE)))
            backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
            dist.init_process_group(backend, store=_met(store, index, size), rank=index, world_size=size, timeout=TIMEOUT)
    before, _current = _current, Ranks(dist.get_rank(), dist.get_world_size(), True)
    try:
        yield _current
    finally:
        _current = before
        if not started:
            dist.destroy_process_group()


def _met(store: Any, index: int, size: int) -> Any:
    """Wait for all ranks and return a place in the store that is theirs alone.

    torchrun keeps its store when it restarts ranks, and in it the addresses of those that died, which Gloo would take for those
    of the living. So every rank draws a name, which no dead one can have had. Rank 0 answers the others by name with its own,
    and what they tell each other from then on is filed under that.
    """
    deadline, name = time.monotonic() + PATIENCE.total_seconds(), secrets.token_hex(8)
    told = name if index == 0 else ""
    answered = set[bytes]()
    if index > 0:
        store.set(f"lrrn/rank/{index}", name)
    while True:
        if index > 0 and store.check([f"lrrn/answer/{name}"]):
            told = store.get(f"lrrn/answer/{name}").decode()
            store.add(f"lrrn/met/{told}", 1)
            break
        if index == 0:
            if store.add(f"lrrn/met/{name}", 0) == size - 1:
                break
            keys = [f"lrrn/rank/{other}" for other in range(1, size)]
            for other in {store.get(key) for key in keys if store.check([key])} - answered:
                store.set(f"lrrn/answer/{other.decode()}", name)
                answered.add(other)
        if time.monotonic() > deadline:
            raise RuntimeError(f"not all of {size} ranks have come within {PATIENCE}")
        time.sleep(0.01)
    return dist.PrefixStore(f"lrrn/{told}", store)  # type: ignore[attr-defined]


def _take_gpu() -> None:
    """Make "cuda" mean this rank's own GPU."""
    local, available = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local >= available:
        raise ValueError(
            f"rank {local} of this machine needs a GPU of its own and there are {available}: "
            f"start at most {available} a machine (torchrun --nproc-per-node), or use --device cpu"
        )
    torch.cuda.set_device(local)


@contextmanager
def _in_touch() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise RankLostError(
            f"another rank has stopped or cannot be reached ({str(error).splitlines()[0]}). The first error of any rank is the "
            "cause; torchrun --max-restarts starts all again, and --checkpoint with --resume continues"
        ) from error


def _portable(error: Exception) -> Exception:
    """Return an error that can be sent to other ranks: itself, or its words."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
