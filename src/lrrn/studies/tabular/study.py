"""Cross-validation of every contender on every table, and the tables of results."""

from __future__ import annotations

import math
import statistics
import time
import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import Any

import numpy as np

from lrrn.studies.tabular import contenders, memory
from lrrn.studies.tabular.data import CLASSIFICATION, REGRESSION, load

FOLDS = 5
Row = dict[str, Any]
PEERS = ("MLP", "SVC", "gradient boosting")
LINEAR = ("logistic regression", "logistic regression, C by CV")


def _threads() -> None:
    import torch

    torch.set_num_threads(1)


def _warm() -> None:
    """Compile, and load libraries, before anything is measured."""
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(200, 5)), generator.integers(0, 3, 200)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, make in contenders.classifiers().items():
            contenders.scores(name, make().fit(x, y), x[:20], y[:20])
        for name, make in contenders.regressors().items():
            contenders.fit_of(name, make().fit(x, x[:, 0]), x, x[:, 0])


_is_warm = False


def fold(name: str, number: int, only: Iterable[str] = ()) -> list[Row]:
    """Fit every contender on one fold of a table; features and targets have unit variance on the training rows."""
    from sklearn.model_selection import KFold, StratifiedKFold
    from sklearn.preprocessing import StandardScaler

    global _is_warm
    if not _is_warm:
        _threads()
        _warm()
        _is_warm = True
    x, y = load(name)
    classify = name in CLASSIFICATION
    splitter = (StratifiedKFold if classify else KFold)(FOLDS, shuffle=True, random_state=0)
    train, test = list(splitter.split(x, y))[number]
    scaler = StandardScaler().fit(x[train])
    x_train, x_test = scaler.transform(x[train]), scaler.transform(x[test])
    if not classify:
        y = (y - y[train].mean()) / y[train].std()
    rows = []
    for contender, make in (contenders.classifiers() if classify else contenders.regressors()).items():
        if only and not any(text in contender for text in only):
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # MLPs that did not converge within their default number of epochs
            with memory.growth() as mebibytes:
                start = time.process_time()
                model = make().fit(x_train, y[train])
                seconds = time.process_time() - start
            measure = contenders.scores if classify else contenders.fit_of
            found = measure(contender, model, x_test, y[test])
        row = {"table": name, "rows": len(x), "fold": number, "contender": contender, "seconds": seconds}
        rows.append(row | ({"MiB": mebibytes[0]} if mebibytes else {}) | found)
    return rows


def run(names: Iterable[str], jobs: int, only: Iterable[str] = ()) -> Iterator[Row]:
    """Yield results as they are found, one process per job and one thread per process."""
    tasks = [(name, number) for name in names for number in range(FOLDS)]
    tasks.sort(key=lambda task: -len(load(task[0])[0]))
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        for done in as_completed([pool.submit(fold, *task, only) for task in tasks]):
            yield from done.result()


def paired(rows: list[Row], name: str, ours: str, theirs: str, column: str) -> tuple[float, float]:
    """Return the mean and the standard error of differences over the folds of a table."""
    values = {
        contender: {row["fold"]: row[column] for row in rows if row["table"] == name and row["contender"] == contender}
        for contender in (ours, theirs)
    }
    differences = [values[ours][number] - values[theirs][number] for number in sorted(values[ours])]
    error = statistics.stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else math.inf
    return statistics.fmean(differences), error


def mean(rows: list[Row], name: str, contender: str, column: str) -> float:
    """Return the mean over the folds of a table."""
    return statistics.fmean(row[column] for row in rows if row["table"] == name and row["contender"] == contender)


def tables(rows: list[Row]) -> str:
    """Return the results as Markdown."""
    return "\n\n".join(part for part in (_classification(rows), _regression(rows), _costs(rows)) if part)


def _names(rows: list[Row], known: Iterable[str]) -> list[str]:
    found = {row["table"] for row in rows}
    return [name for name in known if name in found]


