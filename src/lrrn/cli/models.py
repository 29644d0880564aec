"""Commands about shipped models: list them, and verify what was published about one."""

from __future__ import annotations

from typing import Annotated

import typer

from lrrn.cli.inputs import device_name
from lrrn.cli.options import Device, JsonFile, Root, Seed
from lrrn.cli.output import console, errors_explained, show_table, writable, write_json


def models(seed: Seed = 0, device: Device = "auto", json_file: JsonFile = None) -> None:
    """List the models that ship with the package: commands and lrrn.load take their names where they take a file."""
    json_file = writable(json_file)
    if device not in ("auto", "cpu"):  # which need no look at this machine
        device_name(device)
    del seed, device  # nothing is random or computed here; they exist so that scripts can pass them to every command

    from lrrn.persistence.shipped import shipped_models

    with errors_explained():
        known = shipped_models()
    rows = []
    for name, model in known.items():
        path = model.weights_path
        size = f"{path.stat().st_size / 1e6:.2f} MB" if path.is_file() else "not here"
        shares = ", ".join(f"{share:.1%} at {size}" for size, share in model.certified.items())
        rows.append([name, model.data, size, f"{model.accuracy:.2%}", shares])
    if not rows:
        console.print("no models are shipped here; LRRN_MODELS names a folder of them")
    else:
        show_table("Shipped models", ["name", "data", "size", "accuracy", "certified"], rows)
        console.print(f"files: {next(iter(known.values())).folder}", soft_wrap=True, highlight=False)
    listed = [model.as_json() | {"path": str(model.weights_path)} for model in known.values()]
    write_json(json_file, {"title": "Shipped models", "models": listed})


def verify(
    name: Annotated[str, typer.Argument(help="A name of lrrn models.", metavar="NAME")],
    images: Annotated[
        int | None, typer.Option(help="Number of test images, from the first on; all if not given.", min=1)
    ] = None,
    ignore_digests: Annotated[
        bool, typer.Option("--ignore-digests", help="Judge the mathematics alone, whatever the files' digests are.")
    ] = False,
    root: Root = None,
    seed: Seed = 0,
    device: Annotated[str, typer.Option(help="Where to compute: cpu. Proofs are verified on the CPU.")] = "cpu",
    json_file: JsonFile = None,
) -> None:
    """Certify and attack test images again on this machine and compare with what was published; exit with 1 if it fails."""
    json_file = writable(json_file)
    if device not in ("cpu", "auto"):
        raise typer.BadParameter(f"proofs are verified on the CPU; got --device {device}")

    from lrrn.persistence.shipped import shipped_model

    with errors_explained():
        model = shipped_model(name)

        from lrrn import datasets
        from lrrn.reports.verification import verify as verified
        from lrrn.runtime.threads import blas_threads

        X, y = datasets.load(model.data, "test", root)
        with blas_threads(1):
            result = verified(model, X, y, images, ignore_digests, seed)
    console.print(result.sentence(), soft_wrap=True, highlight=False)
    write_json(json_file, result.as_json())
    if not result.stands:
        raise typer.Exit(1)
