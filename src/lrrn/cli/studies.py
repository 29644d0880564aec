"""Commands that measure the method: the paper's experiments, the record of certified accuracy, benchmarks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from lrrn.cli.inputs import device_name
from lrrn.cli.options import Device, JsonFile, Root, Seed
from lrrn.cli.output import (
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

    json_file = writable(json_file)
    of_record = {
        "dataset": dataset, "rows": rows, "seeds": seeds, "stages": stages, "images": images, "autoattack": autoattack,
        "budget": budget, "validation": validation or None,
    }  # fmt: skip
    given = {name: value for name, value in of_record.items() if value is not None}
    if item == "record":
        common = {"quick": quick, "jobs": jobs, "root": root, "download": download, "report_only": report_only, "seed": seed}
        _record(given, work, output, json_file, {**common, "device": device_name(device)})
        return
    if given:
        raise typer.BadParameter(f"--{next(iter(given))} belongs to lrrn reproduce record, not to {item}")
    with errors_explained():
        options: dict[str, Any] = {"root": root, "seed": seed, "device": device_name(device), "download": download}
        done = run(item, work, output, quick=quick, jobs=jobs, report_only=report_only, **options)
    show_comparisons(done.sections)
    console.print(f"{summary(done.sections)} {done.seconds:.0f} s. The report is {output / 'report.html'}.")
    write_json(json_file, json.loads((output / "results.json").read_text()))
    if done.failed:
        for name, reason in done.failed.items():
            typer.echo(f"Error: the run {name} failed: {reason}", err=True)
        raise typer.Exit(1)


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
    json_file, page = writable(json_file), writable(page)
    check_distinct((model,), json_file, page)
    if report_only and (json_file is None or page is None):
        raise typer.BadParameter("--report-only reads --json and writes --page; give both")
    settings = Settings(quick, seed, repeats, samples, rows, model, root)
    results: dict[str, Any] = {}
    if report_only and json_file is not None:
        with errors_explained():
            results = read_json(json_file)
    for name in () if report_only else SUITES if suite == "all" else (suite,):
        with errors_explained():
            kept = journal(name, settings, json_file)
            results[name] = run(name, settings, kept)
        print_parts(console, present(name, results[name]))
        if json_file is not None:
            # after every suite, so that an interrupted run leaves what it has
            with errors_explained():
                results = write_json(json_file, results, update)
                kept.end()
    if page is not None:
        write_text(page, document(results, markdown=page.suffix == ".md"))
        console.print(f"tables and charts: {page}")


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
    with errors_explained():
        done = record(data, work, output, **options, **changes)
    show_table("Accuracy in per cent: clean, and certified by norm of the perturbation; median radius", *done.table)
    show_comparisons(done.sections)
    console.print(f"{done.seconds:.0f} s. The report is {output / 'report.html'}.")
    write_json(json_file, json.loads((output / "results.json").read_text()))
    for name, reason in done.failed.items():
        typer.echo(f"Error: the row {name} failed: {reason}", err=True)
    for what in done.disagreements:
        typer.echo(f"Error: an attack contradicts a certificate, which is a bug: {what}", err=True)
    if done.failed or done.disagreements:
        raise typer.Exit(1)
