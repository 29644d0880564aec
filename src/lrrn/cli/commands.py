"""The command line: parse, call, print."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Column, Table

if TYPE_CHECKING:
    from lrrn.datasets.rows import Rows
    from lrrn.estimators import LRRNClassifier
    from lrrn.reports.audit import Audit
    from lrrn.reports.evaluation import Evaluation, Model
    from lrrn.studies.common.sections import Section

app = typer.Typer(
    help="Lifted regression/reconstruction networks: prediction, certified radius and energy from one convex model.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
console = Console()

Seed = Annotated[int, typer.Option(help="Seed of everything random.")]
Device = Annotated[str, typer.Option(help="Where to compute: auto, cpu or cuda.")]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Also write the results to this file, for machines.")]
PageFile = Annotated[Path | None, typer.Option("--page", help="Write charts, filters and the table to this HTML file.")]
Root = Annotated[Path | None, typer.Option("--data", help="Folder of the MNIST family; LRRN_DATA if not given.")]
Source = Annotated[
    str,
    typer.Argument(
        help="digits, mnist, kmnist, fashion_mnist; or a .npz (arrays X, y), .npy (X), .parquet or .csv file.", metavar="DATA"
    ),
]
Target = Annotated[
    str | None,
    typer.Option(
        help="Column of a .csv or .parquet file with the target, by name or, in .csv, number; last if not given. "
        "For a .npy file another one with the targets. 'none' if there is none."
    ),
]
Samples = Annotated[
    Path | None,
    typer.Option(
        help="Write the results of each sample to this .npz or .parquet file. If interrupted, the same command goes on."
    ),
]
Eps = Annotated[str | None, typer.Option(help="Sizes of perturbations to certify, in the units of the data: 0.1,0.25,0.5.")]
SavedModel = Annotated[Path, typer.Argument(help="A model saved by lrrn train or lrrn.save.", metavar="MODEL")]
Split = Annotated[str, typer.Option(help="Of the named data sets: train or test.")]
Method = Annotated[
    str,
    typer.Option(
        help="Of the certificate: paper, pairwise, spectral, multiplier, shared, local; or auto, the best but these two."
    ),
]
ImageShape = Annotated[str | None, typer.Option("--image", help="Height and width, if samples are images: 28x28.")]


class Kind(StrEnum):
    """What to train."""

    classifier = "classifier"
    regressor = "regressor"
    energy = "energy"


@app.callback()
def main(verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log what the library decides.")] = False) -> None:
    """Set up logging for every command."""
    logging.basicConfig(level=logging.DEBUG if verbose else logging.WARNING, format="%(name)s: %(message)s")


@app.command()
def demo(
    seed: Seed = 0,
    device: Device = "auto",
    json_file: JsonFile = None,
    page: PageFile = Path("out/demo.html"),
) -> None:
    """Train two classifiers and an energy model on handwritten digits: less than a minute, without a network connection."""
    from lrrn.cli.demo import IMAGE_SHAPE, run

    json_file, page = _writable(json_file), _writable(page, make=True)
    _apart((), json_file, page)
    with _explained(None):
        results = run(seed=seed, device=_device(device), verbose=True)
    _publish("Digits, a quarter held out", results, json_file, page, IMAGE_SHAPE)


@app.command()
def train(
    data: Source,
    kind: Annotated[Kind, typer.Option("--model", help="What to train.")] = Kind.classifier,
    objective: Annotated[
        str | None,
        typer.Option(
            help="Classifier: contrastive, margin, cross_entropy, squared_error, class_energy, semi_supervised. "
            "Regressor: squared_error, contrastive."
        ),
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Where to save the model.")] = Path("lrrn-model.safetensors"),
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the model if it is there already.")] = False,
    hidden: Annotated[str, typer.Option(help="Widths of the hidden layers.")] = "64,64",
    epochs: Annotated[int | None, typer.Option(help="Passes over the data.", min=1)] = None,
    batch_size: Annotated[int | None, typer.Option(help="Samples a step.", min=1)] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Step size.")] = None,
    optimizer: Annotated[str | None, typer.Option(help="sgd, adam or adamw.")] = None,
    weight_decay: Annotated[float | None, typer.Option(help="The paper's lambda on the output weights.")] = None,
    pretrain_epochs: Annotated[int, typer.Option(help="Epochs without labels before those with (classifier).", min=0)] = 0,
    standardize: Annotated[
        bool | None,
        typer.Option(help="Centre and scale the data; radii stay in their units. By default unless all values are in [0, 1]."),
    ] = None,
    test_share: Annotated[float, typer.Option(help="Share of a file to hold out for the table.", min=0.01, max=0.9)] = 0.25,
    target: Target = None,
    root: Root = None,
    checkpoint: Annotated[Path | None, typer.Option(help="Keep the state of the run here; Ctrl-C leaves it too.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the checkpoint if it exists.")] = False,
    log: Annotated[Path | None, typer.Option(help="Write one JSON record an epoch to this file.")] = None,
    eps: Eps = None,
    image: ImageShape = None,
    seed: Seed = 0,
    device: Device = "auto",
    json_file: JsonFile = None,
    page: PageFile = None,
) -> None:
    """Train a model, save it, and show what it is worth on data it has not seen."""
    import time

    from lrrn.datasets import NAMES
    from lrrn.persistence.serialization import save
    from lrrn.reports.evaluation import KEPT_SAMPLES, evaluate, reference_of
    from lrrn.runtime.ranks import joined

    json_file, page, output = _writable(json_file), _writable(page), _writable(output)
    _apart((data, target), output, checkpoint, log, json_file, page)
    if output.exists() and not (overwrite or resume):
        raise typer.BadParameter(f"{output} exists already; give another --output, or --overwrite to replace it")
    if resume and checkpoint is None:
        raise typer.BadParameter("--resume needs --checkpoint to name the file to continue from")
    options = {
        "hidden_sizes": _numbers(hidden, int, "--hidden"),
        "objective": objective,
        "epochs": epochs,
        "batch_size": batch_size,
        "learning_rate": learning_rate,
        "optimizer": optimizer,
        "weight_decay": weight_decay,
        "pretrain_epochs": pretrain_epochs if pretrain_epochs else None,
        "checkpoint": _writable(checkpoint),
        "resume": resume,
        "log": _writable(log),
        "device": _device(device),
    }
    with _explained(checkpoint), joined(options["device"]) as ranks:
        (X, y), (X_test, y_test) = _split(data, root, target, test_share, seed, kind)
        shape = _shape(data, image, X.shape[1])
        scaled = standardize if standardize is not None else not (X.min() >= 0 and X.max() <= 1)
        model = _model(kind, {**options, "standardize": scaled, "random_state": seed, "verbose": 1})
        start = time.perf_counter()
        model.fit(X, y)  # an energy model takes no notice of y
        seconds = time.perf_counter() - start
        ranks.on_main(lambda: save(model, output))
        name = str(getattr(model, "objective", "energy model"))
        result = evaluate(name, model, X_test, y_test, _sizes(eps), shape, X, seconds, seed)
    if ranks.is_main:
        if kind is not Kind.regressor:  # for the explorer, with samples only of public data
            keep = KEPT_SAMPLES if data in NAMES else 0
            parts = (X_test, y_test, shape, f"{data}, held out", keep, result.score, result.radii, result.energies)
            save(model, output, reference_of(model, *parts))
        _publish(f"{data}, samples held out", [result], json_file, page, shape)
        console.print(f"saved to {output}")


@app.command("evaluate")
def evaluate_command(
    model: SavedModel,
    data: Source,
    target: Target = None,
    root: Root = None,
    split: Split = "test",
    eps: Eps = None,
    image: ImageShape = None,
    samples: Samples = None,
    seed: Seed = 0,
    device: Device = "auto",
    json_file: JsonFile = None,
    page: PageFile = None,
) -> None:
    """Show what a saved model is worth on some data, which need not fit into memory."""
    from lrrn.reports.evaluation import evaluate
    from lrrn.runtime.ranks import joined

    json_file, page, samples = _writable(json_file), _writable(page), _writable(samples)
    _apart((model, data, target), samples, json_file, page)
    with _explained(None), joined(_device(device)) as ranks:
        fitted, rows = _fitted(model, data, split, root, target, device)
        shape = _shape(data, image, rows.n_features)
        result = evaluate(model.name, fitted, rows, None, _sizes(eps), shape, None, None, seed, samples)
    if ranks.is_main:
        _publish(f"{model.name} on {data}", [result], json_file, page, shape)


@app.command("certify")
def certify_command(
    model: SavedModel,
    data: Source,
    target: Target = None,
    root: Root = None,
    split: Split = "test",
    eps: Eps = None,
    limit: Annotated[int | None, typer.Option(help="Take the first so many samples; all if not given.", min=1)] = None,
    method: Method = "auto",
    samples: Samples = None,
    seed: Seed = 0,
    device: Device = "auto",
    json_file: JsonFile = None,
    page: PageFile = None,
) -> None:
    """Prove how far samples can be perturbed before a saved classifier's label can change; they need not fit into memory."""
    from lrrn.reports.audit import certify
    from lrrn.runtime.ranks import joined

    json_file, page, samples = _writable(json_file), _writable(page), _writable(samples)
    _apart((model, data, target), samples, json_file, page)
    with _explained(None), joined(_device(device)) as ranks:
        classifier, rows = _classifier(model, data, split, root, target, device, limit)
        # nothing here is random; the option is there so that scripts can pass it to every command
        audit = certify(model.name, classifier, rows, None, _sizes(eps), method, samples)
    if ranks.is_main:
        _publish_audit(f"{model.name} on {data}", audit, json_file, page, samples)


