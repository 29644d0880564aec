"""Options and arguments that commands share: their names, types and help texts."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from lrrn.cli.output import make_way

METHODS = ("auto", "paper", "pairwise", "spectral", "multiplier", "shared", "branched", "local", "energy")
"""Methods of a certificate; those of :mod:`lrrn.certificates.radius`, and the one for labels by energies."""


class Kind(StrEnum):
    """What to train."""

    classifier = "classifier"
    regressor = "regressor"
    energy = "energy"


LARGEST_SEED = 2**32 - 1
"""NumPy and scikit-learn take no larger one."""
Seed = Annotated[int, typer.Option(help="Seed of all random numbers.", min=0, max=LARGEST_SEED)]
Device = Annotated[str, typer.Option(help="Where to compute: auto, cpu or cuda.")]
JsonFile = Annotated[
    Path | None,
    typer.Option("--json", help="Also write the results to this file as JSON; - for standard output.", callback=make_way),
]
PageFile = Annotated[Path | None, typer.Option("--page", help="Write charts, filters and the table to this HTML file.")]

Source = Annotated[
    str,
    typer.Argument(
        help="digits, mnist, kmnist, fashion_mnist, cifar10; or a .npz (arrays X, y), .npy (X), .parquet, .csv or .tsv file.",
        metavar="DATA",
    ),
]
Target = Annotated[
    str | None,
    typer.Option(
        help="Column of a table with the target, by name or number; if not given, the one that the model was not trained on, "
        "or the last. For a .npy file another one with the targets. 'none' if there is none."
    ),
]
Drop = Annotated[
    list[str] | None, typer.Option(help="Column of a table to leave out, by name or number; may be given several times.")
]
Delimiter = Annotated[
    str | None,
    typer.Option(help="Character between the cells of a .csv or .tsv file, or tab; comma, semicolon and tab are detected."),
]
Root = Annotated[
    Path | None, typer.Option("--data", "--root", help="Folder of the MNIST family and of CIFAR-10; LRRN_DATA if not given.")
]
Split = Annotated[str | None, typer.Option(help="Split of a named data set: train or test; test if not given.")]
Limit = Annotated[int | None, typer.Option(help="Number of samples, from the first on; all if not given.", min=1)]
ImageShape = Annotated[
    str | None,
    typer.Option(
        "--image",
        help="Height and width, if samples are images: 28x28; 3x32x32 in colour. Models of images know it.",
    ),
]
Samples = Annotated[
    Path | None,
    typer.Option(
        help="Write the results of each sample to this .npz or .parquet file. If interrupted, the same command continues."
    ),
]

Part = Annotated[
    str | None,
    typer.Option(
        help="Certify only a share of the samples: 2/4 is the second of four. Needs --samples; the same command without it "
        "merges all shares."
    ),
]

SavedModel = Annotated[
    Path, typer.Argument(help="A model saved by lrrn train or lrrn.save, or a name of lrrn models.", metavar="MODEL")
]
Eps = Annotated[
    str | None,
    typer.Option(
        help="Sizes of perturbations to certify: 0.1,0.25,0.5. In standard deviations of the features for a model that divides "
        "each by its own, as of tables (norm: scaled); in the units of the data for others (norm: euclidean)."
    ),
]
Method = Annotated[
    str,
    typer.Option(
        help="Certificate of a classifier: paper, pairwise, spectral, multiplier, shared, branched, local; or auto, the "
        "tightest that takes little time."
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
