"""Commands that measure the method: the paper's experiments, the record of certified accuracy, benchmarks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from lrrn.cli.inputs import device_name
from lrrn.cli.options import Device, Download, Jobs, JsonFile, Quick, ReportOnly, Root, Seed, Work
from lrrn.cli.output import (
    STDOUT,
    check_distinct,
    console,
    errors_explained,
    show_comparisons,
    show_table,
    writable,
    write_json,
    write_text,
)


def reproduce(
    item: Annotated[
        str, typer.Argument(help="table1, table2, table3, learning-curves, pretraining, filters, or all.", metavar="ITEM")
    ],
    quick: Quick = False,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the report, the results and the figures.")] = Path(
        "out/reproduction"
    ),
    work: Work = Path("out/runs"),
    jobs: Jobs = None,
    root: Root = None,
    download: Download = True,
    report_only: ReportOnly = False,
    seed: Seed = 0,
    device: Device = "cpu",
    json_file: JsonFile = None,
) -> None:
    """Reproduce the paper's tables and figures and compare. It may be interrupted: the same command continues."""
    if item == "record":
        raise typer.BadParameter("the record is a command of its own: lrrn record DATASET")
    json_file = writable(json_file)

    from lrrn.studies.common.report import summary
    from lrrn.studies.paper import ITEMS
    from lrrn.studies.paper import reproduce as run

    if item not in ITEMS:
        raise typer.BadParameter(f"there is no {item!r} to reproduce; use one of {', '.join(ITEMS)}")

    with errors_explained():
        options: dict[str, Any] = {"root": root, "seed": seed, "device": device_name(device), "download": download}
        done = run(item, work, output, quick=quick, jobs=jobs, report_only=report_only, **options)
    show_comparisons(done.sections)
    console.print(f"{summary(done.sections)} {done.seconds:.0f} s. The report is {output / 'report.html'}.")
    write_json(json_file, json.loads((output / "results.json").read_text()))
    _exit_if_any([f"the run {name} failed: {reason}" for name, reason in done.failed.items()])


def record(
    dataset: Annotated[str, typer.Argument(help="mnist, fashion_mnist, kmnist, kmnist_7011 or cifar10.", metavar="DATASET")],
    rows: Annotated[
        str | None, typer.Option(help="Rows to measure, such as wide,logistic or wide:1; all if not given.")
    ] = None,
    seeds: Annotated[int, typer.Option(help="Number of seeds for every row with random numbers.", min=1)] = 3,
    stages: Annotated[
        str | None,
        typer.Option(
            help="Some of train,certify,multiplier,shared,branched,local,attack,autoattack; if not given, all but branched, "
            "which takes hours on a CPU."
        ),
    ] = None,
    images: Annotated[
        int | None, typer.Option(help="Number of images for local radii and attacks; 1000 if not given.", min=0)
    ] = None,
    autoattack: Annotated[int | None, typer.Option(help="Number of images for AutoAttack; 100 if not given.", min=0)] = None,
    branches: Annotated[
        int | None,
        typer.Option(help="Largest number of branches of an image and a pair of classes; 2048 if not given.", min=1),
    ] = None,
    budget: Annotated[float | None, typer.Option(help="Seconds after which no further images are begun.")] = None,
    validation: Annotated[
        bool, typer.Option("--validation", help="Train on five sixths of the training images and measure on the rest.")
    ] = False,
    quick: Quick = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="Folder for the report, the results and the figures; out/record/DATASET if not given."
        ),
    ] = None,
    work: Work = Path("out/runs"),
    jobs: Jobs = None,
    root: Root = None,
    download: Download = True,
    report_only: ReportOnly = False,
    shipped: Annotated[
        bool, typer.Option("--shipped", help="Measure the weights that ship instead of training these rows again.")
    ] = False,
    seed: Seed = 0,
    device: Device = "cpu",
    json_file: JsonFile = None,
) -> None:
    """Train, certify and attack wide networks and baselines on one data set. If interrupted, the same command continues."""
    json_file = writable(json_file)

    from lrrn.studies.record.data import NAMES
    from lrrn.studies.record.record import Options
    from lrrn.studies.record.record import record as run
    from lrrn.studies.record.stages import USUAL

    if dataset not in NAMES:
        raise typer.BadParameter(f"there is no record on {dataset!r}; use one of {', '.join(NAMES)}")
    output = output or Path("out/record") / (dataset + "-validation" * validation)
    options: dict[str, Any] = {"quick": quick, "jobs": jobs, "root": root, "download": download, "report_only": report_only}
    options |= {"rows": None if rows is None else rows.split(","), "stages": USUAL if stages is None else stages.split(",")}
    options |= {
        "seed": seed,
        "seeds": seeds,
        "branches": branches,
        "budget": budget,
        "validation": validation,
        "device": device_name(device),
        "shipped": shipped,
    }
    with errors_explained():
        done = run(dataset, work, output, Options(n_images=images, n_autoattack=autoattack, **options))
    show_table("Accuracy in per cent: clean, and certified by norm of the perturbation; median radius", *done.table)
    show_comparisons(done.sections)
    console.print(f"{done.seconds:.0f} s. The report is {output / 'report.html'}.")
    write_json(json_file, json.loads((output / "results.json").read_text()))
    contradictions = [f"an attack contradicts a certificate, which is a bug: {what}" for what in done.disagreements]
    _exit_if_any([f"the row {name} failed: {reason}" for name, reason in done.failed.items()] + contradictions)


