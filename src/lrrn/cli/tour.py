"""Commands to begin with, which need no file: demo, explore, info."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Column, Table

from lrrn.cli.inputs import DataSource, check_model, device_name, load_fitted, sides_of
from lrrn.cli.options import Device, ImageShape, JsonFile, PageFile, Root, Seed, Target
from lrrn.cli.output import check_distinct, console, errors_explained, publish, writable, write_json

if TYPE_CHECKING:
    from lrrn.explore.gallery import Gallery


def demo(
    seed: Seed = 0,
    device: Device = "auto",
    json_file: JsonFile = None,
    page: PageFile = Path("out/demo.html"),
) -> None:
    """Train two classifiers and an energy model on handwritten digits: less than a minute, without a network connection."""
    json_file, page = writable(json_file), writable(page, make_folder=True)
    check_distinct((), json_file, page)
    where = device_name(device)

    from lrrn.cli.demo import IMAGE_SHAPE, run

    with errors_explained():
        results = run(seed=seed, device=where, verbose=True)
    publish("Digits, a quarter held out", results, json_file, page, IMAGE_SHAPE)


def explore(
    model: Annotated[
        Path | None,
        typer.Argument(help="A saved classifier or energy model of images, or a name of lrrn models.", metavar="[MODEL]"),
    ] = None,
    samples: Annotated[
        str | None,
        typer.Option(help="Held-out data to compare with, instead of the samples in the file: digits, mnist, ..., a file."),
    ] = None,
    target: Target = None,
    root: Root = None,
    image: ImageShape = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; any but the default can be reached from other machines.")
    ] = "127.0.0.1",
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 for any free one.", min=0, max=65535)] = None,
    show: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in a browser.")] = True,
    seed: Seed = 0,
    device: Device = "cpu",
    json_file: JsonFile = None,
) -> None:
    """Explore a model in the browser; without MODEL, a small one that is trained on handwritten digits first."""
    from lrrn.explore import check_installed

    with errors_explained():
        check_installed()
        json_file, shape = writable(json_file), None if image is None else sides_of(image)
        source = None if samples is None else DataSource(samples, None, root, target)
        if model is None and (samples is not None or image is not None):
            raise typer.BadParameter("--samples and --image are for a model of yours; give a MODEL, or leave them out")
        if target is not None and samples is None:
            raise typer.BadParameter("--target is for a table that --samples names; give --samples, or leave it out")
        if model is not None:
            check_model(model)
        where = device_name(device)

        from lrrn.explore.gallery import Gallery
        from lrrn.explore.launch import run
        from lrrn.explore.opening import MOST_SAMPLES

        data = None
        if source is not None and model is not None:
            rows = load_fitted(model, source, device)[1]
            data = Gallery(source.data, *rows.first(MOST_SAMPLES).everything())
        elif model is not None and not model.is_file():
            data = _published_images(str(model), root)
        run(model, data, shape, where, seed, host, port, show, console.print, lambda found: write_json(json_file, found))


def _published_images(name: str, root: Path | None) -> Gallery | None:
    """Return the test images of a shipped model with what was published; None, and a line on why, if they are not here."""
    from lrrn import datasets
    from lrrn.explore.gallery import Gallery
    from lrrn.persistence.published import read_radii
    from lrrn.persistence.shipped import check_digest, shipped_model

    shipped = shipped_model(name)
    check_digest(shipped.radii_path, shipped.radii_sha256)
    try:
        X, y = datasets.load(shipped.data, "test", root, download=False)
    except datasets.DataError as error:
        console.print(f"No test images are shown, and none are downloaded here: {error}", soft_wrap=True, highlight=False)
        return None
    return Gallery(shipped.data, X, y, read_radii(shipped.radii_path))


def info(
    root: Root = None,
    seed: Seed = 0,
    device: Annotated[str, typer.Option(help="Where to try the solvers: auto (all devices), cpu or cuda.")] = "auto",
    json_file: JsonFile = None,
) -> None:
    """Show versions, devices, solvers, data found and the thread policy."""
    json_file = writable(json_file)
    where = device if device == "auto" else device_name(device)

    from lrrn.cli.info import as_rows, gather

    with errors_explained():
        report = gather(root, where)
    table = Table("section", "name", Column(overflow="fold"), box=None, show_header=False, padding=(0, 2, 0, 0))
    for row in as_rows(report):
        table.add_row(*row)
    console.print(table)
    write_json(json_file, report)
