"""Publish trained rows of the record: weights, model card and radii of every test image in models/, with an index.

    python scripts/studies/publish_models.py mnist-paper-a --work out/runs

The row must be trained in the work folder of ``lrrn record``; distances of attacks are taken from there if there are any. A
nearer attack that was published with the same weights stays.
Radii are proven here, by the method that ``lrrn verify`` uses again. With --from-record they are those of the record, which
may come from a GPU, lowered a little: on another machine a solve ends at another point within its tolerance.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from lrrn.estimators import LRRNClassifier
from lrrn.persistence.published import Published, publish, read_radii, write_radii
from lrrn.persistence.serialization import load, save
from lrrn.persistence.shipped import INDEX, Shipped, digest, shipped_models
from lrrn.runtime.storage import write_bytes
from lrrn.runtime.threads import blas_threads
from lrrn.studies.record.data import compared_at, sizes_of
from lrrn.studies.record.recipes import OURS, rows_of
from lrrn.studies.record.rows import Row, images
from lrrn.studies.record.stages import ATTACK, AUTOATTACK, RIGHT, UNCLIPPED, is_trained, kept, training_facts

ROOT = Path(__file__).resolve().parents[2]
NAMES = {
    f"{data}-{row}".replace("_", "-"): (data, row)
    for data in ("mnist", "fashion_mnist", "cifar10")
    for row in rows_of(data)
    if row in OURS
}
"""Data set and row of the record, by name of the model."""
METHOD, GUARANTEE = "shared", "deployed"
LOWER, LOWER_BY = 1e-3, 1e-3
"""Fraction and length by which radii of the record are lowered."""
MOST, MOST_TOGETHER = 8_000_000, 25_000_000
"""Largest size of one file and of all files, in bytes: the repository stays small."""
CHUNK = 500
"""Images that are certified at once."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=sorted(NAMES))
    parser.add_argument("--work", type=Path, default=Path("out/runs"), help="work folder of lrrn record")
    parser.add_argument("--models", type=Path, default=ROOT / "models", help="folder to publish in")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", type=Path, help="folder of the images; LRRN_DATA if not given")
    parser.add_argument("--device", default="cpu", help="where to prove the radii")
    parser.add_argument("--from-record", action="store_true", help="take the radii of the record, lowered")
    parser.add_argument("--commit", help="commit that the row was trained at; the current one if not given")
    options = parser.parse_args()
    row = Row(NAMES[options.name][1], NAMES[options.name][0], options.seed)
    folder = options.work / "record" / row.name
    if not is_trained(folder):
        raise SystemExit(f"{folder} holds no trained row; train it with lrrn record {row.data} --rows {row.kind}:{row.seed}")
    _, test = images(row.data, row.extent, options.data, False)
    proofs = (options.device, options.from_record)
    entry = publish_row(options.name, row, folder, options.models, test, proofs, options.commit)
    print(f"{entry.name}: accuracy {entry.accuracy:.2%}, certified {entry.certified}; {options.models}")


def publish_row(
    name: str,
    row: Row,
    folder: Path,
    models: Path,
    test: tuple[Any, Any],
    proofs: tuple[str, bool] = ("cpu", False),
    commit: str | None = None,
) -> Shipped:
    """Write the files of one row and its entry in the index; return the entry.

    ``proofs`` are the device, and whether to take the radii of the record.
    """
    models.mkdir(parents=True, exist_ok=True)
    X, y = test
    predicted, radius, proof = certified(folder, X, y, *proofs)
    weights, radii, trained = models / f"{name}.safetensors", models / f"{name}.radii.npz", folder / "model.safetensors"
    before, nearest = shipped_models(models).get(name), nearest_attacks(folder, predicted, y)
    if before is not None and before.sha256 == digest(trained):
        nearest = np.fmin(nearest, read_radii(radii).attack)
    else:
        plain = load(trained, "cpu")
        assert isinstance(plain, LRRNClassifier)
        save(plain.set_params(device="cpu"), weights)
    results = publish(predicted, y, radius, nearest)
    write_radii(radii, results)
    entry = Shipped(
        name,
        weights.name,
        digest(weights),
        radii.name,
        digest(radii),
        row.data,
        row.kind,
        row.seed,
        METHOD,
        GUARANTEE,
        results.certified(0),
        {size: results.certified(sizes_of(row.data)[size]) for size in compared_at(row.data)},
        models,
    )
    facts = training_facts(folder) | proof
    write_bytes(models / f"{name}.md", card(entry, results, facts, commit or _commit()).encode())
    write_index(models, entry)
    check_sizes(models)
    return entry


def certified(folder: Path, X: Any, y: Any, device: str, from_record: bool) -> tuple[Any, Any, dict[str, Any]]:
    """Return predicted labels, radii, and where and how fast they were proven."""
    model = load(folder / "model.safetensors", device)
    assert isinstance(model, LRRNClassifier)
    if from_record:
        return _of_record(folder, model, X, y)
    start = time.perf_counter()
    with blas_threads(1):
        found = [model.certificate(X[k : k + CHUNK], METHOD) for k in range(0, len(X), CHUNK)]
    seconds = time.perf_counter() - start
    predicted, radius = (np.concatenate([np.asarray(getattr(c, part)) for c in found]) for part in ("prediction", "radius"))
    return predicted, radius, {"device of proof": device, "seconds of proof": seconds}


