"""The command that writes a saved model as an ONNX file."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from lrrn.cli.inputs import check_model, device_name, numbers, one_of
from lrrn.cli.options import Device, JsonFile, SavedModel, Seed
from lrrn.cli.output import STDOUT, arguments_checked, check_distinct, console, errors_explained, writable, write_json

END = "in the units of the data: one number, or one for each feature, separated by commas."


def export(
    model: SavedModel,
    output: Annotated[Path, typer.Argument(help="The .onnx file to write.", metavar="FILE")],
    lower: Annotated[str, typer.Option(help=f"Lower end of the inputs, {END}")],
    upper: Annotated[str, typer.Option(help=f"Upper end of the inputs, {END}")],
    error: Annotated[
        float | None,
        typer.Option(help="Largest error of an output to allow; default: the smallest that needs few more iterations."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="Type to compute in: float32 or float64.")] = "float32",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file if it exists already.")] = False,
    seed: Seed = 0,
    device: Device = "auto",
    json_file: JsonFile = None,
) -> None:
    """Write a model as an ONNX graph of plain operations, with a proven bound on the error of its outputs."""
    ends = {"--lower": numbers(lower, float, "--lower"), "--upper": numbers(upper, float, "--upper")}
    for option, values in ends.items():
        if not all(map(math.isfinite, values)):
            raise typer.BadParameter(f"{option} needs finite numbers; got {','.join(map(str, values))}")
    if error is not None and not (error > 0 and math.isfinite(error)):
        raise typer.BadParameter(f"--error should be a positive number; got {error}")
    one_of(dtype, "--dtype", ("float32", "float64"))
    if output == STDOUT:
        raise typer.BadParameter("FILE should be the name of a file; an ONNX graph cannot go to standard output")
    json_file, output = writable(json_file), writable(output)
    check_distinct((model,), output, json_file)
    if output.exists() and not overwrite:
        raise typer.BadParameter(f"{output} exists already; give another FILE, or --overwrite to replace it")
    check_model(model)
    device_name(device)  # checked as by every command; the proof is computed on the CPU, and nothing is random

    from lrrn.export import save_onnx, unroll
    from lrrn.export.unrolled import checked_box
    from lrrn.persistence.serialization import load
    from lrrn.runtime.devices import to_dtype

    low, high = (values[0] if len(values) == 1 else list(values) for values in ends.values())
    with arguments_checked():
        checked_box(low, high, max(map(len, ends.values())), to_dtype(dtype))
    with errors_explained():
        try:
            unrolled = unroll(load(model, device="cpu"), low, high, error=error, dtype=to_dtype(dtype))
            save_onnx(unrolled, output)
        except (TypeError, ImportError) as refused:  # a model without outputs, or onnx is missing
            raise ValueError(str(refused)) from refused
    bound = float(unrolled.error_bound.max())
    content = {"iterations": unrolled.iterations, "error_bound": unrolled.error_bound.tolist(), "dtype": dtype}
    write_json(json_file, {"title": f"{model.name} as {output}", **content, "lower": low, "upper": high})
    console.print(
        f"{unrolled.iterations} iterations in {dtype}; proven error of every output at most {bound:.2g}", highlight=False
    )
    console.print(f"saved to {output}")
