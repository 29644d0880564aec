"""Measure all figures about GPUs: tests, then timings of solves, training steps and complete trainings, with accuracy checks.

Solves and steps are timed as CUDA graphs between device events; the median of several replays is reported. Both contenders of a
solve take the smallest number of steps that reaches the required error, measured against a float64 solution. The error is
computed for the solution that was timed. Sections can be run separately; results of earlier calls stay in the JSON file.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

import lrrn
from lrrn import datasets
from lrrn.learning import Contrastive, Data, FreeEnergy, Margin, Settings, Trainer, fit_many
from lrrn.learning.cuda_graph import BURSTS, until_look
from lrrn.learning.flat import FlatParameters
from lrrn.learning.objectives import Objective
from lrrn.learning.step import Step
from lrrn.qp import BoxQP
from lrrn.runtime.devices import open_connections
from lrrn.solvers import solve
from lrrn.solvers.accelerated import Accelerated
from lrrn.solvers.base import recompute
from lrrn.solvers.half_precision import LONGEST, ON_CHIP
from lrrn.studies.bench.problems import images
from lrrn.studies.common.measures import measure_classifier
from lrrn.studies.common.runs import DECAYS, Run
from lrrn.studies.record.recipes import recipe

ERROR = 1e-4
WARM = 0.05
"""Seconds of warm-up launches before the first timed one: an idle device takes this long to reach full speed."""
EPOCH = 128
"""Number of steps of the epoch that timings are taken from; larger than any number of consecutive steps."""
WATCHED = 16
"""Number of training steps, from the first one on, in which missed solves are counted; the next ones are timed."""
CASES = [((784, 64, 64, 10), n) for n in (16, 256, 4096, 60_000)] + [
    ((784, 256, 256, 10), 256),
    ((784, 256, 256, 10), 4096),
    ((784, 1024, 1024, 10), 256),
    ((784, 1024, 1024, 10), 4096),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", default=list(SECTIONS), help=f"some of {', '.join(SECTIONS)}; all if not given")
    parser.add_argument(
        "--model", type=Path, action="append", default=[], help="a saved classifier with 784 inputs: real weights; repeatable"
    )
    parser.add_argument("--epochs", type=int, default=100, help="epochs of the whole training")
    parser.add_argument("--conv-epochs", type=int, default=4, help="epochs of the convolutional network")
    parser.add_argument("--work", type=Path, default=Path("out/runs-gpu"), help="folder for the runs of the reproduction")
    parser.add_argument("--seconds", type=float, default=1200, help="when to interrupt the reproduction; the next call goes on")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    open_connections()
    if not torch.cuda.is_available():
        raise SystemExit("there is no CUDA device here")
    report: dict[str, Any] = json.loads(options.json.read_text()) if options.json and options.json.is_file() else {}
    report |= {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}
    for name in options.sections:
        if name not in SECTIONS:
            parser.error(f"there is no section {name!r}; choose from {', '.join(SECTIONS)}")
        began = time.perf_counter()
        options.earlier = report.get(name)
        report[name] = []
        for row in SECTIONS[name](options):
            report[name].append(row)
            print(json.dumps(row), flush=True)
            if options.json:
                options.json.write_text(json.dumps(report, indent=2) + "\n")
        print(name, f"{time.perf_counter() - began:.0f} s", flush=True)


Rows = Iterator[dict[str, Any]]


# --- tests ----------------------------------------------------------------------------------------------------------------


def tests(options: argparse.Namespace) -> Rows:
    """Run the tests marked ``gpu``, each file in a separate process: most of their time is spent compiling kernels."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
    # files with missing packages cause collection errors, but they contain no such tests
    listed = subprocess.run([*command, "--collect-only", "tests"], capture_output=True, text=True, check=False).stdout
    files = sorted({line.split("::")[0] for line in listed.splitlines() if "::" in line})
    started = {file: subprocess.Popen([*command, file], stdout=subprocess.PIPE, text=True) for file in files}
    for name, process in started.items():
        lines = process.communicate()[0].splitlines()
        failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
        if process.returncode:
            print("\n".join(lines[-400:]), flush=True)
        yield {"file": name, "exit": process.returncode, "last line": lines[-1], "failed": failed}


