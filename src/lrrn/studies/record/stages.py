"""Execute a row stage by stage: train, certify, certify per sample, attack. All results are stored in the row's folder.

A stage that processes single images saves its results at intervals. It can be stopped at any time, by an interrupt or by a
deadline, and resumed here or, with a copy of the folder, on another machine.

``execute``, ``finished`` and ``is_trained`` are not those of the paper's runs, which have one result and always a model file.
"""

from __future__ import annotations

import io
import json
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray

from lrrn.attacks.autoattack import SLACK, autoattack
from lrrn.certificates.branching import LEAVES
from lrrn.datasets import image_shape
from lrrn.estimators import LRRNClassifier
from lrrn.persistence.published import read_radii
from lrrn.persistence.serialization import load, save
from lrrn.persistence.shipped import check_digest, located, shipped_models
from lrrn.persistence.values import plain
from lrrn.runtime.storage import write_bytes
from lrrn.studies.record import baselines
from lrrn.studies.record.baselines.learners import LEARNERS
from lrrn.studies.record.branches import raised
from lrrn.studies.record.contenders import BRANCHED, LOCAL, SHARED, Contender, Lifted, Plain
from lrrn.studies.record.data import compared_at, sizes_of
from lrrn.studies.record.rows import Extent, Row, images

Array = NDArray[Any]
MULTIPLIER = "multiplier"
STAGES = ("train", "certify", MULTIPLIER, SHARED, BRANCHED, LOCAL, "attack", "autoattack")
"""All stages, in order: the multiplier bounds of wide networks take minutes, and are a stage of their own."""
USUAL = tuple(stage for stage in STAGES if stage != BRANCHED)
"""Stages that run if none are chosen: branches take hours on a CPU."""
SAVE_SECONDS = 20.0
"""Seconds between saves of a stage's results."""
CHUNKS = {"certify": 2000, SHARED: 500, BRANCHED: 50, LOCAL: 4, "attack": 100, "autoattack": 50}
"""Chunk size: number of images processed at once, by stage. Few of those of ``BRANCHED`` are near a size."""
MANY, MANY_BRANCHED = 500, 1000
"""Chunk sizes for attacks and for branches on a GPU, where one image takes as long as many."""
ATTACK, AUTOATTACK, UNCLIPPED, RIGHT = "attack", "autoattack", "autoattack-unclipped", "right"
"""Files besides one file of radii per method: attack distances, and whether the label is correct. AutoAttack runs twice: on
images that stay in [0, 1], and without that limit."""
PUBLISHED = "attack-published"
"""File of the attack distances that were published with the weights of a row: those of earlier runs, and the nearest of all."""
BY_ATTACK = ("by our attacks", "AutoAttack", "AutoAttack, not clipped", "seconds")
"""Figures of single attacks, by the names in reports."""
FACTS = (
    *("row", "recipe", "seed", "samples", "tests", "methods", "by sample", "parameters"),
    *("seconds of training", "device of training", "versions"),
)
"""What is known of a trained row, by the names in files and reports."""


@final
@dataclass(frozen=True)
class Effort:
    """How much to measure.

    Attributes
    ----------
    stages : tuple of str
        Some of ``STAGES``.
    images : int
        Number of images, counted from the first, for local radii and our attacks.
    autoattack : int
        Number of images for AutoAttack.
    steps, queries : int
        Settings of AutoAttack.
    bound_seconds : float
        Time budget of the multiplier bounds.
    branches : int
        Largest number of branches of an image and a pair of classes.
    deadline : float or None
        Time, as of ``time.time()``, after which no further images are started.
    """

    stages: tuple[str, ...] = USUAL
    images: int = 1000
    autoattack: int = 100
    steps: int = 100
    queries: int = 5000
    bound_seconds: float = 300.0
    branches: int = LEAVES
    deadline: float | None = None

    def __post_init__(self) -> None:
        strange = [stage for stage in self.stages if stage not in STAGES]
        if strange or not self.stages:
            raise ValueError(f"unknown stage {(strange or [''])[0]!r}; use some of {', '.join(STAGES)}")
        if min(self.images, self.autoattack) < 0:
            raise ValueError(f"numbers of images must be at least 0; got {self.images} and {self.autoattack}")
        if self.branches < 1:
            raise ValueError(f"branches must be at least 1; got {self.branches}")

    @property
    def is_over(self) -> bool:
        """Whether the deadline has passed."""
        return self.deadline is not None and time.time() >= self.deadline