@app.command("attack")
def attack_command(
    model: SavedModel,
    data: Source,
    target: Target = None,
    root: Root = None,
    split: Split = "test",
    eps: Eps = None,
    limit: Annotated[int, typer.Option(help="Take the first so many samples.", min=1)] = 1000,
    method: Method = "auto",
    steps: Annotated[int, typer.Option(help="Steps of each gradient ascent.", min=1)] = 50,
    restarts: Annotated[int, typer.Option(help="Gradient ascents a sample and size.", min=1)] = 3,
    clip: Annotated[str | None, typer.Option(help="Interval that perturbed features stay in: 0,1 for images.")] = None,
    seed: Seed = 0,
    device: Device = "auto",
    json_file: JsonFile = None,
    page: PageFile = None,
) -> None:
    """Attack a saved classifier and hold what the attacks find against its certificates."""
    from lrrn.reports.audit import attack

    json_file, page = _writable(json_file), _writable(page)
    _apart((model, data, target), json_file, page)
    box = None if clip is None else _numbers(clip, float, "--clip")
    if box is not None and not (len(box) == 2 and box[0] < box[1]):
        raise typer.BadParameter(f"--clip should be two numbers, the smaller one first; got {clip!r}")
    with _explained(None):
        classifier, rows = _classifier(model, data, split, root, target, device, limit)
        X, y = rows.everything()
        assert y is not None
        options: dict[str, Any] = {"steps": steps, "restarts": restarts, "clip": box, "seed": seed}
        audit = attack(model.name, classifier, X, y, _sizes(eps), method, **options)
    _publish_audit(f"{model.name} on {data}", audit, json_file, page)
    if len(audit.refuted):
        typer.echo(f"Error: attacks succeeded inside the certified radius of samples {audit.refuted.tolist()}: a bug", err=True)
        raise typer.Exit(1)