# --- solving --------------------------------------------------------------------------------------------------------------


def replayed(work: Callable[[], None], repeats: int = 30) -> float:
    """Capture ``work`` in a CUDA graph and return the median microseconds of a replay."""
    work()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return median(graph.replay, repeats)


def median(launch: Callable[[], Any], repeats: int, rewind: Callable[[], Any] = lambda: None) -> float:
    """Return the median microseconds between device events around a launch, after a warm-up.

    ``rewind`` is called before every launch and is not timed.
    """
    times = []
    until = time.perf_counter() + WARM
    while len(times) < repeats:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        rewind()
        start.record()
        launch()
        end.record()
        end.synchronize()
        if time.perf_counter() >= until:
            times.append(1e3 * start.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def ours(qp: BoxQP, exact: torch.Tensor) -> dict[str, Any]:
    """Time our solver (start, rounds of sweeps, gradient, residual) with the fastest settings that reach the error."""
    z, never = torch.zeros_like(qp.q), torch.zeros(qp.n_samples, dtype=torch.float64, device=qp.q.device)
    best: dict[str, Any] = {"us": None}
    refines = getattr(Accelerated().begin(qp), "refines", False)  # if so, one call has its own rounds
    for rounds in (1,) if refines else (1, 2, 3, 4, 6, 8, 12):
        for sweeps in range(4, 400 if refines else LONGEST + 1, 4):
            answer: dict[str, torch.Tensor] = {}

            def work(rounds: int = rounds, sweeps: int = sweeps, answer: dict[str, torch.Tensor] = answer) -> None:
                stepper = Accelerated().begin(qp)
                stepper.by_parts = True  # as in a solve to the default tolerance
                z.zero_()
                g = z if refines else -qp.q
                for _ in range(rounds):
                    stepper.advance(qp, z, g, sweeps, never)
                    g, answer["residual"] = stepper.check(qp, z)

            work()
            if float((z.double() - exact).abs().max()) <= ERROR:
                microseconds = replayed(work)
                error, residual = float((z.double() - exact).abs().max()), float((answer["residual"] / qp.scale).max())
                exactly = float((qp.residual(z) / qp.scale).max())
                if best["us"] is None or microseconds < best["us"]:
                    best = {"us": microseconds, "error": error, "rounds": rounds, "sweeps": sweeps}
                    best |= {"largest relative residual": residual, "recomputed by torch": exactly}
                break
    return best


def fista(qp: BoxQP, exact: torch.Tensor) -> dict[str, Any]:
    """Time projected gradient with the best constant momentum, in float32 with torch's matrix products."""
    h = qp.hessian.dense()
    values = torch.linalg.eigvalsh(h.double())
    small, large = float(values[0]), float(values[-1])
    momentum = (1 - math.sqrt(small / large)) / (1 + math.sqrt(small / large))
    z = torch.zeros_like(qp.q)

    def run(steps: int) -> torch.Tensor:
        here, ahead = torch.zeros_like(qp.q), torch.zeros_like(qp.q)
        for _ in range(steps):
            new = qp.project(torch.addmm(ahead + qp.q / large, ahead, h, alpha=-1 / large))
            here, ahead = new, torch.lerp(here, new, 1 + momentum)
        return here

    for steps in range(8, 800, 8):
        if float((run(steps).double() - exact).abs().max()) <= ERROR:

            def work(steps: int = steps) -> None:
                z.copy_(run(steps))
                recompute(qp, z)

            microseconds = replayed(work, 10)
            return {"us": microseconds, "error": float((z.double() - exact).abs().max()), "steps": steps}
    return {"us": None}


def solving(options: argparse.Namespace) -> Rows:
    """Time one free phase to an error of 1e-4, with residual, against torch FISTA: random, trained, box and free units."""
    easy = conditioned(lrrn.LRRN((784, 64, 64, 10), generator=generator(), device="cuda"), 10.0)
    cases = [("random weights, scaled", easy, n) for n in (16, 256, 4096, 60_000)]
    cases += [("random weights", lrrn.LRRN(sizes, generator=generator(), device="cuda"), n) for sizes, n in CASES]
    for path in options.model:
        trained = lrrn.load(path).network_.to("cuda")
        batches = (16, 256, 4096, 60_000) if sum(trained.sizes[1:-1]) <= ON_CHIP else (256, 4096)
        cases += [("trained weights", trained, n) for n in batches]
    for name, constraint in (("units in [-0.1, 0.1]", (-0.1, 0.1)), ("free units", "free")):
        net = lrrn.LRRN((784, 64, 64, 10), constraint=constraint, generator=generator(), device="cuda")
        cases.append((f"random weights, {name}", net, 60_000))
    for name, net, n in cases:
        x = images(n, 784, 1, torch.float32).to("cuda")
        qp, precise = net.energy_snapshot(torch.float32).free(x), net.energy_snapshot(torch.float64).free(x.double())
        exact = solve(precise, tol=1e-11, max_sweeps=5000).z
        held = float(((exact <= precise.lo) | (exact >= precise.hi)).double().mean())
        row = {"weights": name, "units": qp.dim, "batch": n, "condition": condition(net), "share at a bound": held}
        row |= {"lrrn": ours(qp, exact), "torch FISTA": fista(qp, exact)}
        if row["lrrn"]["us"]:
            row["million solves a second"] = n / row["lrrn"]["us"]
        if row["lrrn"]["us"] and row["torch FISTA"]["us"]:
            row["torch FISTA / lrrn"] = row["torch FISTA"]["us"] / row["lrrn"]["us"]
        yield row


def condition(net: lrrn.LRRN) -> float:
    """Return the condition number of the free phase's Hessian."""
    values = torch.linalg.eigvalsh(net.energy_snapshot(torch.float64).free_hessian.dense())
    return float(values[-1] / values[0])


def conditioned(net: lrrn.LRRN, target: float) -> lrrn.LRRN:
    """Scale a network's weights until its Hessian has the given condition number."""
    weights, low, high = [w.detach().clone() for w in net.W], 0.0, 1.0
    for _ in range(30):
        scale = (low + high) / 2
        with torch.no_grad():
            for w, before in zip(net.W, weights, strict=True):
                w.copy_(scale * before)
        low, high = (low, scale) if condition(net) > target else (scale, high)
    return net


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# --- training -------------------------------------------------------------------------------------------------------------


def batch_of(n: int) -> Data:
    x = images(n, 784, 2, torch.float32).to("cuda")
    label = torch.arange(n, device="cuda") % 10
    return Data(x, functional.one_hot(label, 10).float(), label)


def steps(options: argparse.Namespace) -> Rows:
    """Time a captured training step with its optimiser: a graph of several steps, as in training, divided by their number."""
    for objective, sizes, batch, optimizer in (
        (Contrastive(), (784, 64, 64, 10), 10, "adam"),
        (Contrastive(), (784, 64, 64, 10), 10, "sgd"),
        (Contrastive(), (784, 64, 64, 10), 256, "adam"),
        (FreeEnergy(), (784, 64, 64, 10), 10, "sgd"),
        (Margin(), (784, 64, 64, 10), 256, "adamw"),
        (Margin(adversarial_eps=1.0), (784, 64, 64, 10), 256, "adamw"),
        (Margin(), (784, 2048, 10), 256, "adamw"),
        (Margin(adversarial_eps=1.0), (784, 2048, 10), 256, "adamw"),
    ):
        net = lrrn.LRRN(sizes, generator=generator(), device="cuda")
        settings = Settings(optimizer=optimizer, learning_rate=1e-3, batch_size=batch)
        kind = "Margin, adversarial" if getattr(objective, "adversarial_eps", 0) else type(objective).__name__
        name = f"{kind}, {'-'.join(map(str, sizes))}"
        row = {"step": name, "optimizer": optimizer, "batch": batch}
        yield row | timed_step(net, objective, settings, batch_of(EPOCH * batch), BURSTS[0] if len(sizes) > 3 else BURSTS[1])


def timed_step(net: lrrn.LRRN, objective: Objective, settings: Settings, data: Data, burst: int) -> dict[str, Any]:
    """Return the microseconds of a captured step, in graphs of ``burst`` steps, its sweeps, and how many solves missed tol."""
    flat, batch = FlatParameters(net), settings.batch_size
    of_step = Step(net, objective, settings, flat)
    with flat.attached():
        of_step.begin()
        of_step.project(first=True)
        captured = of_step.captured(data, 0)
        of_step.set_rate(captured.rate)
        captured.begin(torch.arange(EPOCH * batch).view(EPOCH, batch), [settings.learning_rate] * EPOCH, 0, 0)
        samples = missed = taken = 0
        while taken < WATCHED:
            # counts are read and sweeps chosen at the intervals of training
            _, (more, _, more_missed) = captured.run(until_look(taken))
            samples, missed, taken = samples + more, missed + more_missed, taken + until_look(taken)
        with captured._side_stream():
            graph = captured.graph(burst)
            microseconds = median(graph.replay, 20, captured._clock.rewind) / burst
            captured._clock.rewind()
            parts = by_kernel(graph.replay, burst)
    return {"us": microseconds, "sweeps": captured.sweeps, "missed": missed, "of": samples, "us by kernel": parts}


def convolutions(options: argparse.Namespace) -> Rows:
    """Train a convolutional network on CIFAR-10 with adversarial inputs: milliseconds a step by epoch, then a captured step."""
    X, y = datasets.load("cifar10", "train", download=False)
    layer = lrrn.Conv(512, 8, stride=4)
    chosen = recipe("cifar10", "conv") | {"hidden_sizes": (layer,), "epochs": options.conv_epochs}
    model = lrrn.LRRNClassifier(**chosen, random_state=0, device="cuda").fit(X, y)
    n_steps = -(-len(X) // chosen["batch_size"])
    name = "Margin, adversarial, 3x32x32-512c8s4-10, CIFAR-10"
    for line in model.history_:
        share = line["unconverged"] / (4 * len(X))  # two solves and two adjoints a sample
        row = {"step": name, "batch": chosen["batch_size"], "epoch": line["epoch"], "ms": 1e3 * line["seconds"] / n_steps}
        yield row | {"sweeps": line["sweeps"], "share missed": share, "condition number": line["condition_number"]}
    rows = slice(0, EPOCH * chosen["batch_size"])
    x, label = (torch.from_numpy(part[rows]).to("cuda") for part in (X, y))
    data = Data(x.float(), functional.one_hot(label.long(), 10).float(), label.long())
    names = ("optimizer", "batch_size", "decoupled_weight_decay", "shifts", "flips", "max_condition", "tol")
    settings = Settings(learning_rate=1e-5, **{name: chosen[name] for name in names})
    objective = Margin(chosen["margin"], chosen["temperature"], chosen["adversarial_eps"])
    yield {"step": f"{name}, replayed"} | timed_step(model.network_, objective, settings, data, BURSTS[1])


def by_kernel(launch: Callable[[], Any], steps: int, repeats: int = 2) -> dict[str, float]:
    """Return the microseconds of each kernel per training step, longest first; a launch contains ``steps`` steps."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        for _ in range(repeats):
            launch()
        torch.cuda.synchronize()
    times: dict[str, float] = {}
    for event in found.events() or ():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            name = event.name.split("<")[0].removeprefix("void ")[:60]
            times[name] = times.get(name, 0.0) + (event.time_range.end - event.time_range.start) / (repeats * steps)
    return {name: round(us, 1) for name, us in sorted(times.items(), key=lambda part: -part[1])}


def many(options: argparse.Namespace) -> Rows:
    """Train 1, 4, 8, 16 and 32 networks for an epoch of 10,000 steps; the 32 in groups of 8 or 16."""
    data = batch_of(100_000)
    for count, at_once in ((1, 1), (1, 1), (4, 4), (8, 8), (16, 16), (32, 8), (32, 16)):  # the first is a warm-up
        nets = [lrrn.LRRN((784, 64, 64, 10), generator=generator(seed), device="cuda") for seed in range(count)]
        trainers = [Trainer(net, Contrastive(), Settings(epochs=1, learning_rate=0.1)) for net in nets]
        began = time.perf_counter()
        fit_many(trainers, data, at_once=at_once)
        yield {"networks": count, "at once": at_once, "seconds": time.perf_counter() - began}


def wide(options: argparse.Namespace) -> Rows:
    """Train the record's wide network on MNIST: seconds, sweeps a solve and missed solves by epoch, and the accuracy."""
    X, y = datasets.load("mnist", "train", download=False)
    X_test, y_test = datasets.load("mnist", "test", download=False)
    torch.zeros(1, device="cuda")  # starts the device
    began = time.perf_counter()
    model = lrrn.LRRNClassifier(**recipe("mnist", "wide"), random_state=0, device="cuda").fit(X, y)
    seconds = time.perf_counter() - began
    names = ("epoch", "seconds", "sweeps", "unconverged", "condition_number")
    epochs = [{name: line[name] for name in names} for line in model.history_]
    solves = 4 * len(X) * len(epochs)  # two solves and two adjoints a sample
    yield {"seconds": seconds, "accuracy": model.score(X_test, y_test), "solves": solves, "epochs": epochs}


def paper(options: argparse.Namespace) -> Rows:
    """Train the paper's MNIST network of Table 2 and measure it; train it twice for a few epochs to compare bits."""
    run = Run("contrastive", "mnist", decay=DECAYS[0])
    X, y = lrrn.datasets.load("mnist", "train")
    X_test, y_test = lrrn.datasets.load("mnist", "test")
    short = [run.estimator(device="cuda", epochs=2).fit(X, y).network_ for _ in range(2)]
    same = all(torch.equal(a, b) for a, b in zip(*(net.parameters() for net in short), strict=True))
    began = time.perf_counter()
    model = run.estimator(device="cuda", epochs=options.epochs).fit(X, y)
    seconds = time.perf_counter() - began
    model.network_.to("cpu")  # the paper's twenty passes are coordinate descent
    record, figures = model.history_[-1], measure_classifier(model, X_test, y_test, 0, 1.0, 0)
    found = {"epochs": options.epochs, "seconds": seconds, "same bits again": same, "an epoch": record["seconds"]}
    columns = {key: figures[key] for key in ("accuracy", "rho", "median margin", "delta")}
    yield {**found, **columns, "sweeps": record["sweeps"], "unconverged": record["unconverged"]}


def reproduction(options: argparse.Namespace) -> Rows:
    """Reproduce the paper's tables, possibly in several calls: each resumes where the last one was interrupted."""
    output = options.work / "report"
    command = [sys.executable, "-m", "lrrn", "reproduce", "all", "--device", "cuda", "--no-download"]
    began = time.perf_counter()
    process = subprocess.Popen([*command, "--work", str(options.work), "--output", str(output)])
    try:
        process.wait(options.seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        process.wait()
    part: dict[str, Any] = {"seconds": time.perf_counter() - began, "exit": process.returncode}
    if process.returncode == 0:
        results = json.loads((output / "results.json").read_text())
        verdicts = [comparison["verdict"] for comparison in results["comparisons"]]
        part |= {"runs": len(results["runs"]), "verdicts": {verdict: verdicts.count(verdict) for verdict in set(verdicts)}}
    earlier = options.earlier or []
    yield from earlier
    yield {**part, "seconds of all parts": part["seconds"] + sum(other["seconds"] for other in earlier)}


SECTIONS: dict[str, Callable[[argparse.Namespace], Rows]] = {
    "tests": tests,
    "solving": solving,
    "steps": steps,
    "convolutions": convolutions,
    "wide": wide,
    "many": many,
    "paper": paper,
    "reproduction": reproduction,
}


if __name__ == "__main__":
    main()
