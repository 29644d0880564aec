"""The application: logging, and the list of commands. Their modules import what is slow to import inside the commands."""

from __future__ import annotations

import logging
import warnings
from typing import Annotated

import typer

from lrrn import __version__
from lrrn.cli.evaluate import attack, certify, evaluate
from lrrn.cli.export import export
from lrrn.cli.models import models, verify
from lrrn.cli.output import warning_line
from lrrn.cli.predict import predict
from lrrn.cli.studies import bench, record, reproduce
from lrrn.cli.tour import demo, explore, info
from lrrn.cli.train import train

app = typer.Typer(
    help="Lifted regression/reconstruction networks: prediction, certified radius and energy from one convex model.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
for command in (
    demo,
    train,
    predict,
    evaluate,
    certify,
    attack,
    export,
    models,
    verify,
    reproduce,
    record,
    bench,
    explore,
    info,
):
    app.command()(command)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"lrrn {__version__}")
        raise typer.Exit


@app.callback()
def main(
    context: typer.Context,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log what the library decides.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Set up logging and warnings for every command."""
    logging.basicConfig(level=logging.DEBUG if verbose else logging.WARNING, format="%(name)s: %(message)s")
    usual = warnings.formatwarning
    warnings.formatwarning = warning_line
    context.call_on_close(lambda: setattr(warnings, "formatwarning", usual))  # for a caller in the same process
    # columns are matched by name when a table is opened; from there on they are arrays, which scikit-learn warns of
    warnings.filterwarnings("ignore", "X does not have valid feature names", UserWarning)
