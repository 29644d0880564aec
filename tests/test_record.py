"""The record: baselines certify what is true, rows continue where they stopped, and the report says what was measured."""

from __future__ import annotations

import json
import math
import shutil
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import quadprog
import torch
from typer.testing import CliRunner

from lrrn import datasets
from lrrn.attacks import minimal_perturbation, pgd
from lrrn.cli import app
from lrrn.runtime.storage import FileFormatError
from lrrn.studies.record import baselines, record_report, scores, stages
from lrrn.studies.record import record as record_module
from lrrn.studies.record.baselines import NearestPrototypes, SortNetwork
from lrrn.studies.record.baselines.learners import LEARNERS
from lrrn.studies.record.baselines.sorting import proven_norm
from lrrn.studies.record.baselines.training import Plan, shifted, train
from lrrn.studies.record.contenders import EPS, Plain
from lrrn.studies.record.earlier import earlier
from lrrn.studies.record.recipes import BASELINES, OURS, ROWS, recipe
from lrrn.studies.record.record import record
from lrrn.studies.record.rows import Extent, Row, images, plan
from lrrn.studies.record.scores import BEST, disagreements, figures
from lrrn.studies.record.stages import ATTACK, STAGES, Effort, execute, finished, kept

TINY = Extent(samples=60, tests=20, quick=True)
LITTLE = Effort(images=4, autoattack=0, bound_seconds=0.2)


