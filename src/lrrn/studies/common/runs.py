"""Training runs: network, data and hyper-parameters; and their execution, which can be interrupted and resumed."""

from __future__ import annotations

import io
import json
import platform
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Event
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray

from lrrn import datasets
from lrrn.estimators import LRRNClassifier, LRRNEnergyModel
from lrrn.learning import Trainer
from lrrn.persistence.serialization import load, save
from lrrn.runtime.devices import choose_device
from lrrn.runtime.storage import write_bytes
from lrrn.studies.common.measures import measure_classifier, measure_energies

Array = NDArray[Any]
DATA = {"mnist": "MNIST", "kmnist": "KMNIST", "kmnist_7011": "KMNIST, first 7,011", "fashion_mnist": "FMNIST"}
"""Training sets and their names in tables."""
RATES = {"mnist": 0.4, "kmnist": 0.4, "kmnist_7011": 0.4, "fashion_mnist": 0.1}
"""The paper's learning rates of supervised learning."""
DECAYS = (5e-5, 5e-4)
"""The paper's weights of the penalty on the last layer, Tables 2 and 3."""


@final
@dataclass(frozen=True)
class Scale:
    """Size of a reproduction: epochs, seeds, samples and budgets.

    Attributes
    ----------
    epochs, pretrain_epochs, margin_epochs : int
    seeds : int
        Number of seeds for MNIST rows; other rows have one.
    samples, tests : int or None
        Number of training and test images, counted from the first; all if None.
    closely : int
        Number of test images for expensive per-sample measurements: local radii and attacks.
    bound_seconds : float
        Time budget of the multiplier bounds.
    """

    epochs: int = 100
    pretrain_epochs: int = 20
    margin_epochs: int = 40
    seeds: int = 3
    samples: int | None = None
    tests: int | None = None
    closely: int = 1000
    bound_seconds: float = 300.0


FULL = Scale()
QUICK = Scale(epochs=2, pretrain_epochs=1, margin_epochs=2, seeds=1, samples=5000, tests=1000, closely=10, bound_seconds=2.0)


@final
@dataclass(frozen=True)
class Run:
    """One network to train and measure.

    Attributes
    ----------
    kind : {"energy", "contrastive", "pretrained", "margin"}
        Unsupervised; the paper's supervised learning; the same after unsupervised learning; our margin loss.
    data : str
        A key of ``DATA``.
    constraint : str
        Constraint of the hidden units.
    decay : float
        Weight of the penalty on the last layer.
    seed : int
    scale : Scale
    """

    kind: str
    data: str
    constraint: str = "nonneg"
    decay: float = 0.0
    seed: int = 0
    scale: Scale = FULL

    @property
    def name(self) -> str:
        """Unique name among all runs of its scale; the name of its folder."""
        parts = [self.kind, self.data]
        parts += [self.constraint] if self.kind == "energy" else []
        parts += [f"{self.decay:g}"] if self.decay else []
        return "-".join([*parts, f"seed{self.seed}"])

    @property
    def closely(self) -> int:
        """Number of test images for per-sample measurements; nonzero for one run per row of Tables 2 and 3."""
        return self.scale.closely if self.kind in ("contrastive", "margin") and self.seed == 0 else 0

    @property
    def epochs(self) -> int:
        """Total number of epochs, including those without labels."""
        if self.kind == "margin":
            return self.scale.margin_epochs
        return self.scale.epochs + (self.scale.pretrain_epochs if self.kind == "pretrained" else 0)

    def estimator(self, **changes: Any) -> LRRNClassifier | LRRNEnergyModel:
        """Return the estimator to fit."""
        paper: dict[str, Any] = {"init": "glorot", "optimizer": "sgd", "schedule": None, "batch_size": 10, "gamma": 1 / 8}
        common = {"epochs": self.scale.epochs, "random_state": self.seed, **changes}
        if self.kind == "energy":
            return LRRNEnergyModel(
                hidden_sizes=(32, 32), constraint=self.constraint, learning_rate=0.005, **{**paper, **common}
            )
        common.setdefault("hidden_sizes", (64, 64))
        if self.kind == "margin":
            recipe = {"margin": 0.7, "temperature": 0.25, "optimizer": "adamw", "schedule": "one_cycle", "learning_rate": 2e-3}
            recipe |= {"decoupled_weight_decay": 0.3, "weight_decay": 0.0, "batch_size": 128, "init": "uniform"}
            return LRRNClassifier(objective="margin", **{**recipe, **common, "epochs": self.scale.margin_epochs})
        if self.kind == "pretrained":
            common |= {"pretrain_epochs": self.scale.pretrain_epochs, "pretrain_learning_rate": 0.005}
        return LRRNClassifier(
            objective="contrastive", learning_rate=RATES[self.data], weight_decay=self.decay, **{**paper, **common}
        )


def training_data(run: Run, root: Path | None, download: bool) -> tuple[Array, Array]:
    """Load the training data of a run."""
    X, y = load_training(run.data, root, download)
    return X[: run.scale.samples], y[: run.scale.samples]


def test_data(name: str, scale: Scale, root: Path | None, download: bool) -> tuple[Array, Array]:
    """Load the test images of a training set."""
    X, y = load_test(name, root, download)
    return X[: scale.tests], y[: scale.tests]