def _of_record(folder: Path, model: LRRNClassifier, X: Any, y: Any) -> tuple[Any, Any, dict[str, Any]]:
    (radius, facts), (right, _) = kept(folder, f"radii-{METHOD}"), kept(folder, RIGHT)
    if min(len(radius), len(right)) < len(X):
        raise SystemExit(f"{folder} has {len(radius)} radii of {len(X)}; run lrrn record with --stages certify,{METHOD}")
    # the record says which labels are right; the wrong ones are predicted here
    predicted = np.array(y)
    predicted[~right] = model.predict(X[~right])
    if (predicted[~right] == y[~right]).any():
        raise SystemExit(f"{folder}: labels that are wrong in the record are right here; prove the radii here instead")
    where = f"one {facts['device']}, lowered by {100 * LOWER:g} % and then by {LOWER_BY:g}"
    lowered = np.maximum(radius * (1 - LOWER) - LOWER_BY, 0.0)
    return predicted, lowered, {"device of proof": where, "seconds of proof": facts["seconds"]}


def nearest_attacks(folder: Path, predicted: Any, y: Any) -> Any:
    """Return the nearest distances of our attacks and of AutoAttack; nan for images that were not attacked."""
    distances = np.full(len(y), np.nan)
    for stage in (ATTACK, AUTOATTACK, UNCLIPPED):
        values = kept(folder, stage)[0]
        distances[: len(values)] = np.fmin(distances[: len(values)], values)
    # the attacks are on right labels; the radius of another label says nothing about them
    return np.where(predicted == y, distances, np.nan)


def write_index(models: Path, entry: Shipped) -> None:
    """Add an entry to the index, or replace that of the same name."""
    known = shipped_models(models) | {entry.name: replace(entry, folder=models)}
    content = [known[name].as_json() for name in sorted(known)]
    write_bytes(models / INDEX, (json.dumps(content, indent=1) + "\n").encode())


def check_sizes(models: Path) -> None:
    """Exit if a file, or all files together, are too large for the repository."""
    sizes = {path.name: path.stat().st_size for path in models.iterdir()}
    large = [name for name, size in sizes.items() if size > MOST]
    if large or sum(sizes.values()) > MOST_TOGETHER:
        raise SystemExit(f"too large for the repository: {', '.join(large) or 'all files together'}; remove something")


def _commit() -> str:
    return subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def card(entry: Shipped, results: Published, facts: dict[str, Any], commit: str) -> str:
    """Return the model card."""
    n, versions = len(results.radius), facts["versions"]
    tried = ~np.isnan(results.attack)
    attacked, own = results.attack[tried], results.radius[tried]
    lines = [
        f"# {entry.name}",
        "",
        f"Row `{entry.row}` of the record of certified accuracy on {entry.data}, seed {entry.seed}.",
        f"`lrrn.load({entry.name!r})` loads it; `lrrn verify {entry.name}` checks the figures below on your machine.",
        "",
        "## Data",
        "",
        f"Trained on {facts['samples']:,} images of {entry.data}, pixels in [0, 1], and measured on its {n:,} test images.",
        "",
        "## Recipe",
        "",
        f"`LRRNClassifier` with {facts['parameters']:,} numbers in float32 and these arguments, chosen on a validation split:",
        "",
        "```json",
        json.dumps(facts["recipe"], indent=1),
        "```",
        "",
        f"Trained with the code of commit `{commit}`, torch {versions['torch']} and numpy {versions['numpy']}.",
        f"Training took {facts['seconds of training']:.0f} s on one {facts['device of training']}.",
        "",
        "## Figures",
        "",
        "| quantity | value |",
        "|---|---|",
        f"| accuracy | {entry.accuracy:.2%} |",
        *(f"| certified accuracy at {size} | {share:.2%} |" for size, share in entry.certified.items()),
        f"| median certified radius, 0 where wrong | {np.median(np.where(results.right, results.radius, 0)):.3f} |",
        f"| images attacked (right labels) | {len(attacked)} |",
        f"| median of the nearest attack found on them | {np.median(attacked) if len(attacked) else np.nan:.3f} |",
        f"| median certified radius of the same images | {np.median(own) if len(attacked) else np.nan:.3f} |",
        f"| attacks inside a radius | {int((results.attack < results.radius).sum())} |",
        "",
        f"Radii are Euclidean, by method `{entry.method}` with the guarantee `{entry.guarantee}`, in float64 on"
        f" {facts['device of proof']}",
        f"({facts['seconds of proof']:.0f} s). `{entry.radii}` has labels, radius and nearest attack of every test image.",
        "",
        "| file | SHA-256 |",
        "|---|---|",
        f"| `{entry.file}` | `{entry.sha256}` |",
        f"| `{entry.radii}` | `{entry.radii_sha256}` |",
        "",
        "## Limits",
        "",
        "- A radius says that the label does not change, not that it is right.",
        "- Certified accuracy is proven for these test images; for other images it is an estimate.",
        "- Radii are in the Euclidean norm; other changes, such as rotations, are not covered.",
        "- It is a research model of small images, not made for decisions about people.",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