def execute(row: Row, folder: Path, root: Path | None, device: str, download: bool, effort: Effort) -> None:
    """Execute the unfinished stages of a row.

    Parameters
    ----------
    row : Row
    folder : Path
        Folder of the row.
    root : Path, optional
        Folder with the data.
    device : {"cpu", "cuda"}
    download : bool
        Whether missing data may be downloaded.
    effort : Effort

    Raises
    ------
    ValueError
        Branches are wanted, and neither are there radii to start from nor are they wanted.
    """
    if finished(row, folder, effort):
        return
    folder.mkdir(parents=True, exist_ok=True)
    (X, y), (X_test, y_test) = images(row.data, row.extent, root, download)
    if "train" in effort.stages and not is_trained(folder) and not effort.is_over:
        _train(row, folder, X, y, len(X_test), device)
    if not is_trained(folder):
        return
    contender = _contender(row, folder, X, y, device, effort)
    for stage, work, n in _measurements(row, folder, contender, X_test, y_test, effort):
        chunk, told = min(_chunk(stage, device), contender.rows_at_once), {"device": device_name(device)}
        if stage == f"radii-{BRANCHED}":
            n, told = _startable(folder, n, effort), {**told, "branches": str(effort.branches)}
        _in_chunks(folder, stage, work, min(n, len(X_test)), effort, (chunk, told))


def _measurements(
    row: Row, folder: Path, contender: Contender, X: Array, y: Array, effort: Effort
) -> list[tuple[str, Callable[[slice], Array], int]]:
    """Return the function to apply and the images to apply it to, by the name of the file that stores the results."""
    todo: list[tuple[str, Callable[[slice], Array], int]] = []
    for method in contender.methods:
        if _stage_of(method) in effort.stages:
            todo.append((f"radii-{method}", partial(_radii, contender, X, method), len(X)))
    if "certify" in effort.stages:
        todo.append((RIGHT, lambda some: contender.predict(X[some]) == y[some], len(X)))
    works = {method: partial(_radii, contender, X, method) for method in (SHARED, LOCAL)}
    works[BRANCHED] = partial(_branched, row, folder, contender, X, effort)
    for method, n in _by_sample(contender.by_sample, len(X), effort):
        todo.append((f"radii-{method}", works[method], n))
    sizes = tuple(sizes_of(row.data).values())
    if ATTACK in effort.stages:
        todo.append((ATTACK, lambda some: contender.attack(X[some], y[some], sizes, row.seed), effort.images))
    if AUTOATTACK in effort.stages and find_spec("torchattacks") is not None:
        for name in (AUTOATTACK, UNCLIPPED):
            work = partial(_autoattacked, row, contender, X, y, effort, name == AUTOATTACK)
            todo.append((name, work, effort.autoattack))
    return todo


def _by_sample(available: Sequence[str], n: int, effort: Effort) -> list[tuple[str, int]]:
    """Return the certificates per sample that are wanted, in order, and the number of images of each."""
    wanted = ((SHARED, SHARED, n), (BRANCHED, SHARED, n), (LOCAL, LOCAL, min(effort.images, n)))
    return [(method, images) for method, needs, images in wanted if method in effort.stages and needs in available]


def _startable(folder: Path, n: int, effort: Effort) -> int:
    """Return the number of images that have what branches start from; raise if more are needed and nothing makes them."""
    there = min(len(kept(folder, name)[0]) for name in (RIGHT, f"radii-{SHARED}"))
    if there < n and not {"certify", SHARED} <= {*effort.stages}:
        raise ValueError(f"the stage {BRANCHED} starts from the results of certify and {SHARED}; run these stages too")
    return there


def _branched(row: Row, folder: Path, contender: Contender, X: Array, effort: Effort, some: slice) -> Array:
    """Return radii with branches, towards the sizes at which the data set compares; those of ``SHARED`` elsewhere."""
    radius = kept(folder, f"radii-{SHARED}")[0][some]
    best = radius.copy()
    for method in (*contender.methods, LOCAL):
        found = kept(folder, f"radii-{method}")[0][some]
        best[: len(found)] = np.maximum(best[: len(found)], found)
    sizes = [sizes_of(row.data)[size] for size in compared_at(row.data)]
    return raised(contender, X[some], kept(folder, RIGHT)[0][some], radius, best, sizes, effort.branches)


