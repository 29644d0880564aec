"""Write the tables of the README and of some pages from measured figures; --check only reports whether they are up to date.

Each table is between two comments with its name. Its figures come from the newest file of its kind.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"
DATA = {"mnist": "MNIST", "kmnist": "KMNIST", "kmnist_7011": "KMNIST, first 7,011", "fashion_mnist": "Fashion-MNIST"}
LOSSES = {"contrastive": "contrastive, penalty {decay:g}", "margin": "margin loss"}


def newest(pattern: str) -> Path:
    return max(RESULTS.glob(pattern))


def reproduction() -> dict[str, Any]:
    return json.loads((ROOT / "docs" / "reproduction" / "results.json").read_text())


def table(columns: list[str], rows: list[list[str]]) -> str:
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |".replace("| --- |", "|---|").replace(" ---: |", "---:|") for line in lines)


def source(command: str, *files: Path) -> str:
    return f"Made by `{command}`; figures in {', '.join(f'`{file.relative_to(ROOT)}`' for file in files)}."


def reproduced() -> str:
    """Return Tables 2 and 3 of the paper, for finished runs."""
    found: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for comparison in reproduction()["comparisons"]:
        match = re.match(r"Table [23]: supervised learning, penalty (\S+)", comparison["section"])
        if match and comparison["ours"] and comparison["paper"] is not None:
            found.setdefault((comparison["row"], match[1]), {})[comparison["quantity"]] = comparison
    rows = []
    for (row, decay), quantities in found.items():
        cells = [f"{row}, penalty {float(decay):g}"]
        for quantity, form in (("rho", "{:.3f}"), ("median margin", "{:.3f}"), ("delta", "{:.3f}"), ("accuracy", "{:.1%}")):
            pair = quantities[quantity]
            cells.append(f"{form.format(pair['paper'])} / {form.format(fmean(pair['ours']))}")
        rows.append(cells)
    columns = ["paper / ours", "Lipschitz constant", "median margin", "median radius", "accuracy"]
    return f"{table(columns, rows)}\n\n{source('make reproduce', ROOT / 'docs' / 'reproduction' / 'results.json')}"


def certified() -> str:
    """Return certified accuracy and accuracy under attack of the reproduction's networks."""
    rows, images, sizes = [], 0, ("0.3", "0.5", "1", "1.58")
    for result in reproduction()["runs"].values():
        run, closely = result["run"], result["figures"].get("closely")
        if closely and run["kind"] in LOSSES:
            proven = closely["radii"]["local"]["certified accuracy"]
            broken = closely["attack"]["attacked accuracy"]
            images = closely["images"]
            cells = [f"{DATA[run['data']]}, {LOSSES[run['kind']].format(**run)}", f"{closely['accuracy']:.1%}"]
            rows.append(cells + [f"{proven[eps]:.1%} / {broken[eps]:.1%}" for eps in sizes])
    columns = ["784-64-64-10, proven / left by attacks", "accuracy", *(f"at {eps}" for eps in sizes)]
    made = source("make reproduce", ROOT / "docs" / "reproduction" / "results.json")
    return f"{table(columns, sorted(rows, reverse=True))}\n\nThe first {images:,} test images. {made}"


def record() -> str:
    """Return clean and certified accuracy of our networks and the baselines, means over seeds."""
    titles = {"mnist": "MNIST", "fashion_mnist": "Fashion-MNIST", "cifar10": "CIFAR-10"}
    made = [data for data in titles if (ROOT / "docs" / "record" / data / "results.json").is_file()]
    return "\n\n".join(_record(data, titles[data]) for data in made)


def _record(data: str, name: str) -> str:
    path = ROOT / "docs" / "record" / data / "results.json"
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in json.loads(path.read_text())["rows"].values():
        groups.setdefault(row["title"], []).append(row)
    first = next(iter(groups.values()))[0]["radii"]["best"]["certified"]
    rows, sizes = [], [size for size in first if size != "0.1"]
    for title, group in groups.items():
        best = [row["radii"]["best"] for row in group]
        cells = [f"{fmean(row['accuracy'] for row in group):.1%}"]
        cells += [f"{fmean(one['certified'][size] for one in best):.1%}" for size in sizes]
        cells.append(f"{fmean(one['median'] for one in best):.2f}")
        rows.append([f"**{title}**" if title.startswith("lrrn") else title, *cells])
    columns = [f"{name}, certified accuracy", "clean", *(f"at {size}" for size in sizes), "median radius"]
    return f"{table(columns, rows)}\n\n{source(f'lrrn record {data}', path)}"


