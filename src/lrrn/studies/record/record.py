"""Run the record in one call: train, certify and attack our networks and the baselines on one data set, and report."""

from __future__ import annotations

import logging
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

import torch

from lrrn.studies.common import report
from lrrn.studies.common.pool import in_processes
from lrrn.studies.common.sections import Section
from lrrn.studies.record import record_report
from lrrn.studies.record.data import NAMES
from lrrn.studies.record.earlier import FILE, ITEM, earlier
from lrrn.studies.record.recipes import ROWS
from lrrn.studies.record.rows import Extent, Row, images, plan
from lrrn.studies.record.scores import disagreements, figures
from lrrn.studies.record.stages import USUAL, Effort, adopt, execute, finished

logger = logging.getLogger("lrrn.studies.record")

QUICK = Extent(samples=1000, tests=100, quick=True)
QUICK_EFFORT = {"images": 5, "autoattack": 2, "steps": 5, "queries": 20, "bound_seconds": 1.0, "branches": 16}


@final
@dataclass(frozen=True)
class Record:
    """Result of a record.

    Attributes
    ----------
    sections : list of Section
        Tables and figures.
    table : list of str, list of list of str
        The main figures: headings and rows.
    failed : dict of str to str
        Failed rows and the reasons.
    disagreements : list of str
        Where an attack contradicts a certificate: none, unless there is a bug.
    seconds : float
        Wall time of this call.
    """

    sections: list[Section]
    table: tuple[list[str], list[list[str]]]
    failed: dict[str, str]
    disagreements: list[str]
    seconds: float


@final
@dataclass(frozen=True)
class Options:
    """What to run of a record, and how.

    Attributes
    ----------
    rows : sequence of str, optional
        Which rows of ``recipes.rows_of(data)`` to execute, or single seeds such as "wide:1"; all if not given. The report
        has all rows with results in the folder of the work or in an earlier report.
    seeds : int, default=3
        Number of seeds for rows that depend on the seed.
    validation : bool, default=False
        Train on the first five sixths of the training images and measure on the rest, to choose recipes. Test images are
        not loaded.
    stages : sequence of str
        Some of "train", "certify", "multiplier", "shared", "branched", "local", "attack" and "autoattack"; if not given, all
        but "branched".
    n_images : int, optional
        Number of images, counted from the first, for local radii and attacks; 1,000 if not given.
    n_autoattack : int, optional
        Number of images for AutoAttack, which runs if torchattacks is installed; 100 if not given.
    branches : int, optional
        Largest number of branches of an image and a pair of classes in the stage "branched"; 2048 if not given.
    budget : float, optional
        Seconds after which no further images are started; training is not cut short.
    quick : bool, default=False
        A smoke test on small networks and part of the data, which takes a minute.
    jobs : int, optional
        Number of parallel rows; by default one on a GPU and the number of cores elsewhere.
    root : path-like, optional
        Folder with the data; LRRN_DATA if not given.
    seed : int, default=0
        The first seed.
    device : {"cpu", "cuda"}, default="cpu"
    download : bool, default=True
        Whether missing data may be downloaded.
    report_only : bool, default=False
        Report on existing results and start nothing.
    shipped : bool, default=False
        Measure the weights that ship instead of training these rows again.
    """

    rows: Sequence[str] | None = None
    seeds: int = 3
    validation: bool = False
    stages: Sequence[str] = USUAL
    n_images: int | None = None
    n_autoattack: int | None = None
    branches: int | None = None
    budget: float | None = None
    quick: bool = False
    jobs: int | None = None
    root: str | os.PathLike[str] | None = None
    seed: int = 0
    device: str = "cpu"
    download: bool = True
    report_only: bool = False
    shipped: bool = False

    def __post_init__(self) -> None:
        if self.jobs is not None and self.jobs < 1:
            raise ValueError(f"jobs must be at least 1; got {self.jobs}")
        if self.budget is not None and not self.budget > 0:
            raise ValueError(f"budget must be above 0 seconds; got {self.budget}")

    @property
    def extent(self) -> Extent:
        """Part of the data to use."""
        return Extent(self.validation, QUICK.samples, QUICK.tests, True) if self.quick else Extent(self.validation)

    def effort(self) -> Effort:
        """Return the stages and the numbers of images; the time budget starts now."""
        changes: dict[str, Any] = dict(QUICK_EFFORT) if self.quick else {}
        changes |= {"images": self.n_images} if self.n_images is not None else {}
        changes |= {"autoattack": self.n_autoattack} if self.n_autoattack is not None else {}
        changes |= {"branches": self.branches} if self.branches is not None else {}
        deadline = None if self.budget is None else time.time() + self.budget
        return Effort(stages=tuple(self.stages), deadline=deadline, **changes)


