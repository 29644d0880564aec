"""Commands that measure a saved model: evaluate, certify, attack."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from lrrn.cli.inputs import (
    DataSource,
    check_model,
    device_name,
    image_shape,
    load_classifier,
    load_fitted,
    method_name,
    numbers,
    perturbation_sizes,
    share_of,
    sides_of,
)
from lrrn.cli.options import (
    Delimiter,
    Device,
    Drop,
    Eps,
    ImageShape,
    JsonFile,
    Limit,
    Method,
    PageFile,
    Part,
    Root,
    Samples,
    SavedModel,
    Seed,
    Source,
    Split,
    Target,
)
from lrrn.cli.output import (
    STDOUT,
    check_distinct,
    console,
    errors_explained,
    publish,
    publish_audit,
    samples_file,
    writable,
    write_text,
)


def evaluate(
    model: SavedModel,
    data: Source,
    target: Target = None,
    drop: Drop = None,
    delimiter: Delimiter = None,
    root: Root = None,
    split: Split = None,
    eps: Eps = None,
    image: ImageShape = None,
    samples: Samples = None,
    seed: Seed = 0,
    device: Device = "auto",
    json_file: JsonFile = None,
    page: PageFile = None,
) -> None:
    """Evaluate a saved model on some data, which need not fit into memory."""
    sizes, _ = perturbation_sizes(eps), image and sides_of(image)
    source = DataSource(data, split, root, target, drop, delimiter)
    json_file, page, samples = writable(json_file), writable(page), samples_file(samples)
    check_distinct((model, data, target), samples, json_file, page)
    check_model(model)
    where = device_name(device)

    from lrrn.reports import evaluation
    from lrrn.reports.images import own_images
    from lrrn.runtime.ranks import joined

    with errors_explained(), joined(where) as ranks:
        fitted, rows = load_fitted(model, source, device)
        shape = image_shape(data, image, rows.n_features, own_images(fitted))
        result = evaluation.evaluate(model.name, fitted, rows, None, sizes, shape, None, None, seed, samples)
    if ranks.is_main:
        publish(f"{model.name} on {data}", [result], json_file, page, shape)


def certify(
    model: SavedModel,
    data: Source,
    target: Target = None,
    drop: Drop = None,
    delimiter: Delimiter = None,
    root: Root = None,
    split: Split = None,
    eps: Eps = None,
    limit: Limit = None,
    method: Method = "auto",
    samples: Samples = None,
    part: Part = None,
    export_proof: Annotated[
        Path | None,
        typer.Option(help="Write certificates of the exact label to this .json file, for checker/check_certificate.py."),
    ] = None,
    seed: Seed = 0,
    device: Device = "auto",
    json_file: JsonFile = None,
    page: PageFile = None,
) -> None:
    """Prove how far samples can be perturbed before a label can change, or how far a regressor's predictions can move.

    Labels are not needed; with them, the certified accuracy is shown. Samples need not fit into memory. With --samples,
    results are saved at intervals, and the same command continues after an interruption.
    """
    sizes, method, share = perturbation_sizes(eps), method_name(method), share_of(part)
    if part is not None and samples is None:
        raise typer.BadParameter("--part needs --samples, the file that the shares are merged into")
    if part is not None and export_proof is not None:
        raise typer.BadParameter("--export-proof is for all samples; leave --part out")
    source = DataSource(data, split, root, target, drop, delimiter)
    json_file, page, export_proof = (writable(path) for path in (json_file, page, export_proof))
    samples = samples_file(samples)
    check_distinct((model, data, target), samples, json_file, page, export_proof)
    check_model(model)
    where = device_name(device)

    from lrrn.estimators import LRRNRegressor
    from lrrn.reports import audit, intervals
    from lrrn.reports.pipelines import last_of
    from lrrn.reports.proofs import written_proof
    from lrrn.reports.scoring import Share
    from lrrn.runtime.ranks import joined

    advice = None if samples else "nothing was kept; with --samples FILE the same command continues where it was stopped"
    with errors_explained(advice=advice), joined(where) as ranks:
        fitted, rows = load_fitted(model, source, device, limit, method=method)
        way = (Share(*share), None if json_file == STDOUT else "certifying")
        # nothing here is random; --seed exists so that scripts can pass it to every command
        result: audit.Audit | intervals.Intervals
        if isinstance(last_of(fitted), LRRNRegressor):
            result = intervals.certify(model.name, fitted, rows, sizes, samples, *way)
        else:
            result = audit.certify(model.name, fitted, rows, None, sizes, method, samples, *way)
        proof = None if export_proof is None or not ranks.is_main else written_proof(model, fitted, rows.everything()[0])
    if ranks.is_main:
        if export_proof is not None and proof is not None:
            write_text(export_proof, json.dumps(proof) + "\n")
            console.print(f"{len(proof['certificates'])} certificates: {export_proof}")
        title = f"{model.name} on {data}" + ("" if part is None else f", part {part}")
        publish_audit(title, result, json_file, page, samples)
        if part is not None:
            console.print(f"kept in {samples}.parts; the command without --part merges all parts")


def attack(
    model: SavedModel,
    data: Source,
    target: Target = None,
    drop: Drop = None,
    delimiter: Delimiter = None,
    root: Root = None,
    split: Split = None,
    eps: Eps = None,
    limit: Annotated[int, typer.Option(help="Number of samples, from the first on.", min=1)] = 1000,
    method: Method = "auto",
    steps: Annotated[int, typer.Option(help="Steps of each gradient ascent.", min=1)] = 50,
    restarts: Annotated[int, typer.Option(help="Gradient ascents per sample and size.", min=1)] = 3,
    clip: Annotated[str | None, typer.Option(help="Interval that perturbed features stay in: 0,1 for images.")] = None,
    seed: Seed = 0,
    device: Device = "auto",
    json_file: JsonFile = None,
    page: PageFile = None,
) -> None:
    """Attack a saved classifier and compare what the attacks find with its certificates."""
    sizes, method = perturbation_sizes(eps), method_name(method)
    box = None if clip is None else numbers(clip, float, "--clip")
    if box is not None and not (len(box) == 2 and box[0] < box[1]):
        raise typer.BadParameter(f"--clip should be two numbers, the smaller one first; got {clip!r}")
    source = DataSource(data, split, root, target, drop, delimiter)
    json_file, page = writable(json_file), writable(page)
    check_distinct((model, data, target), json_file, page)
    check_model(model)

    from lrrn.reports import audit

    with errors_explained():
        classifier, rows = load_classifier(model, source, device, limit)
        X, y = rows.everything()
        options: dict[str, Any] = {"steps": steps, "restarts": restarts, "clip": box, "seed": seed}
        result = audit.attack(model.name, classifier, X, y, sizes, method, **options)
    publish_audit(f"{model.name} on {data}", result, json_file, page)
    if len(result.refuted):
        typer.echo(
            f"Error: attacks succeeded inside the certified radius of samples {result.refuted.tolist()}: a bug", err=True
        )
        raise typer.Exit(1)
