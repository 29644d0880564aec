"""Training loop of the baselines, for any module and loss, with mini-batches; it can be interrupted and resumed."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from lrrn.learning import augment, checkpoint
from lrrn.learning.schedules import schedule
from lrrn.runtime import storage
from lrrn.runtime.storage import write_bytes

Loss = Callable[[Tensor, Tensor], Tensor]
"""Maps a batch and its class indices to the mean loss."""


@final
@dataclass(frozen=True)
class Plan:
    """Hyper-parameters of training.

    Attributes
    ----------
    epochs, batch_size : int
    learning_rate : float
    optimizer : {"adam", "nesterov"}
    momentum : float
        Momentum of Nesterov's method.
    schedule : {None, "cosine", "one_cycle"}
    decay : float
        Factor applied to the learning rate after each epoch, in addition to the schedule.
    shift_share : float
        Share of the images in each batch that are shifted by one pixel, up, down, left or right.
    shifts : int
        Largest shift of all images of a batch, in pixels along both axes.
    flips : bool
        Whether half of the images of a batch are mirrored left to right.
    image_shape : (int, int, int), optional
        Channels, height and width of images for ``shifts`` and ``flips``; square images with one channel if not given.
    """

    epochs: int
    batch_size: int
    learning_rate: float
    optimizer: str = "adam"
    momentum: float = 0.9
    schedule: str | None = None
    decay: float = 1.0
    shift_share: float = 0.0
    shifts: int = 0
    flips: bool = False
    image_shape: tuple[int, int, int] | None = None

    def __post_init__(self) -> None:
        if self.epochs < 1 or self.batch_size < 1 or not self.learning_rate > 0:
            raise ValueError(
                f"epochs and batch_size must be at least 1 and learning_rate above 0; got {self.epochs}, {self.batch_size} and "
                f"{self.learning_rate}"
            )
        if self.optimizer not in ("adam", "nesterov"):
            raise ValueError(f"unknown optimizer {self.optimizer!r}; use adam or nesterov")
        schedule(self.schedule)


def train(model: nn.Module, loss: Loss, x: Tensor, label: Tensor, plan: Plan, seed: int, folder: Path | None = None) -> float:
    """Train a module in place.

    On a GPU, products of float32 matrices are in TF32: four times as fast, and the weights that are exported afterwards are
    orthogonalised in full precision.

    Parameters
    ----------
    model : nn.Module
    loss : callable
        Function of a batch and its labels; it calls the module itself.
    x : Tensor of shape (n, d)
        On the module's device.
    label : int64 Tensor of shape (n,)
    plan : Plan
    seed : int
        Seed of the sample order and of the shifts. The same seed gives the same batches, also after an interruption.
    folder : Path, optional
        Folder for the checkpoint after each epoch and for the log, which has one line per finished epoch.

    Returns
    -------
    float
        Seconds of all epochs, including those before an interruption.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer: torch.optim.Optimizer
    if plan.optimizer == "adam":
        optimizer = torch.optim.Adam(parameters, lr=plan.learning_rate)
    else:
        optimizer = torch.optim.SGD(parameters, lr=plan.learning_rate, momentum=plan.momentum, nesterov=True)
    file = None if folder is None else folder / "state.ckpt"
    # as they are read from the file: a tuple becomes a list
    settings = json.loads(json.dumps({**asdict(plan), "seed": seed, "data": storage.fingerprint(x, label)}))
    groups: dict[str, Sequence[Tensor]] = {"model": list(model.state_dict().values())}
    position = checkpoint.Position()
    if file is not None and file.is_file():
        position = checkpoint.restore(file, settings, groups, optimizer)
    model.train()
    while position.epoch < plan.epochs:
        start = time.perf_counter()
        with _fast_products():
            mean = _epoch(loss, optimizer, x, label, plan, seed, position.epoch)
        if not math.isfinite(mean):
            raise ArithmeticError(f"the loss of epoch {position.epoch + 1} is {mean}; lower the learning rate")
        position.epoch += 1
        seconds = time.perf_counter() - start
        position.history.append({"stage": position.stage, "epoch": position.epoch, "loss": mean, "seconds": seconds})
        if file is not None:
            # read anew: the vectors of power iterations are other tensors after each step
            groups = {"model": list(model.state_dict().values())}
            checkpoint.save(file, settings, position, groups, optimizer)
            write_bytes(file.with_name("log.jsonl"), "".join(json.dumps(r) + "\n" for r in position.history).encode())
    model.eval()
    return float(sum(record["seconds"] for record in position.history))


@contextmanager
def _fast_products() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _epoch(loss: Loss, optimizer: torch.optim.Optimizer, x: Tensor, label: Tensor, plan: Plan, seed: int, epoch: int) -> float:
    generator = torch.Generator().manual_seed(1_000_003 * seed + epoch)
    batches = torch.randperm(len(x), generator=generator).to(x.device).split(plan.batch_size)
    factor, total = schedule(plan.schedule), torch.zeros((), device=x.device)
    for step, rows in enumerate(batches):
        progress = (epoch + step / len(batches)) / plan.epochs
        for group in optimizer.param_groups:
            group["lr"] = plan.learning_rate * factor(progress) * plan.decay**epoch
        inputs = _augmented(shifted(x[rows], plan.shift_share, generator), rows, epoch * len(batches) + step, seed, plan)
        value = loss(inputs, label[rows])
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        total += value.detach() * len(rows)
    return float(total) / len(x)


def _augmented(x: Tensor, rows: Tensor, moment: int, seed: int, plan: Plan) -> Tensor:
    """Shift and flip images as in the training of our networks."""
    if plan.shifts:
        x = augment.shifted(x, rows, moment, seed, plan.shifts, plan.image_shape)
    return augment.flipped(x, rows, moment, seed, plan.image_shape) if plan.flips else x


def shifted(x: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """Shift a share of square images by one pixel, each in one of four directions; new pixels at the edge are black."""
    if share == 0:
        return x
    side = math.isqrt(x.shape[1])
    if side * side != x.shape[1]:
        raise ValueError(f"only square images can be shifted; got {x.shape[1]} features")
    draws = torch.rand(len(x), generator=generator).to(x.device)
    images = x.reshape(-1, side, side)
    result = images.clone()
    for way, (axis, step) in enumerate(((1, 1), (1, -1), (2, 1), (2, -1))):
        chosen = (draws >= way * share / 4) & (draws < (way + 1) * share / 4)
        moved = images[chosen].roll(step, axis)
        moved.select(axis, 0 if step > 0 else side - 1).zero_()
        result[chosen] = moved
    return result.reshape(x.shape)


def seeded(make: Callable[[], Any], seed: int) -> Any:
    """Call a function with torch's global generator seeded, then restore the generator's state."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()