def draw(*shape, seed=0, scale=1.0):
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture(scope="module")
def digits():
    """Training and test digits, as float64 tensors and labels."""
    return [
        torch.from_numpy(part).to(torch.float64 if part.dtype == np.float32 else torch.int64)
        for split in ("train", "test")
        for part in datasets.load("digits", split)
    ]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Small files in place of MNIST; there are no others."""
    folder, rng = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    place = folder / "MNIST" / "raw"
    place.mkdir(parents=True)
    for split, n in (("train", 72), ("test", 20)):
        labels = np.arange(n) % 10
        pictures = np.clip(rng.normal(20 * labels[:, None, None], 40, (n, 28, 28)), 0, 255)
        for stem, array in zip(datasets.FILES[split], (pictures, labels), strict=True):
            head = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
            (place / stem).write_bytes(head + array.astype(np.uint8).tobytes())
    return folder


# --- sorting networks and linear classifiers --------------------------------------------------------------------------


def linear_distances(w, b, x):
    """Distances to the nearest boundary of a linear classifier, in closed form."""
    y = x @ w.mT + b
    best = y.argmax(-1)
    gaps = (w[best][:, None] - w).norm(dim=-1)
    return ((y.gather(1, best[:, None]) - y) / gaps).scatter(1, best[:, None], math.inf).amin(1)


def test_the_radius_of_a_linear_classifier_is_the_distance_to_its_boundary():
    w, b, x = draw(6, 9), draw(6, seed=1), draw(50, 9, seed=2)
    radii, exact = SortNetwork([w], [b]).radii(x), linear_distances(w, b, x)
    torch.testing.assert_close(radii, exact, rtol=1e-9, atol=1e-9)
    assert (radii <= exact).all()
    attack = minimal_perturbation(SortNetwork([w], [b]), x, (x @ w.mT + b).argmax(-1))
    assert (attack.distance >= radii).all() and (attack.distance <= 1.01 * exact).all()


def test_logistic_regression_is_exactly_certified(digits):
    X, y, X_test, _ = digits
    model = LEARNERS["logistic"].learn(X.numpy(), y.numpy(), {"C": 0.1, "max_iter": 200}, 0, "cpu", None)
    w, b = model.weights[0], model.biases[0]
    torch.testing.assert_close(model.radii(X_test), linear_distances(w, b, X_test), rtol=1e-9, atol=1e-9)
    assert float((model(X_test).argmax(-1) == digits[3]).double().mean()) > 0.9


@pytest.mark.parametrize("sort", ["group_sort", "max_min", "full_sort"])
def test_no_attack_on_a_sorting_network_lies_inside_a_radius(sort):
    # far from norm one: what the layers' makers promised must not be believed
    weights = [draw(12, 6, scale=0.9), draw(8, 12, seed=1, scale=0.5), draw(5, 8, seed=2)]
    net = SortNetwork(weights, [draw(len(w), seed=k, scale=0.3) for k, w in enumerate(weights)], sort)
    x = draw(60, 6, seed=7)
    radii, label = net.radii(x), net(x).argmax(-1)
    found = minimal_perturbation(net, x, label)
    assert (radii > 0).any() and (found.distance >= radii).all()
    assert not pgd(net, x, label, radii * (1 - 1e-9)).success.any()
    # tight where the norms are attained: a layer that only rotates leaves the distances of what follows
    turn = torch.linalg.qr(draw(6, 6, seed=3)).Q
    last, b = draw(4, 6, seed=4), draw(4, seed=5)
    shift = 100 * torch.arange(6, dtype=torch.float64)  # so far apart that sorting changes nothing
    ordered = SortNetwork([turn, last], [shift, b], "full_sort")
    torch.testing.assert_close(ordered.radii(x), linear_distances(last @ turn, last @ shift + b, x), rtol=1e-6, atol=1e-6)


def test_sorts_are_those_of_their_libraries():
    x = torch.tensor([[3.0, 1.0, 2.0, 5.0]], dtype=torch.float64)
    same, none = torch.eye(4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    expected = {"group_sort": [1.0, 3.0, 2.0, 5.0], "max_min": [3.0, 5.0, 2.0, 1.0], "full_sort": [1.0, 2.0, 3.0, 5.0]}
    for sort, values in expected.items():
        assert SortNetwork([same, same], [none, none], sort)(x).tolist() == [values]
    with pytest.raises(ValueError, match="unknown sort 'bubble'"):
        SortNetwork([same], [none], "bubble")
    with pytest.raises(ValueError, match="even widths; got 3"):
        SortNetwork([same[:3], same[:, :3]], [none[:3], none])


@pytest.mark.parametrize("shape", [(20, 30), (600, 540)])
def test_norms_are_proven_and_tight(shape):
    w = draw(*shape)
    exact = float(torch.linalg.matrix_norm(w, ord=2))
    assert exact <= proven_norm(w) <= exact * (1 + 1e-6)


def test_rounding_is_inside_the_radius():
    """Scores that rounding decides are not certified: the leads here are far below what float64 can resolve."""
    w = torch.tensor([[1e8, 1.0], [1e8, 1.0]], dtype=torch.float64) + draw(2, 2, scale=1e-9)
    net = SortNetwork([w], [torch.zeros(2, dtype=torch.float64)])
    assert (net.radii(draw(50, 2, scale=1e4)) == 0).all()


# --- nearest prototypes -----------------------------------------------------------------------------------------------


def exact_radius(points, labels, x):
    """Distance from x to the nearest input that is nearer to some other class: a convex programme for each of its points."""
    squares = ((points - x) ** 2).sum(1)
    own = labels == labels[squares.argmin()]
    nearest = math.inf
    for j in np.flatnonzero(~own):
        # least |u|^2 with |x + u - w_j| <= |x + u - w_i| for every w_i of the label
        rows = 2 * (points[j] - points[own])
        limits = squares[j] - squares[own]
        nearest = min(nearest, 2 * quadprog.solve_qp(np.eye(len(x)), np.zeros(len(x)), rows.T, limits)[1])
    return math.sqrt(nearest)


def test_two_points_have_the_distance_to_their_bisector():
    model = NearestPrototypes(torch.tensor([[0.0, 0.0], [4.0, 0.0]]), torch.tensor([0, 1]))
    x = torch.tensor([[1.0, 3.0], [-2.0, 0.0], [3.5, 7.0]], dtype=torch.float64)
    torch.testing.assert_close(model.radii(x), (x[:, 0] - 2).abs(), rtol=1e-9, atol=0)
    d = torch.cdist(x, model.points)
    torch.testing.assert_close(model.radii(x, "margin"), (d[:, 0] - d[:, 1]).abs() / 2, rtol=1e-9, atol=0)


@pytest.mark.parametrize("tried", [64, 1])
def test_radii_of_prototypes_are_below_the_exact_ones_and_near(tried, monkeypatch):
    monkeypatch.setattr("lrrn.studies.record.baselines.prototypes.OWN", tried)
    points, labels = draw(31, 4), torch.arange(31) % 3
    model, x = NearestPrototypes(points, labels), draw(40, 4, seed=1, scale=1.5)
    exact = torch.tensor([exact_radius(points.numpy(), labels.numpy(), row.numpy()) for row in x], dtype=torch.float64)
    margin, bisector = model.radii(x, "margin"), model.radii(x)
    assert (margin <= bisector).all() and (bisector <= exact * (1 + 1e-7)).all()
    assert float((bisector / exact).median()) > 0.9
    # where one prototype of the label does for all directions the bound is exact
    assert bool(torch.isclose(bisector, exact, rtol=1e-6).any())


def test_no_attack_on_prototypes_lies_inside_a_radius(digits):
    X, y, X_test, y_test = digits
    model = NearestPrototypes(X, y)
    x, label = X_test[:40], model(X_test[:40]).argmax(-1)
    assert torch.equal(label, y[torch.cdist(x, X).argmin(1)]) and float((label == y_test[:40]).double().mean()) > 0.9
    found = minimal_perturbation(model, x, label)
    radii = model.radii(x)
    assert (radii > 0).all() and (found.distance >= radii).all() and float((found.distance / radii).median()) < 1.2
    with pytest.raises(ValueError, match="class 1 has no prototype"):
        NearestPrototypes(X[:2], torch.tensor([0, 2]))


# --- learning ---------------------------------------------------------------------------------------------------------


def test_prototypes_learn_to_certify_more(digits):
    X, y, X_test, y_test = digits
    options = {"per_class": 10, "margin": 1.0, "paired": 8, "batch_size": 50, "learning_rate": 2.0}
    shares = []
    for epochs, rate in ((1, 1e-9), (8, 2.0)):
        recipe = {**options, "epochs": epochs, "learning_rate": rate, "optimizer": "nesterov", "decay": 0.9}
        model = LEARNERS["prototypes"].learn(X.float().numpy(), y.numpy(), recipe, 0, "cpu", None)
        right = model(X_test).argmax(-1) == y_test
        shares.append(float((right & (model.radii(X_test) > 0.5)).double().mean()))
    assert shares[1] > shares[0] + 0.1


@pytest.mark.parametrize("optimizer", ["adam", "nesterov"])
def test_training_continues_to_the_same_bits(digits, tmp_path, optimizer):
    X, y = digits[0].float(), digits[1]
    plan_ = Plan(3, batch_size=100, learning_rate=0.01, optimizer=optimizer, schedule="one_cycle", shift_share=0.5)

    def run(folder, stop_at):
        torch.manual_seed(0)
        model = torch.nn.Linear(64, 10)
        calls = []

        def loss(x, label):
            calls.append(1)
            if len(calls) == stop_at:
                raise KeyboardInterrupt
            return torch.nn.functional.cross_entropy(model(x), label)

        seconds = train(model, loss, X, y, plan_, 5, folder)
        return model, seconds

    whole, _ = run(None, None)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, 20)  # in the second epoch
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 1
    parts, seconds = run(tmp_path, None)
    assert torch.equal(whole.weight, parts.weight) and torch.equal(whole.bias, parts.bias) and seconds > 0
    with pytest.raises(ValueError, match="another run"):
        train(parts, lambda x, label: x.sum(), X, y, replace(plan_, epochs=4), 5, tmp_path)


def test_plans_refuse_what_cannot_be():
    with pytest.raises(ValueError, match="epochs and batch_size must be at least 1"):
        Plan(epochs=0, batch_size=1, learning_rate=1.0)
    with pytest.raises(ValueError, match="unknown optimizer 'lion'"):
        Plan(epochs=1, batch_size=1, learning_rate=1.0, optimizer="lion")
    with pytest.raises(ValueError, match="only square images"):
        shifted(torch.zeros(1, 5), 0.5, torch.Generator())


def test_shifts_move_by_one_pixel_and_leave_the_rest():
    x = draw(400, 16).float()
    moved = shifted(x, 0.8, torch.Generator().manual_seed(0)).reshape(-1, 4, 4)
    pictures, kinds = x.reshape(-1, 4, 4), []
    for before, after in zip(pictures, moved, strict=True):
        ways = {
            "none": torch.equal(before, after),
            "down": torch.equal(before[:-1], after[1:]) and not after[0].any(),
            "up": torch.equal(before[1:], after[:-1]) and not after[-1].any(),
            "right": torch.equal(before[:, :-1], after[:, 1:]) and not after[:, 0].any(),
            "left": torch.equal(before[:, 1:], after[:, :-1]) and not after[:, -1].any(),
        }
        assert sum(ways.values()) == 1
        kinds += [way for way, is_so in ways.items() if is_so]
    # each way has probability 0.2, so 80 of 400 with a standard deviation of 8
    assert all(abs(kinds.count(way) - 80) < 32 for way in ("none", "down", "up", "right", "left"))


@pytest.mark.parametrize(("name", "module"), [("torchlip", "deel.torchlip"), ("orthogonium", "orthogonium")])
def test_peers_learn_and_are_exported_as_they_are(name, module, digits):
    pytest.importorskip(module, reason="peers are in the benchmark environment only")
    X, y, X_test, y_test = digits
    options = {**recipe("mnist", name), "hidden_sizes": (32, 32), "epochs": 10, "batch_size": 64}
    before = torch.random.get_rng_state()
    model = LEARNERS[name].learn(X.float().numpy(), y.numpy(), options, 0, "cpu", None)
    assert torch.equal(before, torch.random.get_rng_state())
    assert model.norms[:-1] == pytest.approx((1.0, 1.0), abs=0.02)
    label = model(X_test).argmax(-1)
    assert float((label == y_test).double().mean()) > 0.85
    radii = model.radii(X_test)
    assert (minimal_perturbation(model, X_test[:30], label[:30]).distance >= radii[:30]).all()
    again = LEARNERS[name].learn(X.float().numpy(), y.numpy(), options, 0, "cpu", None)
    assert torch.equal(model.weights[0], again.weights[0])


def test_baselines_are_saved_and_loaded(tmp_path):
    sort = SortNetwork([draw(4, 3), draw(2, 4)], [draw(4), draw(2)], "max_min")
    points = NearestPrototypes(draw(6, 3), torch.tensor([0, 1, 0, 1, 2, 2]))
    x = draw(5, 3, seed=3)
    for model in (sort, points):
        baselines.save(model, tmp_path / "model")
        again = baselines.load(tmp_path / "model")
        assert torch.equal(model(x), again(x)) and torch.equal(model.radii(x), again.radii(x))


def test_a_peer_that_is_missing_is_named(monkeypatch):
    monkeypatch.setattr("lrrn.studies.record.baselines.learners._installed", lambda module: False)
    assert Row("logistic", "mnist").obstacle() is None and Row("wide", "mnist").obstacle() is None
    assert Row("torchlip", "mnist").obstacle() == "deel-torchlip is not installed here; make .venv-bench/.bench installs it"


# --- rows -------------------------------------------------------------------------------------------------------------


def test_rows_belong_to_their_recipes(monkeypatch):
    row = Row("wide", "mnist")
    assert row.name != replace(row, extent=TINY).name != replace(row, extent=replace(TINY, validation=True)).name
    before = row.name
    monkeypatch.setitem(OURS, "wide", {**OURS["wide"], "margin": 1.0})
    assert row.name != before and row.name.startswith("mnist-wide-") and row.name.endswith("-seed0")
    assert row.title == "lrrn wide (784-2048-10)"
    assert recipe("kmnist_7011", "wide") == recipe("kmnist", "wide")


def test_the_plan_has_seeds_for_what_is_random():
    rows = plan("mnist", None, 3, 0, Extent())
    counts = {kind: sum(row.kind == kind for row in rows) for kind in ROWS}
    assert counts == {kind: 1 if kind in ("logistic", "nearest") else 3 for kind in (*OURS, *BASELINES)}
    assert [(row.kind, row.seed) for row in plan("mnist", ["wide:1", "logistic"], 2, 10, Extent())] == [
        ("wide", 11),
        ("logistic", 10),
    ]
    for wrong in ("narrow", "wide:2", "wide:x"):
        with pytest.raises(ValueError, match=f"there is no row '{wrong}'"):
            plan("mnist", [wrong], 2, 0, Extent())
    with pytest.raises(ValueError, match="there is no record on 'cifar'"):
        plan("cifar", None, 1, 0, Extent())
    with pytest.raises(ValueError, match="seeds must be at least 1"):
        plan("mnist", None, 0, 0, Extent())


def test_validation_does_without_test_images(root, monkeypatch):
    (X, y), (X_test, _) = images("mnist", Extent(), root, False)
    assert len(X) == 72 and len(X_test) == 20
    monkeypatch.setattr("lrrn.studies.record.rows.load_test", lambda *_: pytest.fail("test images were loaded"))
    (kept_X, kept_y), (held_X, held_y) = images("mnist", Extent(validation=True), root, False)
    assert np.array_equal(np.concatenate([kept_X, held_X]), X) and len(held_X) == 12
    assert np.array_equal(np.concatenate([kept_y, held_y]), y)


# --- stages -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["paper_a", "prototypes", "nearest"])
def test_a_row_is_carried_out_once_and_its_figures_agree(kind, root, tmp_path):
    row = Row(kind, "mnist", extent=TINY)
    assert not finished(row, tmp_path, LITTLE) and figures(tmp_path) is None
    execute(row, tmp_path, root, "cpu", False, LITTLE)
    assert finished(row, tmp_path, LITTLE)
    result = figures(tmp_path)
    assert result["images"] == 20 and result["samples"] == 60 and result["parameters"] > 0
    assert set(result["radii"]) == {*result["methods"], BEST, *(["local", "shared"] if row.is_ours else [])}
    right = kept(tmp_path, stages.RIGHT)[0]
    assert result["accuracy"] == right.mean()
    tightest = np.max([kept(tmp_path, f"radii-{method}")[0] for method in result["methods"]], axis=0)
    if row.is_ours:
        tightest[:4] = np.maximum(tightest[:4], kept(tmp_path, "radii-local")[0])
        shared, before = (kept(tmp_path, f"radii-{method}")[0] for method in ("shared", result["methods"][-1]))
        assert len(shared) == 20 and (shared >= before).all() and (shared > before).any()
        tightest = np.maximum(tightest, shared)
    for eps in EPS:
        assert result["radii"][BEST]["certified"][f"{eps:g}"] == (right & (tightest > eps)).mean()
    attacks = result["attacks"]
    assert attacks["images"] == 4 and attacks["attacks inside a radius"][BEST] == 0 and disagreements(result) == []
    times = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    execute(row, tmp_path, root, "cpu", False, LITTLE)
    assert times == {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    # more images than before: what is there stays, and the rest is added
    more = replace(LITTLE, images=6, stages=(ATTACK,))
    before = kept(tmp_path, ATTACK)[0]
    execute(row, tmp_path, root, "cpu", False, more)
    assert len(kept(tmp_path, ATTACK)[0]) == 6 and np.array_equal(kept(tmp_path, ATTACK)[0][:4], before)


def test_an_interrupted_stage_continues_where_it_was(root, tmp_path, monkeypatch):
    row = Row("logistic", "mnist", extent=TINY)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    execute(row, whole, root, "cpu", False, LITTLE)
    monkeypatch.setitem(stages.CHUNKS, "certify", 7)
    monkeypatch.setattr(stages, "SAVE_SECONDS", -1.0)
    seen = []

    def radii(self, X, method):
        seen.append(len(X))
        if len(seen) == 3:
            raise KeyboardInterrupt
        return radii.true(self, X, method)

    radii.true = Plain.radii
    monkeypatch.setattr(Plain, "radii", radii)
    with pytest.raises(KeyboardInterrupt):
        execute(row, parts, root, "cpu", False, LITTLE)
    assert len(kept(parts, "radii-pairwise")[0]) == 14 and figures(parts) is None
    execute(row, parts, root, "cpu", False, LITTLE)
    assert seen == [7, 7, 6, 6]
    for name in ("radii-pairwise", stages.RIGHT, ATTACK):
        # products of other sizes may round otherwise
        np.testing.assert_allclose(kept(parts, name)[0], kept(whole, name)[0], rtol=1e-9)


def test_after_the_deadline_nothing_is_begun(root, tmp_path):
    row = Row("logistic", "mnist", extent=TINY)
    execute(row, tmp_path, root, "cpu", False, replace(LITTLE, deadline=0.0))
    assert not stages.is_trained(tmp_path)
    execute(row, tmp_path, root, "cpu", False, replace(LITTLE, stages=("train",)))
    execute(row, tmp_path, root, "cpu", False, replace(LITTLE, deadline=0.0))
    assert stages.is_trained(tmp_path) and len(kept(tmp_path, stages.RIGHT)[0]) == 0


def test_autoattack_is_held_against_the_radii_too(root, tmp_path):
    pytest.importorskip("torchattacks", reason="torchattacks is in the benchmark environment only")
    row, effort = Row("logistic", "mnist", extent=TINY), replace(LITTLE, autoattack=3, steps=10, queries=20)
    execute(row, tmp_path, root, "cpu", False, effort)
    distances, right = kept(tmp_path, "autoattack")[0], kept(tmp_path, stages.RIGHT)[0][:3]
    assert (distances[~right] == 0).all() and (distances[right] >= kept(tmp_path, "radii-pairwise")[0][:3][right]).all()
    attacks = figures(tmp_path)["attacks"]
    assert attacks["AutoAttack"]["images"] == 3
    for eps in map("{:g}".format, EPS):
        assert attacks["attacked"][eps] <= attacks["by our attacks"][eps]


def test_a_contradiction_would_be_noticed(root, tmp_path):
    execute(Row("logistic", "mnist", extent=TINY), tmp_path, root, "cpu", False, LITTLE)
    right, distances = kept(tmp_path, stages.RIGHT)[0], kept(tmp_path, ATTACK)[0]
    first = int(np.flatnonzero(right[:4])[0])
    values, facts = kept(tmp_path, "radii-pairwise")
    values[first] = distances[first] * (1 + 1e-6)
    stages._keep(tmp_path, "radii-pairwise", values, facts)
    assert disagreements(figures(tmp_path))[:1] == ["1 attacks inside a radius (pairwise)"]
    distances[first] = 0.2
    stages._keep(tmp_path, ATTACK, distances, facts)
    assert "attacked below certified accuracy (best at 0.5)" in disagreements(figures(tmp_path))


# --- the report -------------------------------------------------------------------------------------------------------


def made_up(accuracy, share, median=1.0):
    """Figures of a row with one certified accuracy at every size."""
    part = {"images": 10, "accuracy": accuracy, "median": median, "median, 0 where wrong": median}
    part["certified"] = {f"{eps:g}": share for eps in EPS}
    facts = {
        "recipe": {},
        "samples": 1,
        "versions": {},
        "device of training": "d",
        "device of certifying": ["d"],
        "parameters": 5,
    }
    curve = {"eps": [0.0, 1.0], "certified": [accuracy, share]}
    more = {"images": 10, "accuracy": accuracy, "radii": {BEST: part}, "curve": curve, "seconds of training": 1.0}
    return {**facts, **more, "seconds of certifying": {BEST: 2.0}}


def test_the_report_compares_means_over_seeds_with_targets_and_baselines():
    rows = plan("mnist", ["wide", "paper_a", "prototypes", "torchlip"], 2, 0, Extent())
    results = {row: made_up(0.98, 0.69 + 0.01 * row.seed) for row in rows if row.kind == "wide"}
    results |= {row: made_up(0.95, 0.73) for row in rows if row.kind == "prototypes"}
    results |= {row: made_up(0.97, 0.5, median=1.19) for row in rows if row.kind == "paper_a" and row.seed == 0}
    reasons = {row: "absent" for row in rows if row not in results}
    parts = {section.title.split(",")[0]: section for section in record_report.sections("mnist", rows, results, reasons)}
    main = parts["Clean and certified accuracy"]
    assert main.tables[0][2][0][:5] == [
        "lrrn wide (784-2048-10)",
        "2 of 2",
        "10",
        "98.00 (98.00 to 98.00)",
        "69.50 (69.00 to 70.00)",
    ]
    assert "deel-torchlip MLP, seed 0: absent" in main.text[-1]
    verdicts = {(c.row, c.quantity): c.verdict for c in parts["Targets"].comparisons}
    assert verdicts["lrrn wide (784-2048-10)", "certified at 1.58"] == "met"
    assert verdicts["lrrn paper_a (784-64-64-10)", "median radius"] == "missed"
    assert record_report.brief(rows, results)[1][0] == ["lrrn wide (784-2048-10)", "2", "98.0", *["69.5"] * 5, "1.000"]
    held = parts["Against the baselines"]
    assert [line[-2:] for line in held.tables[0][2]] == [["-3.50 points", "not ahead"]] * 3
    assert held.text[-1].startswith("Not ahead of nearest prototypes") and "3.50 points at 1.58" in held.text[-1]


def test_the_command_reports_on_rows_from_anywhere(root, tmp_path, monkeypatch):
    monkeypatch.setattr(record_module, "QUICK", TINY)
    places = ["--work", str(tmp_path / "work"), "--output", str(tmp_path / "out"), "--json", str(tmp_path / "r.json")]
    command = ["record", "mnist", "--quick", "--no-download", "--data", str(root), *places]
    first = CliRunner().invoke(app, [*command, "--images", "3", "--stages", "train,certify,attack", "--rows", "logistic"])
    assert first.exit_code == 0, first.output
    content = json.loads((tmp_path / "r.json").read_text())
    assert [(name.split("-")[1], row["attacks"]["images"]) for name, row in content["rows"].items()] == [("logistic", 3)]
    text = (tmp_path / "out" / "report.md").read_text()
    assert "| logistic regression | 1 of 1 | 20 |" in text and "lrrn wide (784-16-10), seed 0: not finished" in text
    assert "no attack lies inside a radius, in every row, by every method and at every size" in text
    assert "chosen on a validation split" in text
    # rows that another machine carried out, in the same folder
    for kind in ("prototypes", "paper_b"):
        row = Row(kind, "mnist", extent=TINY)
        certified = replace(LITTLE, stages=("train", "certify"))
        execute(row, tmp_path / "work" / "record-quick" / row.name, root, "cpu", False, certified)
    again = CliRunner().invoke(app, [*command, "--report-only"])
    assert again.exit_code == 0 and len(json.loads((tmp_path / "r.json").read_text())["rows"]) == 3


# --- rows of an earlier report ------------------------------------------------------------------------------------------

COMMITTED = Path(__file__).parents[1] / "docs" / "record" / "mnist"


@pytest.fixture(scope="module")
def reported(root, tmp_path_factory):
    """A report on two rows, whose work folder is gone."""
    place = tmp_path_factory.mktemp("reported")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record_module, "QUICK", TINY)
        again(root, place / "work", place / "out", ["logistic", "paper_b"])
    return place / "out"


@pytest.fixture
def places(reported, tmp_path, monkeypatch):
    """An empty work folder and a copy of that report."""
    monkeypatch.setattr(record_module, "QUICK", TINY)
    shutil.copytree(reported, tmp_path / "out")
    return tmp_path / "work", tmp_path / "out"


def again(root, work, output, rows, stages=("train", "certify", ATTACK), **options):
    common = {"quick": True, "jobs": 1, "root": root, "download": False}
    return record("mnist", work, output, rows=rows, stages=stages, n_images=3, **common, **options)


def content_of(output):
    return json.loads((output / "results.json").read_text())


def names(*kinds):
    return [Row(kind, "mnist", extent=TINY).name for kind in kinds]


def lines(output, start):
    return [line for line in (output / "report.md").read_text().splitlines() if line.startswith(start)]


def test_a_report_keeps_rows_whose_work_folders_are_gone(root, places, reported):
    work, output = places
    done = again(root, work, output, ["logistic"], ["train", "certify"])
    before, after = content_of(reported)["rows"], content_of(output)["rows"]
    ours, logistic = names("paper_b", "logistic")
    assert list(after) == [ours, logistic] and after[ours] == before[ours]
    # the work folder has the last word, if it has less to say
    assert "attacks" in before[logistic] and "attacks" not in after[logistic]
    assert len(lines(output, "| lrrn paper_b")) > 5 and lines(output, "| lrrn paper_b") == lines(reported, "| lrrn paper_b")
    for name in ("ours", "baselines"):
        picture = f"figures/certified-{name}.svg"
        assert (output / picture).read_bytes() == (reported / picture).read_bytes()
    assert lines(output, "Taken over") == ["Taken over from an earlier report: lrrn paper_b (784-8-8-10), seed 0."]
    assert (
        not lines(reported, "Taken over")
        and done.failed == {}
        and [line[0] for line in done.table[1]][1:] == ["logistic regression"]
    )


def test_a_row_trained_anew_keeps_its_figures_until_it_is_certified(root, places, reported):
    work, output = places
    again(root, work, output, ["logistic"], ["train"])
    (logistic,) = names("logistic")
    assert stages.is_trained(work / "record-quick" / logistic)
    assert content_of(output)["rows"] == content_of(reported)["rows"]
    assert lines(output, "Taken over")[0].endswith("lrrn paper_b (784-8-8-10), seed 0; logistic regression, seed 0.")


def test_other_images_are_not_mixed_in(root, places, monkeypatch):
    work, output = places
    monkeypatch.setattr(record_module, "QUICK", replace(TINY, tests=10))
    again(root, work, output, ["logistic"], ["train", "certify"])
    assert [row["images"] for row in content_of(output)["rows"].values()] == [10] and not lines(output, "Taken over")


@pytest.mark.parametrize(
    "change", [{"data": "kmnist"}, {"extent": {"validation": True, "samples": 60, "tests": 20, "quick": True}}]
)
def test_another_record_is_neither_mixed_in_nor_replaced_unless_it_is_a_smoke_run(change, root, places):
    work, output = places
    content = {**content_of(output), **change}
    (output / "results.json").write_text(json.dumps({**content, "extent": {**content["extent"], "quick": False}}))
    kept_as_it_is(
        root, work, output, "is a record on k?mnist .* and not one on mnist .*; move it away or choose another --output"
    )
    (output / "results.json").write_text(json.dumps(content))
    again(root, work, output, None, report_only=True)
    assert content_of(output)["rows"] == {} and content_of(output)["data"] == "mnist"


def kept_as_it_is(root, work, output, message):
    """The report is refused before any work is done, and its results are what they were."""
    before = (output / "results.json").read_bytes()
    with pytest.raises(FileFormatError, match=message):
        again(root, work, output, ["logistic"])
    assert (output / "results.json").read_bytes() == before and not work.exists()


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["rows"], []),
        (["extent"], None),
        (["rows", 0], "x"),
        (["rows", 0, "row"], "mnist-logistic-00000000-seed0"),
        (["rows", 0, "accuracy"], "high"),
        (["rows", 0, "accuracy"], math.nan),
        (["rows", 0, "radii", BEST, "certified"], {"1": 0.5}),
        (["rows", 0, "radii"], {}),
        (["rows", 0, "seconds of training"], -1.0),
        (["rows", 0, "curve", "eps"], [0.0, 1.0]),
        (["rows", 0, "curve", "certified", 0], math.inf),
        (["rows", 0, "attacks", "attacks inside a radius"], {}),
        (["rows", 0, "versions", "python"], "\ud800"),
    ],
)
def test_damaged_results_are_refused_before_any_work(path, value, root, places):
    work, output = places
    content = place = content_of(output)
    keys = [next(iter(content["rows"])) if (k, key) == (1, 0) else key for k, key in enumerate(path)]
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    (output / "results.json").write_text(json.dumps(content))
    kept_as_it_is(root, work, output, r"results.json is damaged \(.*, and a new report would replace it; move it away")


@pytest.mark.parametrize("content", [b"", b'{"item": "record", "rows"', b"\xff\xfe", b"[" * 100_000, b'{"item": "all"}', b"[]"])
def test_what_is_no_record_is_refused_before_any_work(content, root, places):
    work, output = places
    (output / "results.json").write_bytes(content)
    kept_as_it_is(root, work, output, "(is damaged|was not written by lrrn record).*; move it away or choose another")


def test_the_committed_record_is_taken_over_whole(tmp_path):
    shutil.copytree(COMMITTED, tmp_path / "out")
    before, known = content_of(COMMITTED)["rows"], {row.name for row in plan("mnist", None, 3, 0, Extent())}
    # seeds that this call is not about stay
    record("mnist", tmp_path / "work", tmp_path / "out", seeds=1, report_only=True)
    assert content_of(tmp_path / "out")["rows"] == {name: row for name, row in before.items() if name in known} != {}
    if known == set(before):
        for start in ("| ", "Not ", "Attacked ", "Targets"):
            assert lines(tmp_path / "out", start) == lines(COMMITTED, start)


def test_figures_are_the_same_after_a_round_trip(root, tmp_path, places):
    row = Row("nearest", "mnist", extent=TINY)
    execute(row, tmp_path / "row", root, "cpu", False, LITTLE)
    found = figures(tmp_path / "row")
    assert json.loads(json.dumps(found)) == found
    # infinite radii, and rows without a curve, which the picture then lacks
    content = content_of(places[1])
    for name in content["rows"]:
        content["rows"][name]["radii"][BEST]["median"] = math.inf
        del content["rows"][name]["curve"]
    (places[1] / "results.json").write_text(json.dumps(content))
    before = earlier(places[1], "mnist", TINY)
    assert [row.name for row in before] == list(content["rows"])
    main = record_report.sections("mnist", list(before), before, {})[0]
    assert main.figures == [] and [cells[9] for cells in main.tables[0][2]] == ["inf"] * 2


def test_bad_requests_are_refused_before_any_work(root, tmp_path):
    for options, message in (
        ({"rows": ["narrow"]}, "there is no row 'narrow'"),
        ({"stages": ["paint"]}, "unknown stage 'paint'; use some of train"),
        ({"stages": []}, "unknown stage ''"),
        ({"jobs": 0}, "jobs must be at least 1"),
        ({"budget": 0.0}, "budget must be above 0"),
        ({"n_images": -1}, "numbers of images must be at least 0"),
    ):
        with pytest.raises(ValueError, match=message):
            record("mnist", tmp_path / "w", tmp_path / "o", root=root, download=False, **options)
    with pytest.raises(datasets.DataError, match="there is neither train-images"):
        record("kmnist", tmp_path / "w", tmp_path / "o", root=root, download=False)
    for command, message in (
        (["record"], "Missing argument 'DATASET'"),
        (["record", "cifar"], "there is no record on 'cifar'"),
        (["record", "mnist", "--stages", "paint"], "unknown stage 'paint'"),
        (["reproduce", "record"], "the record is a command of its own: lrrn record DATASET"),
        (["reproduce", "table1", "--rows", "wide"], "No such option: --rows"),
    ):
        refused = CliRunner().invoke(app, [*command, "--work", str(tmp_path / "w")], terminal_width=200)
        assert refused.exit_code != 0 and message in " ".join(refused.output.split())
    assert not (tmp_path / "w").exists() or not list((tmp_path / "w").rglob("training.json"))
    assert scores.GRID[0] == 0 and STAGES[0] == "train"
