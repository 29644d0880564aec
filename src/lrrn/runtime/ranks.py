"""Ranks: the processes that torchrun starts for one job, and their collective operations.

Training and scoring call :func:`current` for the participating ranks. These are only this process unless it is inside
:func:`joined`. A script that uses torch.distributed for other purposes is therefore not affected.
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
"""Timeout of collective operations: other ranks may read from a slower disk. The death of a rank is detected at once."""
PATIENCE = timedelta(minutes=15)
"""Timeout of the rendezvous at the start."""


class RankLostError(ConnectionError):
    """Another rank has died or cannot be reached."""


@final
@dataclass(frozen=True)
class Ranks:
    """The participating ranks, and the index of this one.

    Parameters
    ----------
    index : int, default=0
        Number of this rank; rank 0 alone writes and prints.
    size : int, default=1
        Number of ranks.
    connected : bool, default=False
        Whether there is a process group; a single rank may have one too.
    """

    index: int = 0
    size: int = 1
    connected: bool = False

    @property
    def is_main(self) -> bool:
        """Whether this is the rank that writes files and prints."""
        return self.index == 0

    def part(self, n: int) -> slice:
        """Return this rank's contiguous share of ``n`` items; shares differ by at most one item and may be empty."""
        return slice(n * self.index // self.size, n * (self.index + 1) // self.size)

    def add_up(self, tensor: Tensor) -> None:
        """Replace a tensor by its sum over all ranks (all-reduce); the result is bitwise equal on every rank."""
        if self.connected:
            with _in_touch():
                dist.all_reduce(tensor)

    def copy_main(self, tensor: Tensor) -> None:
        """Replace a tensor by that of rank 0 (broadcast)."""
        if self.connected:
            with _in_touch():
                dist.broadcast(tensor, src=0)

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in order, on every rank (all-gather)."""
        if not self.connected:
            return [value]
        values: list[Any] = [None] * self.size
        with _in_touch():
            dist.all_gather_object(values, value)
        return values

    def on_main(self, work: Callable[[], T]) -> T:
        """Call a function on rank 0 only and return its result on all ranks; all ranks raise an error that occurs there."""
        if not self.connected:
            return work()
        answer: list[Any] = [None, None]  # the result, or the error
        if self.is_main:
            try:
                answer[0] = work()
            except Exception as error:
                with _in_touch():
                    dist.broadcast_object_list([None, _portable(error)], src=0)
                raise
        with _in_touch():
            dist.broadcast_object_list(answer, src=0)
        if answer[1] is not None:
            raise answer[1]
        return answer[0]

    def check_same(self, what: str, values: dict[str, Any]) -> None:
        """Raise an error on every rank, with the names of differing values, unless all ranks have equal values."""
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
    """Return the ranks of the enclosing :func:`joined`, or only this process."""
    return _current


@contextmanager
def joined(device: str = "auto") -> Iterator[Ranks]:
    """Join the process group of torchrun: inside, all ranks share fits and scores, and must all make the same calls.

    Without torchrun (or other launchers that set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT) it does nothing, so that
    the same script runs with and without it. A process group that exists already is used and left as it is.

    Parameters
    ----------
    device : {"auto", "cpu", "cuda"}, default="auto"
        Device of the models. On CUDA, each rank of a machine uses its own GPU, and the backend is NCCL; otherwise it is Gloo.
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
    """Wait for all ranks and return a prefix of the store that is unique to this start.

    torchrun keeps its store when it restarts ranks. The store then contains the addresses of dead ranks, which Gloo would use.
    Every rank therefore draws a random name, which no dead rank can have had. Rank 0 answers each of the others, by name, with
    its own name, which is the prefix of all further keys.
    """
    deadline, name = time.monotonic() + PATIENCE.total_seconds(), secrets.token_hex(8)
    shared = name if index == 0 else ""
    answered = set[bytes]()
    if index > 0:
        store.set(f"lrrn/rank/{index}", name)
    while True:
        if index > 0 and store.check([f"lrrn/answer/{name}"]):
            shared = store.get(f"lrrn/answer/{name}").decode()
            store.add(f"lrrn/met/{shared}", 1)
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
    return dist.PrefixStore(f"lrrn/{shared}", store)  # type: ignore[attr-defined]


def _take_gpu() -> None:
    """Make this rank's own GPU the current CUDA device."""
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
    """Return an error that can be sent to other ranks: the error itself if it can be pickled, or one with its message."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