@app.command()
def reproduce(
    item: Annotated[str, typer.Argument(help="table1, table2, table3, learning-curves, pretraining, filters, all; or record.")],
    quick: Annotated[bool, typer.Option("--quick", help="A smoke run of minutes on a part of the data.")] = False,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the report, the results and the figures.")] = Path(
        "out/reproduction"
    ),
    work: Annotated[Path, typer.Option(help="Folder for models and checkpoints; what is there is not done again.")] = Path(
        "out/runs"
    ),
    jobs: Annotated[
        int | None,
        typer.Option(help="Runs at a time, on a GPU those measured; one for each core if not given.", min=1),
    ] = None,
    root: Root = None,
    download: Annotated[bool, typer.Option(help="Fetch data that is missing.")] = True,
    report_only: Annotated[bool, typer.Option("--report-only", help="Report on what is finished; start nothing.")] = False,
    seed: Seed = 0,
    device: Annotated[str, typer.Option(help="Where to compute: auto, cpu or cuda.")] = "cpu",
    json_file: JsonFile = None,
    dataset: Annotated[str | None, typer.Option(help="Record: mnist, fashion_mnist, kmnist or kmnist_7011.")] = None,
    rows: Annotated[str | None, typer.Option(help="Record: which to carry out, such as wide,logistic or wide:1.")] = None,
    seeds: Annotated[int | None, typer.Option(help="Record: seeds of whatever is random; 3 if not given.", min=1)] = None,
    stages: Annotated[str | None, typer.Option(help="Record: some of train,certify,shared,local,attack,autoattack.")] = None,
    images: Annotated[int | None, typer.Option(help="Record: images for local radii and attacks; 1000.", min=0)] = None,
    autoattack: Annotated[int | None, typer.Option(help="Record: images for AutoAttack; 100.", min=0)] = None,
    budget: Annotated[float | None, typer.Option(help="Record: seconds after which no more images are begun.")] = None,
    validation: Annotated[bool, typer.Option("--validation", help="Record: on held-out training images.")] = False,
) -> None:
    """Make the paper's tables and figures from data and compare. Interrupt it at any time: the same command continues.

    The record trains, certifies and attacks our widest networks and baselines on one data set.
    """
    from lrrn.studies.common.report import summary
    from lrrn.studies.paper import reproduce as run

    json_file = _writable(json_file)
    of_record = {
        "dataset": dataset, "rows": rows, "seeds": seeds, "stages": stages, "images": images, "autoattack": autoattack,
        "budget": budget, "validation": validation or None,
    }  # fmt: skip
    given = {name: value for name, value in of_record.items() if value is not None}
    if item == "record":
        common = {"quick": quick, "jobs": jobs, "root": root, "download": download, "report_only": report_only, "seed": seed}
        _record(given, work, output, json_file, {**common, "device": _device(device)})
        return
    if given:
        raise typer.BadParameter(f"--{next(iter(given))} belongs to lrrn reproduce record, not to {item}")
    with _explained(None):
        options: dict[str, Any] = {"root": root, "seed": seed, "device": _device(device), "download": download}
        done = run(item, work, output, quick=quick, jobs=jobs, report_only=report_only, **options)
    _show_comparisons(done.sections)
    console.print(f"{summary(done.sections)} {done.seconds:.0f} s. The report is {output / 'report.html'}.")
    _dump(json_file, json.loads((output / "results.json").read_text()))
    if done.failed:
        for name, reason in done.failed.items():
            typer.echo(f"Error: the run {name} failed: {reason}", err=True)
        raise typer.Exit(1)