def _table(header: list[str], body: list[list[str]]) -> str:
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _classification(rows: list[Row]) -> str:
    names = _names(rows, CLASSIFICATION)
    if not names:
        return ""
    header = ["table", "rows", "lrrn", *PEERS]
    for size in contenders.SIZES:
        header += [f"eps={size}", "hidden", *("logistic, C=1", "C by CV")]
    body = []
    for name in names:
        n = next(row["rows"] for row in rows if row["table"] == name)
        line = [name, f"{n:,}", *(f"{100 * mean(rows, name, contender, 'accuracy'):.1f}" for contender in ("lrrn", *PEERS))]
        for size in contenders.SIZES:
            ours, column = f"lrrn, eps={size}", f"certified at {size}"
            # a difference in one fold only is one standard error exactly, up to rounding
            behind = any(sum(paired(rows, name, ours, theirs, column)) < -1e-9 for theirs in LINEAR)
            with_hidden = sum(row["hidden units"] > 0 for row in rows if row["table"] == name and row["contender"] == ours)
            line += [f"{100 * mean(rows, name, ours, column):.1f}" + (" †" if behind else ""), f"{with_hidden}/{FOLDS}"]
            line += [f"{100 * mean(rows, name, theirs, column):.1f}" for theirs in LINEAR]
        body.append(line)
    last = ["mean", ""]
    for contender in ("lrrn", *PEERS):
        last.append(f"{100 * statistics.fmean(mean(rows, name, contender, 'accuracy') for name in names):.1f}")
    for size in contenders.SIZES:
        for contender in (f"lrrn, eps={size}", "", *LINEAR):
            column = f"certified at {size}"
            values = [mean(rows, name, contender, column) for name in names] if contender else []
            last.append(f"{100 * statistics.fmean(values):.1f}" if values else "")
    return _table(header, [*body, last])


def _regression(rows: list[Row]) -> str:
    names = _names(rows, REGRESSION)
    if not names:
        return ""
    ours = f"lrrn, eps={contenders.INTERVAL_SIZE}"
    shown = ("lrrn", "MLP", "gradient boosting", "ridge", ours)
    header = ["table", "rows", *shown, "half-width / ridge's", "hidden"]
    body = []
    for name in names:
        n = next(row["rows"] for row in rows if row["table"] == name)
        widths = [mean(rows, name, contender, "half-width") for contender in (ours, "ridge")]
        with_hidden = sum(row["hidden units"] > 0 for row in rows if row["table"] == name and row["contender"] == ours)
        line = [name, f"{n:,}", *(f"{mean(rows, name, contender, 'r2'):.3f}" for contender in shown)]
        body.append([*line, f"{widths[0] / widths[1]:.3f}", f"{with_hidden}/{FOLDS}"])
    means = (statistics.fmean(mean(rows, name, contender, "r2") for name in names) for contender in shown)
    return _table(header, [*body, ["mean", "", *(f"{value:.3f}" for value in means), "", ""]])


def _costs(rows: list[Row]) -> str:
    body = []
    for known, all_ours in ((CLASSIFICATION, contenders.classifiers()), (REGRESSION, contenders.regressors())):
        names = _names(rows, known)
        for contender in all_ours if names else ():
            seconds = [mean(rows, name, contender, "seconds") for name in names]
            ratios = [mine / mean(rows, name, "MLP", "seconds") for mine, name in zip(seconds, names, strict=True)]
            peaks = [row["MiB"] for row in rows if row["contender"] == contender and row["table"] in names and "MiB" in row]
            kind = "classifier" if known is CLASSIFICATION else "regressor"
            times = [f"{value:.2f}" for value in (statistics.median(seconds), max(seconds), statistics.median(ratios))]
            sizes = [f"{statistics.median(peaks):.1f}", f"{max(peaks):.1f}"] if peaks else ["", ""]
            body.append([f"{kind}: {contender}", *times, *sizes])
    header = ["cost of a fit", "seconds, median", "largest", "median ratio to MLP", "MiB, median", "largest"]
    return _table(header, body)
