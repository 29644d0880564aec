"""Commands that measure a saved model: evaluate, certify, attack."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from lrrn.cli.inputs import device_name, image_shape, load_classifier, load_fitted, numbers, perturbation_sizes
from lrrn.cli.options import (
    Device,
    Eps,
    ImageShape,
    JsonFile,
    Method,
    PageFile,
    Root,
    Samples,
    SavedModel,
    Seed,
    Source,
    Split,
    Target,
)
from lrrn.cli.output import check_distinct, errors_explained, publish, publish_audit, writable


def evaluate(
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
    """Evaluate a saved model on some data, which need not fit into memory."""
    from lrrn.reports import evaluation
    from lrrn.runtime.ranks import joined

    sizes = perturbation_sizes(eps)
    json_file, page, samples = writable(json_file), writable(page), writable(samples)
    check_distinct((model, data, target), samples, json_file, page)
    with errors_explained(), joined(device_name(device)) as ranks:
        fitted, rows = load_fitted(model, data, split, root, target, device)
        shape = image_shape(data, image, rows.n_features)
        result = evaluation.evaluate(model.name, fitted, rows, None, sizes, shape, None, None, seed, samples)
    if ranks.is_main:
        publish(f"{model.name} on {data}", [result], json_file, page, shape)


def certify(
    model: SavedModel,
    data: Source,
    target: Target = None,
    root: Root = None,
    split: Split = "test",
    eps: Eps = None,
    limit: Annotated[int | None, typer.Option(help="Number of samples, from the first on; all if not given.", min=1)] = None,
    method: Method = "auto",
    samples: Samples = None,
    seed: Seed = 0,
    device: Device = "auto",
    json_file: JsonFile = None,
    page: PageFile = None,
) -> None:
    """Prove how far samples can be perturbed before a saved classifier's label can change; they need not fit into memory."""
    from lrrn.reports import audit
    from lrrn.runtime.ranks import joined

    sizes = perturbation_sizes(eps)
    json_file, page, samples = writable(json_file), writable(page), writable(samples)
    check_distinct((model, data, target), samples, json_file, page)
    with errors_explained(), joined(device_name(device)) as ranks:
        classifier, rows = load_classifier(model, data, split, root, target, device, limit)
        # nothing here is random; --seed exists so that scripts can pass it to every command
        result = audit.certify(model.name, classifier, rows, None, sizes, method, samples)
    if ranks.is_main:
        publish_audit(f"{model.name} on {data}", result, json_file, page, samples)


def attack(
    model: SavedModel,
    data: Source,
    target: Target = None,
    root: Root = None,
    split: Split = "test",
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
    from lrrn.reports import audit

    sizes = perturbation_sizes(eps)
    json_file, page = writable(json_file), writable(page)
    check_distinct((model, data, target), json_file, page)
    box = None if clip is None else numbers(clip, float, "--clip")
    if box is not None and not (len(box) == 2 and box[0] < box[1]):
        raise typer.BadParameter(f"--clip should be two numbers, the smaller one first; got {clip!r}")
    with errors_explained():
        classifier, rows = load_classifier(model, data, split, root, target, device, limit)
        X, y = rows.everything()
        assert y is not None
        options: dict[str, Any] = {"steps": steps, "restarts": restarts, "clip": box, "seed": seed}
        result = audit.attack(model.name, classifier, X, y, sizes, method, **options)
    publish_audit(f"{model.name} on {data}", result, json_file, page)
    if len(result.refuted):
        typer.echo(
            f"Error: attacks succeeded inside the certified radius of samples {result.refuted.tolist()}: a bug", err=True
        )
        raise typer.Exit(1)