def _stage_of(method: str) -> str:
    return MULTIPLIER if method == MULTIPLIER else "certify"


def _radii(contender: Contender, X: Array, method: str, some: slice) -> Array:
    return contender.radii(X[some], method)


def finished(row: Row, folder: Path, effort: Effort) -> bool:
    """Whether all requested stages that can run on this machine are finished."""
    if not is_trained(folder):
        return "train" not in effort.stages or row.obstacle() is not None
    facts = training_facts(folder)
    # rows that were trained before there were convolutions have both
    by_sample = facts.get("by sample", (SHARED, LOCAL) if row.is_ours else ())
    wanted: dict[str, int] = {}
    if "certify" in effort.stages:
        wanted[RIGHT] = facts["tests"]
    wanted |= {f"radii-{method}": facts["tests"] for method in facts["methods"] if _stage_of(method) in effort.stages}
    wanted |= {f"radii-{method}": n for method, n in _by_sample(by_sample, facts["tests"], effort)}
    if ATTACK in effort.stages:
        wanted[ATTACK] = min(effort.images, facts["tests"])
    if AUTOATTACK in effort.stages and find_spec("torchattacks") is not None:
        wanted |= dict.fromkeys((AUTOATTACK, UNCLIPPED), min(effort.autoattack, facts["tests"]))
    return all(len(kept(folder, name)[0]) >= n for name, n in wanted.items())


# --- training ---------------------------------------------------------------------------------------------------------


def is_trained(folder: Path) -> bool:
    """Whether training is finished."""
    return (folder / "training.json").is_file()


def training_facts(folder: Path) -> dict[str, Any]:
    """Return metadata of the training: recipe, seconds, device, versions."""
    facts: dict[str, Any] = json.loads((folder / "training.json").read_text())
    return facts


def _train(row: Row, folder: Path, X: Array, y: Array, n_tests: int, device: str) -> None:
    """Train or resume training, and store the model."""
    start = time.perf_counter()
    if row.is_ours:
        options: dict[str, Any] = {"checkpoint": folder / "state.ckpt", "log": folder / "log.jsonl", "resume": True}
        model = LRRNClassifier(**row.recipe, random_state=row.seed, device=device, **options).fit(X, y)
        contender: Contender = Lifted(model, 0.0)
        seconds = float(sum(record["seconds"] for record in model.history_))
        model.set_params(checkpoint=None, log=None, resume=False)
        save(model, _model_file(folder))
    else:
        learner = LEARNERS[row.kind]
        baseline = learner.learn(X, y, row.recipe, row.seed, device, folder)
        contender = Plain(baseline)
        log = folder / "log.jsonl"
        lines = log.read_text().splitlines() if log.is_file() else []
        # includes epochs before an interruption
        seconds = sum(json.loads(line)["seconds"] for line in lines) if lines else time.perf_counter() - start
        if learner.keeps:
            baselines.save(baseline, _model_file(folder))
    versions = {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__}
    about = (row.name, row.recipe, row.seed, len(X), n_tests, contender.methods, contender.by_sample, contender.n_parameters)
    facts = dict(zip(FACTS, (*about, seconds, device_name(device), versions), strict=True))
    write_bytes(folder / "training.json", (json.dumps(facts, indent=1, default=plain) + "\n").encode())
    (folder / "state.ckpt").unlink(missing_ok=True)


def adopt(row: Row, folder: Path, before: dict[str, Any] | None) -> None:
    """Take the weights that ship as the model of a row that is not trained here; does nothing for rows that do not ship.

    ``before`` are the figures of the row in an earlier report, which has the facts of its training. Its attacks count until the
    row is attacked here: new radii are compared with the distances that were published with the weights.

    Raises
    ------
    FileFormatError
        A shipped file does not have its published digest.
    ValueError
        The row ships, and no earlier report has it: its recipe may have changed since.
    """
    place = (row.data, row.kind, row.seed)
    model = next((one for one in shipped_models().values() if (one.data, one.row, one.seed) == place), None)
    if model is None or is_trained(folder) or row.extent != Extent():
        return
    if before is None:
        raise ValueError(f"the weights of {row.name} ship, but the report has no such row; train it without --shipped")
    weights = located(model.name)
    folder.mkdir(parents=True, exist_ok=True)
    write_bytes(_model_file(folder), weights.read_bytes())
    if "attacks" in before:
        check_digest(model.radii_path, model.radii_sha256)
        known, attacks = read_radii(model.radii_path), before["attacks"]
        distance = np.where(known.right, known.attack, 0.0)[: attacks["images"]]
        if not np.isnan(distance).any():
            _keep(folder, PUBLISHED, distance, {name: attacks[name] for name in BY_ATTACK})
    facts = {name: before[name] for name in FACTS if name in before}
    write_bytes(folder / "training.json", (json.dumps(facts, indent=1) + "\n").encode())