def bench(
    suite: Annotated[str, typer.Option(help="solve, depth, grad, train, certify, scaling, or all.")] = "all",
    quick: Annotated[bool, typer.Option("--quick", help="Smoke sizes: every suite in about two minutes together.")] = False,
    repeats: Annotated[int, typer.Option(help="Timings per contender, of which the median is reported.", min=1)] = 5,
    samples: Annotated[int, typer.Option(help="Samples of the training epoch.", min=1000)] = 60_000,
    rows: Annotated[int, typer.Option(help="Rows to certify while memory use is measured.", min=1)] = 1_000_000,
    model: Annotated[
        Path | None, typer.Option(help="A saved classifier with real weights; trained on digits if not given.")
    ] = None,
    root: Root = None,
    seed: Seed = 0,
    device: Device = "cpu",
    json_file: JsonFile = None,
    update: Annotated[bool, typer.Option("--update", help="Keep the other suites of an existing JSON file.")] = False,
    page: Annotated[
        Path | None, typer.Option(help="Write tables and charts to this HTML file, or tables to a .md file.")
    ] = None,
    report_only: Annotated[
        bool, typer.Option("--report-only", help="Measure nothing: write the page from the JSON file.")
    ] = False,
    beside: Annotated[
        list[Path] | None, typer.Option(help="JSON file of another machine, whose headline figures the page shows beside.")
    ] = None,
) -> None:
    """Time solving, differentiating, training and certifying against other packages; answers are rescored in float64.

    With --json it may be interrupted: the same command continues on the same day.
    """
    if device not in ("auto", "cpu"):
        raise typer.BadParameter(f"the benchmark runs on the CPU so far; got --device {device}")
    json_file, page = writable(json_file), writable(page)
    check_distinct((model,), json_file, page)
    to_stdout, json_file = json_file == STDOUT, None if json_file == STDOUT else json_file
    if report_only and (json_file is None or page is None):
        raise typer.BadParameter("--report-only reads --json and writes --page; give both")

    from lrrn.studies.bench.clock import Settings
    from lrrn.studies.bench.suites import SUITES, document, journal, present, read_json, run, where
    from lrrn.studies.bench.suites import write_json as write_suites
    from lrrn.studies.bench.tables import print_parts

    if suite not in ("all", *SUITES):
        raise typer.BadParameter(f"unknown suite {suite!r}; use {', '.join(SUITES)} or all")
    settings = Settings(quick, seed, repeats, samples, rows, model, root)
    results: dict[str, Any] = {}
    with errors_explained():
        others = [read_json(path) for path in beside or ()]
    if report_only and json_file is not None:
        with errors_explained():
            results = read_json(json_file)
    for name in () if report_only else SUITES if suite == "all" else (suite,):
        with errors_explained():
            kept = journal(name, settings, json_file)
            results[name] = run(name, settings, kept)
        print_parts(console, present(name, results[name]))
        console.print(f"Measured on {where(results[name])}.", highlight=False)
        if json_file is not None:
            # after every suite, so that an interrupted run leaves what it has
            with errors_explained():
                results = write_suites(json_file, results, update)
                kept.end()
    if to_stdout:
        write_json(STDOUT, results)
    if page is not None:
        write_text(page, document(results, page.suffix == ".md", others))
        console.print(f"tables and charts: {page}")


def _exit_if_any(errors: list[str]) -> None:
    """End with status 1 if there are errors, and print them."""
    for error in errors:
        typer.echo(f"Error: {error}", err=True)
    if errors:
        raise typer.Exit(1)