def load_training(data: str, root: Path | None, download: bool) -> tuple[Array, Array]:
    """Load all training images of a key of ``DATA``."""
    name, split = ("kmnist", "train_7011") if data == "kmnist_7011" else (data, "train")
    return datasets.load(name, split, root, download=download)


def load_test(data: str, root: Path | None, download: bool) -> tuple[Array, Array]:
    """Load all test images of a key of ``DATA``."""
    return datasets.load("kmnist" if data == "kmnist_7011" else data, "test", root, download=download)


def execute(run: Run, folder: Path, root: Path | None, device: str = "cpu", download: bool = False) -> dict[str, Any]:
    """Train, measure and store everything in a folder; steps whose results exist are skipped.

    Parameters
    ----------
    run : Run
    folder : Path
        For the checkpoint, the log of epochs, the model and ``result.json``.
    root : Path, optional
        Folder with the data.
    device : {"cpu", "cuda", "auto"}, default="cpu"
    download : bool, default=False
        Whether missing data may be downloaded.

    Returns
    -------
    dict
        The run, its figures and its history.
    """
    done = finished(run, folder)
    if done is not None:
        return done
    train(run, folder, root, device, download)
    X, _ = training_data(run, root, download)
    X_test, y_test = test_data(run.data, run.scale, root, download)
    model = load(_model_file(folder))
    assert isinstance(model, LRRNClassifier | LRRNEnergyModel)
    seconds = float(sum(record["seconds"] for record in model.history_))
    start = time.perf_counter()
    if isinstance(model, LRRNEnergyModel):
        tests = {name: test_data(name, run.scale, root, download)[0] for name in ("mnist", "kmnist", "fashion_mnist")}
        figures = measure_energies(model, X, X_test, tests, run.seed)
    else:
        figures = measure_classifier(model, X_test, y_test, run.closely, run.scale.bound_seconds, run.seed)
    result = {
        "run": asdict(run),
        "figures": figures,
        "history": [{key: record[key] for key in KEPT if key in record} for record in model.history_],
        "samples": len(X),
        "tests": len(X_test),
        "seconds": {"training": seconds, "measuring": time.perf_counter() - start},
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__},
        "device": model.device,
    }
    write_bytes(folder / "result.json", (json.dumps(result, indent=1) + "\n").encode())
    return result


def undisturbed(folder: Path) -> float | None:
    """Return the training time extrapolated from the fastest tenth of the epochs, which other processes slowed down least."""
    path = folder / "log.jsonl"
    if not path.is_file():
        return None
    seconds = [json.loads(line)["seconds"] for line in path.read_text().splitlines()]
    return float(np.quantile(seconds, 0.1)) * len(seconds) if seconds else None


KEPT = ("stage", "epoch", "loss", "test_accuracy", "sweeps", "condition_number", "weight_norms")
"""Entries of an epoch's record that go into the results."""


def finished(run: Run, folder: Path) -> dict[str, Any] | None:
    """Return the stored result of a run, or None if there is none or it belongs to a different run."""
    path = folder / "result.json"
    if not path.is_file():
        return None
    result: dict[str, Any] = json.loads(path.read_text())
    return result if result["run"] == asdict(run) else None


def train(
    run: Run, folder: Path, root: Path | None, device: str = "cpu", download: bool = False, stop: Event | None = None
) -> None:
    """Train or resume training, unless it is finished; store the model in a folder.

    Parameters
    ----------
    run, folder, root, device, download
        As in :func:`execute`.
    stop : Event, optional
        For threads that cannot be interrupted: once set, training stops at the end of the epoch and can be resumed.
    """
    if is_trained(folder):
        return
    folder.mkdir(parents=True, exist_ok=True)
    X, y = training_data(run, root, download)
    X_test, y_test = test_data(run.data, run.scale, root, download)
    images, labels = torch.from_numpy(X_test).to(choose_device(device)), torch.from_numpy(y_test)

    def watch(trainer: Trainer, record: dict[str, Any]) -> None:
        net = trainer.net
        if record["stage"] == "pretrain":
            write_filters(folder / "pretrained.npy", net.W[0])
        elif run.kind != "energy":
            with torch.no_grad():
                guess = net.infer(images.to(net.W[0])).output.argmax(-1).cpu()
            record["test_accuracy"] = float((guess == labels).double().mean())
        if stop is not None and stop.is_set():
            trainer.interrupt()

    options: dict[str, Any] = {"checkpoint": folder / "state.ckpt", "log": folder / "log.jsonl", "resume": True}
    fresh = run.estimator(callbacks=(watch,), device=device, **options)
    fresh.fit(X, y)
    write_filters(folder / "filters.npy", fresh.network_.W[0])
    fresh.set_params(callbacks=(), checkpoint=None, log=None, resume=False, device=choose_device(device).type)
    save(fresh, _model_file(folder))
    (folder / "state.ckpt").unlink(missing_ok=True)


def is_trained(folder: Path) -> bool:
    """Whether the training of a run is finished."""
    return _model_file(folder).is_file()


def _model_file(folder: Path) -> Path:
    return folder / "model.safetensors"


def write_filters(path: Path, weights: torch.Tensor) -> None:
    """Store first-layer weights as an array file, written atomically."""
    buffer = io.BytesIO()
    np.save(buffer, weights.detach().cpu().to(torch.float16).numpy(), allow_pickle=False)
    write_bytes(path, buffer.getvalue())
