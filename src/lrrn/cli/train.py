"""The command that trains a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from lrrn.cli.inputs import DataSource, device_name, image_shape, one_size, sides_of, train_and_test
from lrrn.cli.options import LARGEST_SEED, Delimiter, Device, Drop, ImageShape, JsonFile, Kind, PageFile, Root, Source, Target
from lrrn.cli.output import STDOUT, arguments_checked, check_distinct, console, errors_explained, publish, writable
from lrrn.cli.parameters import convolutions, parsed, with_parameters


@with_parameters
def train(
    data: Source,
    kind: Annotated[Kind, typer.Option("--model", help="What to train.")] = Kind.classifier,
    output: Annotated[Path, typer.Option("--output", "-o", help="Where to save the model.")] = Path("lrrn-model.safetensors"),
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the model and the checkpoint if they exist already.")
    ] = False,
    test_share: Annotated[float, typer.Option(help="Share of a file to hold out for the table.", min=0.01, max=0.9)] = 0.25,
    target: Target = None,
    drop: Drop = None,
    delimiter: Delimiter = None,
    root: Root = None,
    checkpoint: Annotated[Path | None, typer.Option(help="Save the state of the run to this file, also on Ctrl-C.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the checkpoint if it exists.")] = False,
    log: Annotated[Path | None, typer.Option(help="Write one JSON record per epoch to this file.")] = None,
    eps: Annotated[
        str | None,
        typer.Option(
            help="Size of perturbations: make many predictions correct and certified at it. In standard deviations of the "
            "features with --standardize features, as tables have by default; otherwise in the units of the data."
        ),
    ] = None,
    image: ImageShape = None,
    conv: Annotated[
        list[str] | None,
        typer.Option(
            help="A hidden layer that is a convolution, CHANNELS,KERNEL[,STRIDE[,PADDING[,POOL]]], in front of --hidden-sizes; "
            "may be given several times."
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option("--seed", "--random-state", help="Seed of all random numbers.", min=0, max=LARGEST_SEED)
    ] = 0,
    device: Device = "auto",
    json_file: JsonFile = None,
    page: PageFile = None,
    **parameters: Any,
) -> None:
    """Train a model, save it, and evaluate it on held-out data.

    Every parameter of the estimators is an option; those not given keep the estimator's defaults.
    """
    size, values, _ = one_size(eps), parsed(parameters, kind), image and sides_of(image)
    if size is not None:
        if kind is Kind.energy:
            raise typer.BadParameter("--eps does not apply to --model energy")
        values["eps"] = size
    layers = convolutions(conv)
    if resume and checkpoint is None:
        raise typer.BadParameter("--resume needs --checkpoint to name the file to continue from")
    for option, path in (("--output", output), ("--checkpoint", checkpoint), ("--log", log)):
        if path == STDOUT:
            raise typer.BadParameter(f"{option} should be the name of a file; it cannot go to standard output")
    json_file, page, output = writable(json_file), writable(page), writable(output)
    check_distinct((data, target), output, checkpoint, log, json_file, page)
    if output.exists() and not (overwrite or resume):
        raise typer.BadParameter(f"{output} exists already; give another --output, or --overwrite to replace it")
    if checkpoint is not None and checkpoint.is_file() and not (overwrite or resume):
        raise typer.BadParameter(
            f"{checkpoint} exists already and holds the state of a run; --resume continues it, --overwrite replaces it, or "
            "give another --checkpoint"
        )
    source = DataSource(data, None, root, target, drop, delimiter)
    where = device_name(device)

    import time

    import numpy as np

    from lrrn.persistence.serialization import save
    from lrrn.reports.evaluation import KEPT_SAMPLES, evaluate, reference_of
    from lrrn.runtime.ranks import joined

    model = _estimator(kind, values, layers)
    if layers and model.image_shape is None:
        if image is not None:
            model.set_params(image_shape=(1, *sides_of(image))[-3:])
        elif not source.is_named:  # a data set with a name knows the shape of its images
            raise typer.BadParameter("--conv needs --image, the height and width of the samples")
    with arguments_checked():
        model.check_parameters()
    model.set_params(checkpoint=writable(checkpoint), resume=resume, log=writable(log))
    model.set_params(random_state=seed, device=where, verbose=1)
    with errors_explained(checkpoint), joined(where) as ranks:
        (X, y), (X_test, y_test), names = train_and_test(source, test_share, seed, kind)
        shape = image_shape(data, image, X.shape[1], model.image_shape)
        if model.image_shape is None and layers and shape is not None:
            model.set_params(image_shape=(1, *shape)[-3:])
        if parameters["standardize"] is None:
            inside = X.min() >= 0 and X.max() <= 1
            model.set_params(standardize="features" if shape is None else not inside)
        start = time.perf_counter()
        model.fit(X, y)  # an energy model ignores y
        seconds = time.perf_counter() - start
        if names is not None:
            model.feature_names_in_ = np.array(names, dtype=object)  # as scikit-learn does for data frames
        ranks.on_main(lambda: save(model, output))
        name = "energy model" if kind is Kind.energy else str(model._use("objective"))
        result = evaluate(name, model, X_test, y_test, None, shape, X, seconds, seed)
    if ranks.is_main:
        if kind is not Kind.regressor:  # for the explorer, with samples only of public data
            keep = KEPT_SAMPLES if source.is_named else 0
            parts = (X_test, y_test, shape, f"{data}, held out", keep, result.score, result.radii, result.energies)
            save(model, output, reference_of(model, *parts))
        publish(f"{data}, samples held out", [result], json_file, page, shape)
        console.print(f"saved to {output}")
        if not model.history_ and (log is not None or checkpoint is not None):
            console.print("a linear model was chosen for --eps, without epochs: no log or checkpoint was written")


def _estimator(kind: Kind, values: dict[str, Any], convolutions: list[tuple[int, ...]]) -> Any:
    """Return an estimator with these parameters, and convolutions in front of its other hidden layers."""
    from lrrn.estimators import LRRNClassifier, LRRNEnergyModel, LRRNRegressor
    from lrrn.network import Conv

    if convolutions:
        try:
            layers = [Conv(*each) for each in convolutions]
        except ValueError as error:
            raise typer.BadParameter(f"--conv: {error}") from None
        values = {**values, "hidden_sizes": (*layers, *values.get("hidden_sizes", ()))}

    classes: dict[Kind, Any] = {Kind.classifier: LRRNClassifier, Kind.regressor: LRRNRegressor, Kind.energy: LRRNEnergyModel}
    return classes[kind](**values)
