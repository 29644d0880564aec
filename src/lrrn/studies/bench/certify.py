"""Suite ``certify``: radii per second by method, the default method on tables, Lipschitz bounds by network size."""

from __future__ import annotations

import copy
import logging
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from sklearn import datasets
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler

from lrrn.bounds.outputs import pair_constants
from lrrn.certificates import certify
from lrrn.certificates.radius import METHODS as ALL
from lrrn.estimators import LRRNClassifier
from lrrn.runtime.threads import one_thread
from lrrn.studies.bench.clock import Settings, best_of_threads, timed
from lrrn.studies.bench.journal import Journal
from lrrn.studies.bench.problems import name_of, random_network, trained
from lrrn.studies.bench.tables import Part, Table, number, seconds

logger = logging.getLogger("lrrn.studies.bench")
T = TypeVar("T")

HIDDEN = (64, 256, 1024)
METHODS = tuple(method for method in ALL if method != "branched")
"""Methods to time: all but the one that decides about a given size of the perturbation."""
LOCAL = 20
"""Number of samples for the per-sample method."""
BUDGETS = {"auto": 5.0, "multiplier": 60.0}
"""Time budget in seconds for optimising bounds in this suite; the default of "multiplier" is 300."""


def run(settings: Settings, journal: Journal) -> list[dict[str, Any]]:
    """Time certificates on real weights and bounds of random networks."""
    hidden = (8,) if settings.quick else HIDDEN
    records = journal.once("radii", _radii, settings)
    for name in ("wine",) if settings.quick else ("wine", "breast_cancer", "digits"):
        records = records + journal.once(f"tables: {name}", _tables, name, settings)
    for width in hidden:
        records = records + journal.once(f"bounds at width {width}", _bounds, width, settings)
    return records


def _radii(settings: Settings) -> list[dict[str, Any]]:
    n = 100 if settings.quick else 10_000
    net, x, name = trained(settings, n)
    budget = 0.2 if settings.quick else None
    records = []
    for method in METHODS:
        m = n if method != "local" else 2 if settings.quick else LOCAL
        logger.info("radii: %s", method)
        constants, _ = timed(partial(certify, net, x[:1], method, seconds=budget))

        def work(method: str = method, m: int = m) -> torch.Tensor:
            return certify(net, x[:m], method, seconds=budget).radius

        timing = best_of_threads(work, settings.repeats if method != "local" else 1)
        records.append(
            {
                "kind": "radii",
                "network": name,
                "units": sum(net.sizes[1:-1]),
                "method": method,
                "samples": m,
                "first_seconds": constants,
                **timing._asdict(),
                "radii_per_second": m / timing.seconds,
                "median_radius": float(work().median()),
            }
        )
    return records


def _cpu_timed(run: Callable[[], T]) -> tuple[float, T]:
    """Return the processor time of one call, which other processes hardly disturb, and its result."""
    start = time.process_time()
    result = run()
    return time.process_time() - start, result


def _tables(name: str, settings: Settings) -> list[dict[str, Any]]:
    """Compare the default method with the time of a fit and with the radii of "multiplier" and "shared", on one thread."""
    X, y = getattr(datasets, f"load_{name}")(return_X_y=True)
    here, there, known, _ = train_test_split(X, y, test_size=0.2, random_state=settings.seed, stratify=y)
    scaler = StandardScaler().fit(here)
    x = torch.from_numpy(scaler.transform(there))
    records = []
    for objective in ("contrastive", "margin"):
        for hidden in ((8,),) if settings.quick else ((64,), (64, 64)):
            logger.info("tables: %s, %s, %s", name, objective, hidden)
            model = LRRNClassifier(hidden, objective, epochs=2 if settings.quick else 60, random_state=settings.seed)
            fit, _ = _cpu_timed(partial(model.fit, scaler.transform(here), known))
            net = model.network_
            radii: dict[str, dict[str, Any]] = {}
            with one_thread():
                certify(copy.deepcopy(net), x, "shared", seconds=0.0)  # compile and load everything, and cache no constants
                for method in ("auto", "multiplier", "shared"):
                    budget = None if method == "auto" else 0.2 if settings.quick else BUDGETS["auto"]
                    first, _ = _cpu_timed(partial(certify, net, x[:1], method, seconds=budget))
                    every, found = _cpu_timed(partial(certify, net, x, method, seconds=budget))
                    radii[method] = {"constants": first, "a_sample": every / len(x), "radius": found.radius}
            mine, known_radius = radii["auto"]["radius"], radii["multiplier"]["radius"]
            positive = known_radius > 0
            records.append(
                {
                    "kind": "tables",
                    "network": f"{name} {name_of(net)}, {objective}",
                    "samples": len(x),
                    "fit_seconds": fit,
                    **{f"{method}_constants": radii[method]["constants"] for method in ("auto", "multiplier")},
                    **{f"{method}_a_sample": value["a_sample"] for method, value in radii.items()},
                    "times_shared": float((mine / radii["shared"]["radius"])[positive].median()),
                    "times_multiplier": float((mine / known_radius)[positive].median()),
                    "least_times_multiplier": float((mine / known_radius)[positive].min()),
                }
            )
    return records


