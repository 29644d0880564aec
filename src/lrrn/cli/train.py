"""The command that trains a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lrrn.cli.inputs import device_name, image_shape, numbers, perturbation_sizes, train_and_test
from lrrn.cli.options import Device, Eps, ImageShape, JsonFile, Kind, PageFile, Root, Seed, Source, Target
from lrrn.cli.output import check_distinct, console, errors_explained, publish, writable

if TYPE_CHECKING:
    from lrrn.reports.evaluation import Model


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

    json_file, page, output = writable(json_file), writable(page), writable(output)
    check_distinct((data, target), output, checkpoint, log, json_file, page)
    if output.exists() and not (overwrite or resume):
        raise typer.BadParameter(f"{output} exists already; give another --output, or --overwrite to replace it")
    if resume and checkpoint is None:
        raise typer.BadParameter("--resume needs --checkpoint to name the file to continue from")
    options = {
        "hidden_sizes": numbers(hidden, int, "--hidden"),
        "objective": objective,
        "epochs": epochs,
        "batch_size": batch_size,
        "learning_rate": learning_rate,
        "optimizer": optimizer,
        "weight_decay": weight_decay,
        "pretrain_epochs": pretrain_epochs if pretrain_epochs else None,
        "checkpoint": writable(checkpoint),
        "resume": resume,
        "log": writable(log),
        "device": device_name(device),
    }
    with errors_explained(checkpoint), joined(options["device"]) as ranks:
        (X, y), (X_test, y_test) = train_and_test(data, root, target, test_share, seed, kind)
        shape = image_shape(data, image, X.shape[1])
        scaled = standardize if standardize is not None else not (X.min() >= 0 and X.max() <= 1)
        model = _model(kind, {**options, "standardize": scaled, "random_state": seed, "verbose": 1})
        start = time.perf_counter()
        model.fit(X, y)  # an energy model takes no notice of y
        seconds = time.perf_counter() - start
        ranks.on_main(lambda: save(model, output))
        name = str(getattr(model, "objective", "energy model"))
        result = evaluate(name, model, X_test, y_test, perturbation_sizes(eps), shape, X, seconds, seed)
    if ranks.is_main:
        if kind is not Kind.regressor:  # for the explorer, with samples only of public data
            keep = KEPT_SAMPLES if data in NAMES else 0
            parts = (X_test, y_test, shape, f"{data}, held out", keep, result.score, result.radii, result.energies)
            save(model, output, reference_of(model, *parts))
        publish(f"{data}, samples held out", [result], json_file, page, shape)
        console.print(f"saved to {output}")


def _model(kind: Kind, options: dict[str, Any]) -> Model:
    from lrrn.estimators import LRRNClassifier, LRRNEnergyModel, LRRNRegressor

    classes = {Kind.classifier: LRRNClassifier, Kind.regressor: LRRNRegressor, Kind.energy: LRRNEnergyModel}
    given = {name: value for name, value in options.items() if value is not None}
    known = classes[kind]().get_params()
    strange = [name for name in given if name not in known]
    if strange:
        raise typer.BadParameter(f"--{strange[0].replace('_', '-')} does not apply to --model {kind}")
    return classes[kind](**given)
