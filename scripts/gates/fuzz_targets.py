"""Targets of the fuzzer. Each writes an input, passes it to the library, and states which errors are documented for it."""

from __future__ import annotations

import io
import json
import os
import random
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from sklearn.decomposition import PCA
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import StandardScaler

import fuzz_inputs as inputs
import lrrn
from lrrn import datasets
from lrrn.datasets import cifar
from lrrn.learning import Contrastive, Data, Settings, Trainer, checkpoint
from lrrn.persistence import published, serialization
from lrrn.runtime import storage
from lrrn.studies.record.earlier import FILE, earlier
from lrrn.studies.record.record_report import brief, sections
from lrrn.studies.record.rows import Extent, Row

Chance = random.Random
FORBIDDEN = {"pickle.find_class", "os.system", "subprocess.Popen", "os.posix_spawn", "os.exec", "os.fork", "socket.connect"}


class Undocumented(AssertionError):
    """The library showed undocumented behaviour."""


@final
class Watch:
    """Audit hook of the interpreter: while the library reads, it must not unpickle, start programs, connect or write."""

    def __init__(self) -> None:
        self._on, self._seen = False, list[str]()
        sys.addaudithook(self._heard)

    def _heard(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._on:
            return
        if event in FORBIDDEN:
            self._seen.append(f"{event} {arguments[:2]}")
        elif event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            self._seen.append(f"open {arguments[0]!r} for writing")

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Watch the block, and raise :class:`Undocumented` if a forbidden event occurred."""
        self._seen.clear()
        self._on = True
        try:
            yield
        finally:
            self._on = False
        if self._seen:
            raise Undocumented(f"the input made the library do this: {self._seen}")


class Target(ABC):
    """An entry point of the library.

    Attributes
    ----------
    name : str
    share : int
        Percentage of the inputs for this target.
    """

    name: str
    share: int

    def __init__(self, folder: Path, canary: Path) -> None:
        self.folder, self.canary, self.watched = folder, str(canary), Watch()
        self.last: Any = None

    @abstractmethod
    def __call__(self, chance: Chance) -> str:
        """Test one input; return the outcome, or raise :class:`Undocumented`."""

    def write(self, name: str, content: bytes) -> Path:
        path = self.folder / name
        path.write_bytes(content)
        self.last = content
        return path

    def attempt(self, documented: type[Exception], path: Path, call: Any) -> str:
        try:
            with self.watched():
                call()
        except Undocumented:
            raise
        except documented as error:
            if type(error) is not documented:
                raise Undocumented(f"{type(error).__name__} where {documented.__name__} is documented: {error}") from error
            if str(path) not in str(error):
                raise Undocumented(f"the error does not name the file: {error}") from error
            cause = error.__cause__ or error.__context__
            if isinstance(cause, MemoryError) and "do not fit into memory" not in str(error):
                raise Undocumented(f"the header made the library run out of memory: {error}") from error
            return "refused"
        except Exception as error:
            raise Undocumented(f"{type(error).__name__}: {error}") from error
        return "accepted"


def table() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.random((12, 3)), np.arange(12) % 2


def npy_of(array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


@final
class Idx(Target):
    """``datasets.read_idx``."""

    name, share = "idx", 12
    valid = b"\0\0\x08\3" + np.array([3, 2, 2], ">u4").tobytes() + bytes(range(12))

    def __call__(self, chance: Chance) -> str:
        content, packed = inputs.idx(chance, self.valid)
        path = self.write("t.gz" if packed else "t", content)
        return self.attempt(datasets.DataError, path, lambda: datasets.read_idx(path))


@final
class Cifar(Target):
    """A file of CIFAR-10: only the published one is read, and it is not at hand here."""

    name, share = "cifar", 2
    valid = bytes(2 * cifar.RECORD)

    def __call__(self, chance: Chance) -> str:
        path = self.write("test_batch.bin", inputs.damaged(self.valid, chance, bytes(cifar.RECORD)))
        return self.attempt(datasets.DataError, path, lambda: cifar.read_files([path]))


@final
class Npy(Target):
    """``datasets.read_table`` of a .npy file, sometimes with another one for targets."""

    name, share = "npy", 15

    def __call__(self, chance: Chance) -> str:
        X, y = (npy_of(array) for array in table())
        bad = chance.choice(["X", "X", "y"])
        y_path = self.write("y.npy", inputs.npy(chance, self.canary, y) if bad == "y" else y)
        path = self.write("X.npy", inputs.npy(chance, self.canary, X) if bad == "X" else X)
        target = str(y_path) if bad == "y" or chance.random() < 0.3 else chance.choice([None, "none", "", "\0", "label"])
        return self.attempt(datasets.DataError, self.folder, lambda: datasets.read_table(path, target))


@final
class Npz(Target):
    """``datasets.read_table`` of a .npz file."""

    name, share = "npz", 17

    def __call__(self, chance: Chance) -> str:
        X, y = (npy_of(array) for array in table())
        path = self.write("t.npz", inputs.npz(chance, self.canary, X, y))
        target = chance.choice([None, "none"])
        return self.attempt(datasets.DataError, path, lambda: datasets.read_table(path, target))


@final
class Parquet(Target):
    """``datasets.read_table`` of a .parquet file."""

    name, share = "parquet", 8

    def __init__(self, folder: Path, canary: Path) -> None:
        super().__init__(folder, canary)
        import pyarrow
        from pyarrow import parquet

        X, y = table()
        self.valid = []
        for labels in (y, np.array(["a", "b"])[y]):
            stream = io.BytesIO()
            columns = {f"f{j}": np.ascontiguousarray(column) for j, column in enumerate(X.T)}
            parquet.write_table(pyarrow.table({**columns, "y": labels}), stream, row_group_size=5)
            self.valid.append(stream.getvalue())

    def __call__(self, chance: Chance) -> str:
        path = self.write("t.parquet", inputs.damaged(chance.choice(self.valid), chance, self.valid[0]))
        target = chance.choice([None, None, "none", "y", "f0", "no"])
        return self.attempt(datasets.DataError, path, lambda: datasets.read_table(path, target))


@final
class Csv(Target):
    """``datasets.read_table`` of a .csv or .tsv file, sometimes with the columns of a model or some to leave out."""

    name, share = "csv", 15

    def __call__(self, chance: Chance) -> str:
        path = self.write(chance.choice(["t.csv", "t.csv", "t.tsv"]), inputs.csv(chance))
        target = chance.choice(inputs.TARGETS)
        options = {
            "delimiter": chance.choice([None, None, None, ",", ";", "|"]),
            "features": chance.choice([None, None, None, 0, 2, 3, ["f0", "f1"], ["a"], []]),
            "drop": chance.choice([(), (), (), ("f0",), ("1", "1"), ("",)]),
        }
        return self.attempt(datasets.DataError, path, lambda: datasets.read_table(path, target, **options))


@final
class Load(Target):
    """``lrrn.load``, the reader of a model's reference, and a prediction with the loaded model."""

    name, share = "load", 13

    def __init__(self, folder: Path, canary: Path) -> None:
        super().__init__(folder, canary)
        self.valid = [path.read_bytes() for path in models(folder)]

    def __call__(self, chance: Chance) -> str:
        valid = chance.choice(self.valid)
        path = self.write("m.safetensors", inputs.safetensors(chance, self.canary, valid, self.valid[0]))
        loaded: list[Any] = []
        outcome = self.attempt(storage.FileFormatError, path, lambda: loaded.append(lrrn.load(path)))
        if outcome == "accepted" and not isinstance(loaded[0], lrrn.LRRN):
            self.attempt(storage.FileFormatError, path, lambda: serialization.load_reference(path))
            self.attempt(storage.FileFormatError, path, lambda: self.use(loaded[0]))
        return outcome

    def use(self, model: Any) -> None:
        X = table()[0][:2]
        model.predict(X)
        if not isinstance(model, Pipeline):
            model.energy(X)


@final
class Checkpoint(Target):
    """Resuming a run: a rejected checkpoint must leave network and optimiser unchanged."""

    name, share = "checkpoint", 11

    def __init__(self, folder: Path, canary: Path) -> None:
        super().__init__(folder, canary)
        X, y = table()
        target = torch.nn.functional.one_hot(torch.as_tensor(y), 2).float()
        data = Data(torch.as_tensor(X, dtype=torch.float32), target, torch.as_tensor(y))
        net = lrrn.LRRN((3, 4, 2), generator=torch.Generator().manual_seed(0), dtype=torch.float32)
        path = folder / "run.ckpt"
        self.trainer = Trainer(net, Contrastive(), Settings(epochs=2, batch_size=4, optimizer="adam"), checkpoint=path)
        self.trainer.fit(data)
        self.identity, self.valid = self.trainer._identity(data), path.read_bytes()
        self.before = [p.detach().clone() for p in net.parameters()]

    def __call__(self, chance: Chance) -> str:
        path = self.write("run.ckpt", inputs.safetensors(chance, self.canary, self.valid, self.valid))
        trainer = self.trainer
        state = json.dumps(trainer.optimizer.state_dict(), default=torch.Tensor.tolist)
        try:
            with self.watched():
                checkpoint.peek(path)
                checkpoint.restore(path, self.identity, trainer._carried(), trainer.optimizer)
        except Undocumented:
            raise
        except storage.FileFormatError as error:
            outcome = self._told(path, error)
        except ValueError as error:
            if "belongs to another run" not in str(error):
                raise Undocumented(f"{type(error).__name__}: {error}") from error
            outcome = self._told(path, error)
        except Exception as error:
            raise Undocumented(f"{type(error).__name__}: {error}") from error
        else:
            outcome = "accepted"
        now = json.dumps(trainer.optimizer.state_dict(), default=torch.Tensor.tolist)
        same = now == state and all(torch.equal(a, b) for a, b in zip(self.before, trainer.net.parameters(), strict=True))
        if outcome == "refused" and not same:
            raise Undocumented("a checkpoint that was refused changed the run")
        if not same:
            checkpoint.restore(self.write("valid.ckpt", self.valid), self.identity, trainer._carried(), trainer.optimizer)
        return outcome

    def _told(self, path: Path, error: Exception) -> str:
        if str(path) not in str(error) or isinstance(error.__cause__, MemoryError):
            raise Undocumented(f"{type(error).__name__}: {error}") from error
        return "refused"


@final
class Radii(Target):
    """``read_radii``: the published radii of a shipped model."""

    name, share = "radii", 3

    def __init__(self, folder: Path, canary: Path) -> None:
        super().__init__(folder, canary)
        path, y = folder / "valid.npz", np.arange(12) % 3
        published.write_radii(path, published.publish(y, y, np.linspace(0, 1, 12), np.full(12, np.nan)))
        self.valid = path.read_bytes()

    def __call__(self, chance: Chance) -> str:
        path = self.write("r.npz", inputs.damaged(self.valid, chance, self.valid))
        return self.attempt(storage.FileFormatError, path, lambda: published.read_radii(path))


@final
class Earlier(Target):
    """The ``results.json`` of an earlier record, and a report on accepted ones."""

    name, share = "record", 3

    def __init__(self, folder: Path, canary: Path) -> None:
        super().__init__(folder, canary)
        committed = Path(__file__).resolve().parents[2] / "docs" / "record" / "mnist" / FILE
        content = json.loads(committed.read_text())
        # row names with the current recipes
        named = {Row(name.split("-")[1], "mnist").name: row for name, row in content["rows"].items() if name.endswith("-seed0")}
        kept = list(named)[-6:-3]
        self.valid = {**content, "rows": {name: {**named[name], "row": name} for name in kept}}

    def __call__(self, chance: Chance) -> str:
        content = self.valid
        for _ in range(chance.choice([0, 1, 1, 1, 2, 3])):
            content = inputs.tree(content, chance) if isinstance(content, dict) else content
        text = json.dumps(content).encode()
        path = self.write(FILE, text if chance.random() < 0.7 else inputs.damaged(text, chance, b'"rows": {"x": NaN}'))
        found: list[Any] = []
        outcome = self.attempt(storage.FileFormatError, path, lambda: found.append(earlier(self.folder, "mnist", Extent())))
        if outcome == "accepted":
            self.attempt(
                storage.FileFormatError,
                path,
                lambda: (sections("mnist", list(found[0]), *found, {}), brief("mnist", list(found[0]), *found)),
            )
        return outcome


def models(folder: Path) -> list[Path]:
    """Write a network, three small estimators and a Pipeline, and return their files."""
    X, y = table()
    quick: dict[str, Any] = {"hidden_sizes": (4,), "epochs": 1, "random_state": 0, "device": "cpu"}
    fitted = {
        "network": lrrn.LRRN((3, 4, 2), generator=torch.Generator().manual_seed(0)),
        "classifier": lrrn.LRRNClassifier(**quick).fit(X, np.array(["a", "b"])[y]),
        "regressor": lrrn.LRRNRegressor(**quick).fit(X, X[:, :2]),
        "energy": lrrn.LRRNEnergyModel(**quick).fit(X),
        "pipeline": make_pipeline(StandardScaler(), PCA(2), lrrn.LRRNClassifier(**quick)).fit(X, y),
    }
    for name, model in fitted.items():
        lrrn.save(model, folder / f"{name}.safetensors")
    from lrrn.reports.evaluation import reference_of

    energies = {"samples": fitted["energy"].energy(X)}
    reference = reference_of(fitted["classifier"], X, np.array(["a", "b"])[y], None, "t", 3, 1.0, np.ones(12), energies)
    lrrn.save(fitted["classifier"], folder / "reference.safetensors", reference)
    return [folder / f"{name}.safetensors" for name in (*fitted, "reference")]