def tight() -> str:
    """Return median certified radii of the paper's MNIST network by method."""
    path = newest("*-mnist-certificates.json")
    figures = json.loads(path.read_text())
    (name,) = (key for key in figures if re.fullmatch(r"first \d+ images", key))
    few = figures[name]

    def whole(method: str) -> str:
        return f"{figures[f'radii, {method}']['times the paper' + chr(39) + 's']:.2f}"

    few_times = {
        method: f"{few[f'{method}, median times the paper' + chr(39) + 's']:.2f}"
        for method in ("multiplier", "shared", "local", "attack")
    }
    once = f"{figures['radii, multiplier']['seconds for the constants']:.0f} s once for all pairs"
    each = 0.1 * figures["radii, shared"]["seconds for 10,000 images"]
    rows = [
        ["paper, m / (sqrt(2) rho)", "1", "1", ""],
        ["pairwise", whole("pairwise"), "", ""],
        ["multiplier", whole("multiplier"), few_times["multiplier"], once],
        ["**shared**", f"**{whole('shared')}**", f"**{few_times['shared']}**", f"{each:.1f} ms an image"],
        ["**local**", "", f"**{few_times['local']}**", f"{few['seconds an image']:.1f} s an image"],
        ["what an attack finds, an upper limit", "", few_times["attack"], ""],
    ]
    columns = ["median radius, times the paper's", "all 10,000 test images", name.replace("first 1000", "first 1,000"), "cost"]
    return f"{table(columns, rows)}\n\n{source('python scripts/studies/mnist_certificates.py', path)}"


def suite(name: str) -> tuple[Path, list[dict[str, Any]]]:
    """Return the newest file of the complete benchmark, and the timed records of one of its suites."""
    path = newest("*-cpu-suite.json")
    return path, [record for record in json.loads(path.read_text())[name]["records"] if record.get("seconds") is not None]


def fast() -> str:
    """Return times of one free phase, compared with other solvers."""
    path, records = suite("solve")
    case = [record for record in records if (record.get("weights"), record["dim"], record["batch"]) == ("random", 128, 1000)]
    ours = min((record for record in case if record["ours"]), key=lambda record: record["seconds"])
    rows = [["**lrrn**", f"{1e3 * ours['seconds']:.1f} ms", "1"]]
    for peer in sorted((record for record in case if not record["ours"]), key=lambda record: record["seconds"]):
        ratio = peer["seconds"] / ours["seconds"]
        rows.append([peer["contender"], f"{1e3 * peer['seconds']:,.0f} ms", f"{ratio:.0f}"])
    return f"{table(['solver', 'time', 'times ours'], rows)}\n\n{source('lrrn bench --suite solve', path)}"


def gradients() -> str:
    """Return times of forward and backward pass of the layer, compared with other differentiable QP layers."""
    path, records = suite("grad")
    peers = list(dict.fromkeys(record["contender"] for record in records if not record["ours"]))
    rows = []
    for case in dict.fromkeys(record["case"] for record in records):
        times = {record["contender"]: record["seconds"] for record in records if record["case"] == case}
        ratios = [f"{times[peer] / times['lrrn']:.0f}" if peer in times else "misses the error" for peer in peers]
        rows.append([case, f"{1e3 * times['lrrn']:.1f} ms", *ratios])
    columns = ["forward and backward, float64", "lrrn", *(f"{peer}, times ours" for peer in peers)]
    return f"{table(columns, rows)}\n\n{source('lrrn bench --suite grad', path)}"


def epoch() -> str:
    """Return times of a training epoch, compared with other networks of the same size."""
    path, records = suite("train")
    peers = ("MLPClassifier", "torch MLP", "deel-torchlip", "orthogonium")
    rows = []
    for batch in sorted({record["batch"] for record in records}):
        for optimizer in ("sgd", "adam"):
            chosen = [record for record in records if (record["batch"], record["optimizer"]) == (batch, optimizer)]
            times = {record["contender"]: record["seconds"] for record in chosen}
            ratios = [f"{times['lrrn'] / times[peer]:.2f}" if peer in times else "" for peer in peers]
            rows.append([f"batch {batch}, {optimizer}", f"{times['lrrn']:.1f} s", *ratios])
    columns = ["60,000 x 784 samples, 784-64-64-10, float32", "lrrn, contrastive", *(f"ours / {peer}" for peer in peers)]
    return f"{table(columns, rows)}\n\n{source('lrrn bench --suite train', path)}"


