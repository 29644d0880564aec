"""Options and arguments that commands share: their names, types and help texts."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Kind(StrEnum):
    """What to train."""

    classifier = "classifier"
    regressor = "regressor"
    energy = "energy"


Seed = Annotated[int, typer.Option(help="Seed of all random numbers.")]
Device = Annotated[str, typer.Option(help="Where to compute: auto, cpu or cuda.")]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Also write the results to this file as JSON.")]
PageFile = Annotated[Path | None, typer.Option("--page", help="Write charts, filters and the table to this HTML file.")]

Source = Annotated[
    str,
    typer.Argument(
        help="digits, mnist, kmnist, fashion_mnist; or a .npz (arrays X, y), .npy (X), .parquet or .csv file.", metavar="DATA"
    ),
]
Target = Annotated[
    str | None,
    typer.Option(
        help="Column of a .csv or .parquet file with the target, by name or, in .csv, number; last if not given. "
        "For a .npy file another one with the targets. 'none' if there is none."
    ),
]
Root = Annotated[Path | None, typer.Option("--data", "--root", help="Folder of the MNIST family; LRRN_DATA if not given.")]
Split = Annotated[str, typer.Option(help="Split of a named data set: train or test.")]
ImageShape = Annotated[str | None, typer.Option("--image", help="Height and width, if samples are images: 28x28.")]
Samples = Annotated[
    Path | None,
    typer.Option(
        help="Write the results of each sample to this .npz or .parquet file. If interrupted, the same command continues."
    ),
]

SavedModel = Annotated[Path, typer.Argument(help="A model saved by lrrn train or lrrn.save.", metavar="MODEL")]
Eps = Annotated[str | None, typer.Option(help="Sizes of perturbations to certify, in the units of the data: 0.1,0.25,0.5.")]
Method = Annotated[
    str,
    typer.Option(
        help="Certificate: paper, pairwise, spectral, multiplier, shared, local; or auto, the tightest except shared and local."
    ),
]

Quick = Annotated[bool, typer.Option("--quick", help="A smoke run of minutes on part of the data.")]
Work = Annotated[Path, typer.Option(help="Folder for models and checkpoints; finished work found there is not repeated.")]
Jobs = Annotated[
    int | None,
    typer.Option(help="Runs at a time (on a GPU: runs measured at a time); one per core if not given.", min=1),
]
Download = Annotated[bool, typer.Option(help="Download missing data.")]
ReportOnly = Annotated[bool, typer.Option("--report-only", help="Report on what is finished; start nothing.")]