@app.command()
def bench(
    suite: Annotated[str, typer.Option(help="solve, depth, grad, train, certify, scaling, or all.")] = "all",
    quick: Annotated[bool, typer.Option("--quick", help="Smoke sizes: every suite in about two minutes together.")] = False,
    repeats: Annotated[int, typer.Option(help="Timings per contender; their median counts.", min=1)] = 5,
    samples: Annotated[int, typer.Option(help="Samples of the training epoch.", min=1000)] = 60_000,
    rows: Annotated[int, typer.Option(help="Rows whose certification is watched for its memory.", min=1)] = 1_000_000,
    model: Annotated[
        Path | None, typer.Option(help="A saved classifier with real weights; trained on digits if not given.")
    ] = None,
    root: Root = None,
    seed: Seed = 0,
    device: Device = "cpu",
    json_file: JsonFile = None,
    update: Annotated[bool, typer.Option("--update", help="Keep the other suites that the JSON file holds already.")] = False,
    page: Annotated[
        Path | None, typer.Option(help="Write tables and charts to this HTML file, or tables to a .md file.")
    ] = None,
    report_only: Annotated[
        bool, typer.Option("--report-only", help="Measure nothing: write the page from what the JSON file holds.")
    ] = False,
) -> None:
    """Time solving, differentiating, training and certifying against their peers, every answer rescored in float64.

    With --json it may be interrupted: the same command, on the same day, continues.
    """
    from lrrn.studies.bench.clock import Settings
    from lrrn.studies.bench.suites import SUITES, document, journal, present, read_json, run, write_json
    from lrrn.studies.bench.tables import print_parts

    if device not in ("auto", "cpu"):
        raise typer.BadParameter(f"the benchmark runs on the CPU so far; got --device {device}")
    if suite not in ("all", *SUITES):
        raise typer.BadParameter(f"unknown suite {suite!r}; use {', '.join(SUITES)} or all")
    json_file, page = _writable(json_file), _writable(page)
    _apart((model,), json_file, page)
    if report_only and (json_file is None or page is None):
        raise typer.BadParameter("--report-only reads --json and writes --page; give both")
    settings = Settings(quick, seed, repeats, samples, rows, model, root)
    results: dict[str, Any] = {}
    if report_only and json_file is not None:
        with _explained(None):
            results = read_json(json_file)
    for name in () if report_only else SUITES if suite == "all" else (suite,):
        with _explained(None):
            kept = journal(name, settings, json_file)
            results[name] = run(name, settings, kept)
        print_parts(console, present(name, results[name]))
        if json_file is not None:
            # after every suite, so that an interrupted run leaves what it has
            with _explained(None):
                results = write_json(json_file, results, update)
                kept.end()
    if page is not None:
        _write(page, document(results, markdown=page.suffix == ".md"))
        console.print(f"tables and charts: {page}")