def _bounds(width: int, settings: Settings) -> list[dict[str, Any]]:
    """Time the bound on the whole network and on the 45 pairs of outputs, once each: they are deterministic and slow."""
    net = random_network((784, width, width, 10), settings.seed, torch.float64)
    spectral = float(net.lipschitz("spectral"))
    i, j = torch.tril_indices(10, 10, -1)
    pairs = pair_constants(net.energy_snapshot(torch.float64), "spectral").rho[i, j]
    records = []
    for method in ("paper", "spectral", "auto", "multiplier"):
        budget = None if method not in BUDGETS else 0.2 if settings.quick else BUDGETS[method]
        logger.info("bounds: %s, %s", name_of(net), method)
        # new networks, without cached results
        fresh, other = (random_network((784, width, width, 10), settings.seed, torch.float64) for _ in range(2))
        whole, value = timed(partial(fresh.lipschitz, method, seconds=budget))
        energy, way = other.energy_snapshot(torch.float64), "pairwise" if method == "paper" else method
        every, constants = timed(partial(pair_constants, energy, way, budget))
        records.append(
            {
                "kind": "bounds",
                "network": name_of(net),
                "units": 2 * width,
                "method": method,
                "budget": budget,
                "network_seconds": whole,
                "network_bound": float(value),
                "network_ratio": float(value) / spectral,
                "pairs_seconds": every,
                "pairs_ratio": statistics.median((constants.rho[i, j] / pairs).tolist()),
            }
        )
    return records


def present(records: list[dict[str, Any]]) -> list[Part]:
    """Turn the records into a table of rates, one of the default method and one of bounds."""
    radii = [record for record in records if record["kind"] == "radii"]
    bounds = [record for record in records if record["kind"] == "bounds"]
    rates = [
        (
            record["method"],
            f"{record['samples']:,}",
            seconds(record["first_seconds"]),
            seconds(record["seconds"]),
            seconds(record["spread"]),
            number(record["radii_per_second"]),
            number(record["median_radius"]),
            str(record["threads"]),
        )
        for record in radii
    ]
    sizes = [
        (
            record["network"],
            record["method"],
            seconds(record["network_seconds"]),
            f"{record['network_ratio']:.3f}",
            seconds(record["pairs_seconds"]),
            f"{record['pairs_ratio']:.3f}",
        )
        for record in bounds
    ]
    defaults = [
        (
            record["network"],
            f"{record['samples']:,}",
            seconds(record["fit_seconds"]),
            *(seconds(record[what]) for what in ("auto_constants", "auto_a_sample", "multiplier_constants")),
            f"{record['times_shared']:.3f}",
            f"{record['times_multiplier']:.3f}",
            f"{record['least_times_multiplier']:.3f}",
        )
        for record in records
        if record["kind"] == "tables"
    ]
    times = ("auto: constants", "auto: a sample", "multiplier: constants")
    parts = [
        Table(
            f"Certified radii, {radii[0]['network']}, {radii[0]['units']} units; constants are computed on the first sample",
            ("method", "samples", "first sample", "seconds", "+-", "radii a second", "median radius", "threads"),
            rates,
        ),
        Table(
            "The default method, auto, on held-out rows of tables: processor time; radii over those of shared and multiplier",
            ("network", "rows", "fit", *times, "shared, median", "multiplier, median", "least"),
            defaults,
        ),
        Table(
            "Lipschitz bounds, random weights: of the network, and the median over the 45 pairs of outputs",
            ("network", "method", "network", "times spectral", "45 pairs", "times spectral"),
            sizes,
        ),
    ]
    return [part for part in parts if part.rows]  # results of earlier versions have fewer of them
