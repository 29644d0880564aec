"""The command that applies a saved model to new data."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lrrn.cli.inputs import DataSource, check_model, device_name, load_fitted, method_name, perturbation_sizes
from lrrn.cli.options import (
    Delimiter,
    Device,
    Drop,
    JsonFile,
    Limit,
    Method,
    Root,
    SavedModel,
    Seed,
    Source,
    Split,
    Target,
)
from lrrn.cli.output import STDOUT, check_distinct, console, errors_explained, writable, write_json, write_text

if TYPE_CHECKING:
    from lrrn.reports.scoring import Columns


def predict(
    model: SavedModel,
    data: Source,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write a .csv file; to standard output if not given.")
    ] = None,
    radius: Annotated[bool, typer.Option("--radius", help="Certified radii of the labels too.")] = False,
    eps: Annotated[
        str | None,
        typer.Option(help="Regressor: certified intervals too, under perturbations of this size, in the norm of lrrn certify."),
    ] = None,
    method: Method = "auto",
    target: Target = None,
    drop: Drop = None,
    delimiter: Delimiter = None,
    root: Root = None,
    split: Split = None,
    limit: Limit = None,
    seed: Seed = 0,
    device: Device = "auto",
    json_file: JsonFile = None,
) -> None:
    """Predict labels or values of samples, which need no labels and need not fit into memory; one line each, as CSV."""
    sizes, method = perturbation_sizes(eps), method_name(method)
    if sizes is not None and len(sizes) != 1:
        raise typer.BadParameter(f"--eps should be one size here; got {eps}")
    if method != "auto" and not radius:
        raise typer.BadParameter(f"--method says how radii are certified; got --method {method} without --radius")
    source = DataSource(data, split, root, target, drop, delimiter)
    json_file, output = writable(json_file), None if output == STDOUT else writable(output)
    check_distinct((model, data, target), output, json_file)
    check_model(model)
    where = device_name(device)

    from lrrn.reports import predictions
    from lrrn.reports.evaluation import finite
    from lrrn.reports.scoring import flattened
    from lrrn.runtime.ranks import joined

    with errors_explained(), joined(where) as ranks:
        fitted, rows = load_fitted(model, source, device, limit, compared=False, method=method)
        # nothing here is random; --seed exists so that scripts can pass it to every command
        columns = flattened(predictions.predict(fitted, rows, radius, None if sizes is None else sizes[0], method))
    if ranks.is_main:
        if json_file != STDOUT or output is not None:
            write_text(output or STDOUT, _as_csv(columns))
        kept = {name: finite(values) if values.dtype.kind == "f" else values.tolist() for name, values in columns.items()}
        write_json(json_file, {"title": f"{model.name} on {data}", "n_samples": rows.n_samples, **kept})
        if output is not None:
            console.print(f"{rows.n_samples} predictions: {output}")


def _as_csv(columns: Columns) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(zip(*(values.tolist() for values in columns.values()), strict=True))
    return text.getvalue()