@app.command("explore")
def explore_command(
    model: Annotated[
        Path | None, typer.Argument(help="A saved classifier or energy model of images.", metavar="[MODEL]")
    ] = None,
    samples: Annotated[
        str | None, typer.Option(help="Held-out data to compare with, if not those in the file: digits, mnist, ..., a file.")
    ] = None,
    target: Target = None,
    root: Root = None,
    image: ImageShape = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; other machines can reach any but the default.")
    ] = "127.0.0.1",
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 for any that is free.", min=0, max=65535)] = None,
    show: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in a browser.")] = True,
    seed: Seed = 0,
    device: Device = "cpu",
    json_file: JsonFile = None,
) -> None:
    """Explore a model in the browser; without MODEL, a small one that is trained on handwritten digits on the spot."""
    from lrrn.explore import check_installed

    with _explained(None):
        check_installed()
        from lrrn.explore.launch import run
        from lrrn.explore.opening import MOST_SAMPLES

        json_file, shape = _writable(json_file), None if image is None else _height_and_width(image)
        data = None if samples is None else (samples, *_open(samples, "test", root, target).first(MOST_SAMPLES).everything())
        run(model, data, shape, _device(device), seed, host, port, show, console.print, lambda found: _dump(json_file, found))


@app.command("info")
def info_command(
    root: Root = None,
    seed: Seed = 0,
    device: Annotated[str, typer.Option(help="Where to try the solvers.")] = "auto",
    json_file: JsonFile = None,
) -> None:
    """Show versions, devices, solvers, data found and the thread policy."""
    from lrrn.cli.info import as_rows, gather

    json_file = _writable(json_file)
    with _explained(None):
        report = gather(root, device if device == "auto" else _device(device))
    table = Table("section", "name", Column(overflow="fold"), box=None, show_header=False, padding=(0, 2, 0, 0))
    for row in as_rows(report):
        table.add_row(*row)
    console.print(table)
    _dump(json_file, report)


# --- helpers ----------------------------------------------------------------------------------------------------------


def _record(given: dict[str, Any], work: Path, output: Path, json_file: Path | None, options: dict[str, Any]) -> None:
    """Carry out lrrn reproduce record."""
    from lrrn.studies.record.record import record

    if "dataset" not in given:
        raise typer.BadParameter("record needs --dataset: mnist, fashion_mnist, kmnist or kmnist_7011")
    names = {"images": "n_images", "autoattack": "n_autoattack"}
    data = given.pop("dataset")
    changes = {names.get(name, name): value for name, value in given.items()}
    changes |= {name: changes[name].split(",") for name in ("rows", "stages") if name in changes}
    if output == Path("out/reproduction"):  # the default, which is the paper's
        output = Path("out/record") / (data + "-validation" * ("validation" in given))
    with _explained(None):
        done = record(data, work, output, **options, **changes)
    _show("Accuracy in per cent: clean, and certified by norm of the perturbation; median radius", *done.table)
    _show_comparisons(done.sections)
    console.print(f"{done.seconds:.0f} s. The report is {output / 'report.html'}.")
    _dump(json_file, json.loads((output / "results.json").read_text()))
    for name, reason in done.failed.items():
        typer.echo(f"Error: the row {name} failed: {reason}", err=True)
    for what in done.disagreements:
        typer.echo(f"Error: an attack contradicts a certificate, which is a bug: {what}", err=True)
    if done.failed or done.disagreements:
        raise typer.Exit(1)