def device_name(device: str) -> str:
    """Return the vendor's name of a device."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    return platform.processor() or platform.machine()


def _model_file(folder: Path) -> Path:
    return folder / "model.safetensors"


def _contender(row: Row, folder: Path, X: Array, y: Array, device: str, effort: Effort) -> Contender:
    if row.is_ours:
        model = load(_model_file(folder), device)
        assert isinstance(model, LRRNClassifier)
        return Lifted(model, effort.bound_seconds)
    learner = LEARNERS[row.kind]
    if learner.keeps:
        return Plain(baselines.load(_model_file(folder), device))
    return Plain(learner.learn(X, y, row.recipe, row.seed, device, None).to(device))


# --- measuring --------------------------------------------------------------------------------------------------------


def kept(folder: Path, name: str) -> tuple[Array, dict[str, Any]]:
    """Return the stored results of a stage so far, one entry per image, and their metadata: seconds and device."""
    path = folder / f"{name}.npz"
    if not path.is_file():
        return np.zeros(0), {"seconds": 0.0}
    with np.load(path, allow_pickle=False) as file:
        return file["values"], json.loads(str(file["facts"]))


def _keep(folder: Path, name: str, values: Array, facts: dict[str, Any]) -> None:
    buffer = io.BytesIO()
    np.savez(buffer, values=values, facts=np.array(json.dumps(facts)))
    write_bytes(folder / f"{name}.npz", buffer.getvalue())


def _chunk(name: str, device: str) -> int:
    """Return the number of images to process at once."""
    if device.startswith("cuda") and name in (ATTACK, AUTOATTACK, UNCLIPPED):
        return MANY
    if device.startswith("cuda") and name == f"radii-{SHARED}":
        return CHUNKS["certify"]
    if device.startswith("cuda") and name == f"radii-{BRANCHED}":
        return MANY_BRANCHED
    return CHUNKS.get(name.removeprefix("radii-").removesuffix("-unclipped"), CHUNKS["certify"])


def _in_chunks(
    folder: Path, name: str, work: Callable[[slice], Array], n: int, effort: Effort, how: tuple[int, Mapping[str, str]]
) -> None:
    """Resume at the first unprocessed image, process the rest in chunks, and save the results at intervals.

    ``how`` is the number of images to process at once, and the facts to store, such as the device. If a stage is resumed with
    others, both are stored.
    """
    values, facts = kept(folder, name)
    chunk, told = how
    saved = time.monotonic()
    done = len(values)
    while len(values) < n and not effort.is_over:
        start = time.perf_counter()
        found = work(slice(len(values), min(len(values) + chunk, n)))
        values = np.concatenate([values, found]) if len(values) else found
        facts = {"seconds": facts["seconds"] + time.perf_counter() - start} | {
            key: ", ".join(dict.fromkeys([*filter(None, facts.get(key, "").split(", ")), value])) for key, value in told.items()
        }
        if time.monotonic() - saved > SAVE_SECONDS:
            _keep(folder, name, values, facts)
            saved, done = time.monotonic(), len(values)
    if len(values) > done:
        _keep(folder, name, values, facts)


def _autoattacked(row: Row, contender: Contender, X: Array, y: Array, effort: Effort, clip: bool, some: slice) -> Array:
    """Return the attack distances of AutoAttack: 0 where the label is already wrong, inf where no attack succeeds."""
    X, y = X[some], y[some]
    distances = np.where(contender.predict(X) == y, np.inf, 0.0)
    shape = image_shape(row.data, X.shape[1])
    model, options = contender.image_model(shape), {"steps": effort.steps, "queries": effort.queries, "seed": row.seed}
    for eps in (sizes_of(row.data)[size] for size in compared_at(row.data)):
        # rounding to float32 may enlarge a perturbation by this much, and it should stay within eps
        autoattack(model, contender.predict, X, y, y, distances, eps * (1 - 2 * SLACK), shape, clip, **options)
    return distances
