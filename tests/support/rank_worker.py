"""What every rank of ``test_ranks.py`` does: torchrun starts this file; rank 0 leaves what came out in the folder given.

The functions are imported by the tests too, which call them in one process and compare.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

from lrrn import LRRN, Conv, LRRNClassifier, load, save
from lrrn.datasets import open_table
from lrrn.learning import Contrastive, CrossEntropy, Data, FreeEnergy, Margin, SemiSupervised, Settings, Trainer
from lrrn.learning.losses import SquaredError
from lrrn.learning.objectives import ClassEnergy
from lrrn.network import layers
from lrrn.reports.audit import certify
from lrrn.reports.evaluation import evaluate
from lrrn.runtime import ranks

OBJECTIVES = {
    type(objective).__name__: objective
    for objective in (
        Contrastive(),
        FreeEnergy(),
        ClassEnergy(),
        SemiSupervised(1e-2),
        Margin(),
        CrossEntropy(),
        SquaredError(),
    )
}
TOL = 1e-12
"""Relative residual of the solves of networks with convolutions: then gradients differ by little more than rounding."""
DTYPES = {"float32": torch.float32, "float64": torch.float64}


def blobs(n: int, dtype: torch.dtype = torch.float32, weighted: bool = False, seed: int = 0) -> Data:
    generator = torch.Generator().manual_seed(seed)
    label = torch.arange(n) % 3
    x = torch.rand(n, 40, generator=generator) + 0.3 * torch.randn(3, 40, generator=generator)[label]
    weight = 2 * torch.rand(n, generator=generator).to(dtype) if weighted else None
    return Data(x.to(dtype), functional.one_hot(label, 3).to(dtype), label, weight)


NETWORKS = {
    "dense": ((40, 16, 12, 3), None),
    "matrices": (((1, 5, 8), Conv(4, 3), 12, 3), None),
    "products": (((1, 5, 8), Conv(4, 3), 12, 3), -1),
}
"""Sizes, and the largest number of units for which convolutions are computed as matrices, unless it is the usual one."""


def network(dtype: torch.dtype = torch.float32, seed: int = 0, kind: str = "dense") -> LRRN:
    sizes, units = NETWORKS[kind]
    usual = layers.UNFOLDED_UNITS
    layers.UNFOLDED_UNITS = usual if units is None else units
    try:
        return LRRN(sizes, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    finally:
        layers.UNFOLDED_UNITS = usual


def flat(net: LRRN) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in net.parameters()])


def gradient(objective: str, dtype: str, n: int, kind: str = "dense", tol: float | None = None) -> torch.Tensor:
    """The gradient of the first step, whoever computed it."""
    net = network(DTYPES[dtype], kind=kind)
    trainer = Trainer(net, OBJECTIVES[objective], Settings(learning_rate=1e-6, batch_size=n, epochs=1, tol=tol))
    trainer.fit(blobs(n, DTYPES[dtype], weighted=True))
    return trainer._flat.gradient.clone()


MAX_CONDITION = 12.0
"""Less than that of the networks with convolutions: it is enforced from the first step on."""

RUNS = {
    "sgd": dict(optimizer="sgd", learning_rate=0.1),
    "adam": dict(optimizer="adam", learning_rate=0.01, reuse_activations=True, schedule="cosine"),
    "capped": dict(optimizer="adamw", learning_rate=0.01, decoupled_weight_decay=0.1, max_weight_norm=1.2, weight_decay=1e-4),
    "matrices": dict(optimizer="adam", learning_rate=0.01, max_condition=MAX_CONDITION),
    "products": dict(optimizer="adam", learning_rate=0.01, max_condition=MAX_CONDITION),
}


def start(name: str, seed: int = 0) -> LRRN:
    """The network that a run begins with."""
    return network(seed=seed, kind=name if name in NETWORKS else "dense")


def training(name: str, folder: Path | None = None, stop_after: int | None = None, resume: bool = False) -> Trainer:
    """Three epochs over 49 samples in batches of 8: the last batch is one sample, which only one rank gets."""
    options = {} if folder is None else {"checkpoint": folder / f"{name}.ckpt", "log": folder / f"{name}.jsonl"}
    calls: list[int] = []
    net = start(name, seed=7 * resume)
    trainer = Trainer(
        net,
        Contrastive(),
        Settings(batch_size=8, epochs=3, **RUNS[name]),
        callbacks=[lambda t, record: calls.append(record["epoch"]) or record["epoch"] == stop_after],
        **options,
    )
    trainer.fit(blobs(49), validate=lambda net: float(flat(net).norm()), resume=resume)
    trainer.calls = calls
    return trainer


def interrupted(folder: Path) -> str:
    """Rank 1 alone is interrupted in the second epoch; all stop at the same step, after a checkpoint."""
    seen = 0

    class Objective:
        def __call__(self, net, batch):
            nonlocal seen
            seen += 1
            if seen == 10 and ranks.current().index == ranks.current().size - 1:
                os.kill(os.getpid(), signal.SIGINT)
            return Contrastive()(net, batch)

    def run(objective, resume):
        net = network()
        Trainer(net, objective, Settings(batch_size=8, epochs=3), checkpoint=folder / "i.ckpt").fit(blobs(49), resume=resume)
        return flat(net)

    try:
        run(Objective(), False)
    except KeyboardInterrupt:
        seen = 1000
        return json.dumps(run(Objective(), True).tolist())
    return "not interrupted"


class Drifting:
    """Rounds differently on every rank."""

    def __call__(self, net, batch):
        return Contrastive()(net, batch)

    @torch.no_grad()
    def project(self, net):
        net.b[0] += 1e-7 * ranks.current().index


def raised(work) -> str:
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing raised"


def scored(folder: Path, table: str, samples: str | None = None) -> dict:
    model = load(folder / "model.safetensors")
    type(model).chunk_rows_ = property(lambda self: 50)
    rows = open_table(folder / table, str(folder / "y.npy") if table == "X.npy" else None)
    file = None if samples is None else folder / samples
    one = evaluate("m", model, rows, samples=file)
    two = certify("m", model, rows.first(40), method="local")
    return {
        "evaluation": one.as_json(),
        "energies": {kind: values.tolist() for kind, values in one.energies.items()},
        "radii": two.as_json()["samples"],
    }


def worker(folder: Path) -> None:
    with ranks.joined("cpu") as team:
        out: dict = {"size": team.size, "part": [team.gather(list(range(n))[team.part(n)]) for n in (0, 1, 2, 7)]}
        tensors = {f"{o} {d} {n}": gradient(o, d, n) for o in OBJECTIVES for d in DTYPES for n in (1, 5, 64)}
        for kind in ("matrices", "products"):
            tensors |= {f"{kind} {o} {n}": gradient(o, "float64", n, kind, TOL) for o in OBJECTIVES for n in (1, 5, 64)}
        for name in RUNS:
            first, again = training(name, folder), training(name)
            tensors[f"trained {name}"] = flat(first.net)
            out[f"again {name}"] = torch.equal(flat(first.net), flat(again.net))
            limit = first._step.condition
            out[f"vectors {name}"] = team.gather(None if limit is None else limit.vector.tolist())
            out[f"calls {name}"] = team.gather(first.calls)
            out[f"history {name}"] = [{k: v for k, v in record.items() if "second" not in k} for record in first.history]
            stopped = folder / f"stopped-{name}"
            team.on_main(lambda stopped=stopped: stopped.mkdir())
            training(name, stopped, stop_after=2)
            team.on_main(lambda stopped=stopped, name=name: shutil.copytree(stopped, folder / f"half-{name}"))
            tensors[f"resumed {name}"] = flat(training(name, stopped, resume=True).net)
        out["interrupted"] = team.gather(interrupted(folder))
        other = blobs(49, seed=team.index)
        out["other data"] = team.gather(raised(lambda: Trainer(network(), Contrastive(), Settings(epochs=1)).fit(other)))
        out["error on main"] = team.gather(raised(lambda: team.on_main(lambda: 1 // 0)))

        class Strange(Exception):
            """Cannot be sent: it is known here only."""

        def strange() -> None:
            raise Strange("odd")

        out["error that cannot travel"] = team.gather(raised(lambda: team.on_main(strange)))
        out["drift"] = team.gather(raised(lambda: Trainer(network(), Drifting(), Settings(epochs=1)).fit(blobs(49))))
        unseeded = LRRNClassifier(hidden_sizes=(5,), epochs=1).fit(blobs(49).x.numpy(), blobs(49).label.numpy())
        out["unseeded"] = team.gather(flat(unseeded.network_).tolist())
        tables = ("X.npy", "table.npz", "packed.npz", "table.parquet")
        scores = [scored(folder, t, f"two-{t}.npz") for t in tables if (folder / t).exists()]
        out["scores"] = scores[0]
        out["scores of all ranks"] = all(other == scores[0] for other in team.gather(scores[0]))
        out["scores of other files"] = scores[1:]
        out["bad row"] = team.gather(raised(lambda: scored(folder, "bad.npz")))
    assert ranks.current() == ranks.Ranks()
    if team.is_main:
        torch.save(tensors, folder / "tensors.pt")
        (folder / "out.json").write_text(json.dumps(out))


def make_tables(folder: Path) -> None:
    """A model, and 333 samples in seven chunks of 50, of which the last is short; one with a value missing."""
    fitted = blobs(300)
    model = LRRNClassifier(hidden_sizes=(8,), epochs=2, random_state=0).fit(fitted.x.numpy(), fitted.label.numpy())
    save(model, folder / "model.safetensors")
    data = blobs(333, seed=5)
    X, y = data.x.numpy(), data.label.numpy()
    np.save(folder / "X.npy", X)
    np.save(folder / "y.npy", y)
    np.savez(folder / "table.npz", X=X, y=y)
    np.savez_compressed(folder / "packed.npz", X=X, y=y)
    bad = X.copy()
    bad[300, 7] = np.nan
    np.savez(folder / "bad.npz", X=bad, y=y)
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        return
    columns = {f"f{j}": X[:, j] for j in range(X.shape[1])}
    parquet.write_table(pyarrow.table({**columns, "y": y}), folder / "table.parquet", row_group_size=120)


if __name__ == "__main__":
    worker(Path(sys.argv[1]))