def _show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(title=title)
    for column in columns:
        table.add_column(column)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _show_comparisons(sections: Sequence[Section]) -> None:
    for section in sections:
        if section.comparisons:
            _show(section.title, section.columns, [comparison.cells() for comparison in section.comparisons])
            for remark in section.remarks():
                console.print(remark, highlight=False)


def _publish(
    title: str, results: list[Evaluation], json_file: Path | None, page: Path | None, image_shape: tuple[int, int] | None
) -> None:
    from lrrn.reports.evaluation import as_page, as_table

    columns, rows = as_table(results)
    table = Table(title=title)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    _dump(json_file, {"title": title, "models": [result.as_json() for result in results]})
    if page is not None:
        _write(page, as_page(title, results, image_shape))
        console.print(f"charts and filters: {page}")


def _publish_audit(title: str, audit: Audit, json_file: Path | None, page: Path | None, samples: Path | None = None) -> None:
    from lrrn.reports.audit import as_page, as_table, summary

    columns, rows = as_table(audit)
    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    console.print(summary(audit))
    _dump(json_file, {"title": title, **audit.as_json(samples is None)})
    if page is not None:
        _write(page, as_page(title, audit))
        console.print(f"chart: {page}")


def _fitted(path: Path, data: str, split: str, root: Path | None, target: str | None, device: str) -> tuple[Model, Rows]:
    """Load a fitted estimator and open data that fit it."""
    from lrrn.network import LRRN
    from lrrn.persistence.serialization import load

    fitted = load(path, device=_device(device))
    if isinstance(fitted, LRRN):
        raise typer.BadParameter(f"{path} holds a bare network; save a fitted estimator to evaluate it")
    rows = _open(data, split, root, target)
    if rows.n_features != fitted.n_features_in_:
        raise typer.BadParameter(f"{data} has {rows.n_features} features and {path} was trained on {fitted.n_features_in_}")
    return fitted, rows


def _classifier(
    path: Path, data: str, split: str, root: Path | None, target: str | None, device: str, limit: int | None
) -> tuple[LRRNClassifier, Rows]:
    """Load a classifier and open the first labelled samples of some data."""
    from lrrn.estimators import LRRNClassifier

    fitted, rows = _fitted(path, data, split, root, target, device)
    if not isinstance(fitted, LRRNClassifier):
        raise typer.BadParameter(f"{path} holds a {type(fitted).__name__}; only a classifier has labels to certify or attack")
    if not rows.has_targets:
        raise typer.BadParameter(f"{data} has no labels to compare predictions with")
    return fitted, rows.first(limit)


def _open(data: str, split: str, root: Path | None, target: str | None) -> Rows:
    from lrrn import datasets
    from lrrn.datasets.rows import ArrayRows

    if data in datasets.NAMES:
        return ArrayRows(*datasets.load(data, split, root), data)
    if Path(data).suffix not in datasets.TABLES:
        kinds = f"{', '.join(datasets.TABLES[:-1])} or {datasets.TABLES[-1]}"
        raise typer.BadParameter(f"unknown data {data!r}; use one of {', '.join(datasets.NAMES)}, or a {kinds} file")
    return datasets.open_table(data, target)