def record(data: str, work: str | os.PathLike[str], output: str | os.PathLike[str], options: Options | None = None) -> Record:
    """Train, certify and attack networks and baselines, and write the report.

    Finished rows are not repeated; interrupted ones resume. A row is identified by its recipe, so a changed recipe starts from
    scratch. Rows and stages may run on several machines if the folder ``work`` is copied from one to the next.

    Rows that are not certified in ``work`` keep their figures in the ``results.json`` of ``output``, if that file is about the
    same data set and the same images. So a row that is trained again keeps its earlier figures until it has certificates. Rows
    that are certified in ``work`` replace earlier figures.

    Parameters
    ----------
    data : {"mnist", "fashion_mnist", "kmnist", "kmnist_7011", "cifar10"}
    work : path-like
        Folder for models, checkpoints and measurements, with one subfolder per row.
    output : path-like
        Folder for ``report.md``, ``report.html``, ``results.json`` and the figures.
    options : Options, optional

    Returns
    -------
    Record

    Raises
    ------
    lrrn.runtime.storage.FileFormatError
        The ``results.json`` in ``output`` is damaged or belongs to another record. Nothing is started or replaced in this case.
    """
    start, options = time.perf_counter(), options or Options()
    extent, seeds = options.extent, 1 if options.quick else options.seeds
    effort = options.effort()
    chosen = plan(data, options.rows, seeds, options.seed, extent)
    planned = plan(data, None, seeds, options.seed, extent)
    before = earlier(Path(output), data, extent)  # raises before any work is done if the file cannot be read
    folder = Path(work) / ("record-quick" if options.quick else "record")
    for place in (folder, Path(output)):
        place.mkdir(parents=True, exist_ok=True)
    if options.shipped and not options.report_only:
        for row in chosen:
            adopt(row, folder / row.name, before.get(row))
    failed = {} if options.report_only else _executed(data, chosen, folder, options, effort)
    before = earlier(Path(output), data, extent)  # again: another process may have written it in the meantime
    everything = sorted({*planned, *before}, key=lambda row: (ROWS.index(row.kind), row.seed))
    here = {row: figures(folder / row.name) for row in everything}
    results = {row: found for row in everything if (found := here[row] or before.get(row)) is not None}
    taken_over = [row for row in results if here[row] is None]
    reasons = {row: _reason(row, failed) for row in everything if row not in results}
    sections = record_report.sections(data, everything, results, reasons)
    report.write(Path(output), sections, _preface(data, extent, results, taken_over), _title(data, extent))
    _write_json(Path(output), data, extent, sections, results, reasons)
    wrong = [f"{row.name}: {what}" for row, result in results.items() for what in disagreements(result)]
    brief = record_report.brief(data, everything, results)
    return Record(sections, brief, {row.name: why for row, why in failed.items()}, wrong, time.perf_counter() - start)


def _executed(data: str, rows: Sequence[Row], folder: Path, options: Options, effort: Effort) -> dict[Row, str]:
    """Execute rows in processes of their own; return those that failed, and why."""
    root, device = None if options.root is None else Path(options.root), options.device
    images(data, options.extent, root, options.download)  # checks all data before any work is done
    jobs = options.jobs or (1 if device.startswith("cuda") else os.cpu_count() or 1)

    def done(row: Row, place: Path) -> Any:
        return finished(row, place, effort)

    # baselines train fast and are needed in any case, so rows keep the order of the table
    arguments = (root, device, options.download, effort)
    return in_processes(rows, folder, jobs, execute, arguments, done, one_thread=jobs > 1)


def _reason(row: Row, failed: dict[Row, str]) -> str:
    if row in failed:
        return f"failed ({failed[row]})"
    return row.obstacle() or "not finished"


def _title(data: str, extent: Extent) -> str:
    return f"Certified accuracy on {NAMES[data]}" + (", validation images" if extent.validation else "")


def _preface(data: str, extent: Extent, results: dict[Row, dict[str, Any]], taken_over: Sequence[Row]) -> list[str]:
    options = f"{' --validation' if extent.validation else ''}{' --quick' if extent.quick else ''}"
    text = [
        f"Made by `lrrn record {data}{options}`: {len(results)} training runs.",
        "Recipes were chosen on a validation split, trained on the first five sixths of the training images and measured on "
        "the last sixth (`--validation`), or are those that a baseline's authors published. Test images played no part in it.",
    ]
    if extent.validation:
        text.append(
            "This report is such a measurement: networks have seen five sixths of the training images, and no test image."
        )
    if extent.quick:
        text.append("This is a smoke run of small networks on a part of the data: its figures mean nothing.")
    if taken_over:
        seeds: dict[str, list[str]] = {}
        for row in taken_over:
            seeds.setdefault(row.title, []).append(str(row.seed))
        told = "; ".join(f"{title}, seed{'s' * (len(some) > 1)} {', '.join(some)}" for title, some in seeds.items())
        text.append(f"Taken over from an earlier report: {told}.")
    return text


def _write_json(
    output: Path,
    data: str,
    extent: Extent,
    sections: Sequence[Section],
    results: dict[Row, dict[str, Any]],
    reasons: dict[Row, str],
) -> None:
    content = {
        "item": ITEM,
        "data": data,
        "extent": asdict(extent),
        "machine": {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "torch": torch.__version__,
        "comparisons": [
            {**asdict(comparison), "verdict": comparison.verdict} for section in sections for comparison in section.comparisons
        ],
        "not run": {row.name: reason for row, reason in reasons.items()},
        "rows": {row.name: {"title": row.title, **result} for row, result in results.items()},
    }
    report.write_results(output / FILE, content)