def device() -> str:
    """Return times of free phases on a GPU, compared with a solver that uses torch's matrix products."""
    path, again = newest("*-gpu.json"), newest("*-gpu-solving.json")
    figures = json.loads(path.read_text())
    cases: dict[tuple[str, int], dict[int, dict[str, Any]]] = {}
    # what was measured again replaces what was measured before
    for case in (*figures["solving"], *json.loads(again.read_text())["solving"]):
        cases.setdefault((case["weights"], case["units"]), {})[case["batch"]] = case
    rows = []
    for (weights, units), by_batch in cases.items():
        title = f"{weights}, {units:,} units, condition {by_batch[max(by_batch)]['condition']:.0f}"
        few, most = by_batch.get(256), by_batch[max(by_batch)]
        times = " / ".join(f"{case['torch FISTA / lrrn']:.1f}" for case in (few, most) if case)
        rate = most["million solves a second"]
        time = f"{few['lrrn']['us']:,.0f} µs" if few else ""
        rows.append([title, time, f"{rate:.{0 if rate >= 10 else 2}f} million", times])
    columns = [f"one {figures['device']}", "256 samples", "a second, in large batches", "torch FISTA, times ours"]
    paper, whole = figures["paper"][-1]["seconds"], figures["reproduction"][-1]["seconds of all parts"]
    others = f"The paper's MNIST network trains in {paper:.0f} s there, and `lrrn reproduce all` takes {whole:.0f} s."
    return f"{table(columns, rows)}\n\n{others} {source('python scripts/studies/gpu.py --model FILE', path, again)}"


def trials() -> str:
    """Return the number of recipes that were tried for each row, and the best figures on held-out images at every size."""
    files = sorted(
        {*RESULTS.glob("*record-search.jsonl"), *RESULTS.glob("*grey-search.jsonl"), newest("*-baseline-search.jsonl")}
    )
    tried = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    parts = []
    for data, name in (("mnist", "MNIST"), ("fashion_mnist", "Fashion-MNIST")):
        groups: dict[str, list[dict[str, Any]]] = {}
        for trial in (trial for trial in tried if trial["data"] == data):
            groups.setdefault(trial.get("row") or _kind(trial["recipe"]), []).append(trial)
        sizes = ("0.3", "0.5", "1", "1.58")
        rows = []
        for title, group in sorted(groups.items(), key=lambda pair: not pair[0].startswith("lrrn")):
            best = [f"{max(trial['certified'][size] for trial in group):.1%}" for size in sizes]
            rows.append([title, str(len(group)), f"{max(trial['clean'] for trial in group):.1%}", *best])
        parts.append(table([f"{name}, held-out images", "trials", "clean", *(f"at {size}" for size in sizes)], rows))
    return "\n\n".join([*parts, source("python scripts/studies/record_search.py", *files)])


def _kind(recipe: dict[str, Any]) -> str:
    """Return what kind of network of ours a recipe is of."""
    hidden = recipe["hidden_sizes"]
    layers = "one hidden layer" if len(hidden) == 1 else "two hidden layers"
    return f"lrrn, {'convolution' if isinstance(hidden[0], dict) else layers}"


def cpu_proofs() -> str:
    """Return how radii that a CPU proves compare with the published ones, on all test images of the wide rows."""
    path = newest("*-cpu-proofs.json")
    rows = []
    for model in json.loads(path.read_text())["models"]:
        low, high = model["differences"]
        cells = [
            f"{model['n_images']:,}",
            f"{model['least_share']:.4f}",
            f"{low:.4f} to {high:.4f}",
            f"{model['seconds']:.0f} s",
        ]
        rows.append([f"`{model['name']}`", *cells])
    columns = ["model", "images", "least ratio to the published radius", "difference", "time"]
    return f"{table(columns, rows)}\n\n{source('lrrn verify NAME --json FILE', path)}"


TABLES = {
    "reproduced": reproduced,
    "record": record,
    "certified": certified,
    "tight": tight,
    "fast": fast,
    "gradients": gradients,
    "epoch": epoch,
    "device": device,
}
PAGES = {
    README: TABLES,
    ROOT / "docs" / "certified-accuracy.md": {"trials": trials},
    ROOT / "docs" / "guide" / "verify.md": {"cpu proofs": cpu_proofs},
}
"""Tables by page."""


def updated(page: Path, text: str) -> str:
    """Return the text of a page with every table regenerated."""
    for name, make in PAGES[page].items():
        begin, end = f"<!-- table: {name} -->", f"<!-- end of table: {name} -->"
        before, found, rest = text.partition(begin)
        if not found or end not in rest:
            raise ValueError(f"{page.name} has no place for the table {name!r}; put {begin} and {end} where it should be")
        text = f"{before}{begin}\n{make()}\n{end}{rest.partition(end)[2]}"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; end with status 1 if the tables are out of date")
    options = parser.parse_args()
    texts = {page: page.read_text() for page in PAGES}
    new = {page: updated(page, text) for page, text in texts.items()}
    if options.check:
        sys.exit(0 if new == texts else "the tables are out of date; run python scripts/studies/readme_tables.py")
    for page, text in new.items():
        page.write_text(text)


if __name__ == "__main__":
    main()