def _split(
    data: str, root: Path | None, target: str | None, share: float, seed: int, kind: Kind
) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Return what to train on and what to hold out: the test split of a named data set, a random share of a file."""
    import numpy as np
    from sklearn.model_selection import train_test_split

    from lrrn import datasets

    if data in datasets.NAMES:
        return datasets.load(data, "train", root), datasets.load(data, "test", root)
    X, y = _open(data, "train", root, target).everything()
    if y is None and kind is not Kind.energy:
        raise datasets.DataError(f"{data} has no targets, which a {kind} needs; --model energy learns without")
    strata = None
    if kind is Kind.classifier and y is not None and np.unique(y, return_counts=True)[1].min() > 1:
        strata = y
    train, held = train_test_split(np.arange(len(X)), test_size=share, stratify=strata, random_state=seed)
    return (X[train], None if y is None else y[train]), (X[held], None if y is None else y[held])


def _model(kind: Kind, options: dict[str, Any]) -> Model:
    from lrrn.estimators import LRRNClassifier, LRRNEnergyModel, LRRNRegressor

    classes = {Kind.classifier: LRRNClassifier, Kind.regressor: LRRNRegressor, Kind.energy: LRRNEnergyModel}
    given = {name: value for name, value in options.items() if value is not None}
    known = classes[kind]().get_params()
    strange = [name for name in given if name not in known]
    if strange:
        raise typer.BadParameter(f"--{strange[0].replace('_', '-')} does not apply to --model {kind}")
    return classes[kind](**given)


def _shape(data: str, image: str | None, n_features: int) -> tuple[int, int] | None:
    from lrrn import datasets

    if image is None:
        side = round(n_features**0.5)
        return (side, side) if data in datasets.NAMES else None
    shape = _height_and_width(image)
    if shape[0] * shape[1] != n_features:
        raise typer.BadParameter(f"--image should be HEIGHTxWIDTH with {n_features} pixels in all; got {image!r}")
    return shape


def _height_and_width(image: str) -> tuple[int, int]:
    height, _, width = image.partition("x")
    digits = height.isdecimal() and width.isdecimal() and len(image) < 20
    if not (digits and int(height) * int(width) > 0):
        raise typer.BadParameter(f"--image should be HEIGHTxWIDTH, such as 28x28; got {image!r}")
    return int(height), int(width)


def _sizes(eps: str | None) -> tuple[float, ...] | None:
    sizes = None if eps is None else _numbers(eps, float, "--eps")
    if sizes is not None and not all(size >= 0 for size in sizes):
        raise typer.BadParameter(f"--eps needs sizes of at least 0; got {eps}")
    return sizes


def _numbers(text: str, kind: Any, option: str) -> tuple[Any, ...]:
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"{option} should be numbers separated by commas; got {text!r}") from None


@contextmanager
def _explained(checkpoint: Path | None) -> Iterator[None]:
    """Turn errors that are the user's to solve into a message, and say after Ctrl-C how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        if checkpoint is not None and checkpoint.exists():
            typer.echo(f"stopped; the same command with --resume continues from {checkpoint}", err=True)
        raise typer.Exit(130) from None
    except (ValueError, ArithmeticError, OSError) as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from error
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "memory" not in str(error):  # torch's own way to say so
            raise
        typer.echo(f"Error: not enough memory ({error}); take a smaller --hidden or --batch-size, or less data", err=True)
        raise typer.Exit(1) from error


def _device(name: str) -> str:
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name not in ("cpu", "cuda"):
        raise typer.BadParameter(f"unknown device {name!r}; use auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter("no CUDA device is available here; use --device cpu")
    return name


def _writable(path: Any, make: bool = False) -> Any:
    """Refuse a place that cannot be written before any work is done; make its folder if asked to."""
    if path is None:
        return None
    from lrrn.runtime.storage import check_writable

    try:
        if make:
            path.parent.mkdir(parents=True, exist_ok=True)
        check_writable(path)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
    return path


def _apart(reads: tuple[str | Path | None, ...], *writes: Path | None) -> None:
    """Refuse to write over a file that the same command reads, or to write two things to one place."""
    known = {Path(path).resolve(): path for path in reads if path is not None and Path(path).is_file()}
    for path in writes:
        if path is None or (path.exists() and not path.is_file()):  # a device takes what it is given
            continue
        other = known.setdefault(path.resolve(), path)
        if other is not path:
            raise typer.BadParameter(f"{path} would be written over {other}, which this command uses too; give it another name")


def _write(path: Path, text: str) -> None:
    from lrrn.runtime.storage import write_bytes

    with _explained(None):
        write_bytes(path, text.encode())


def _dump(path: Path | None, content: dict[str, Any]) -> None:
    if path is not None:
        _write(path, json.dumps(content, indent=2) + "\n")
