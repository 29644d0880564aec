"""The record's baselines certify what is true."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import quadprog
import torch

from lrrn import Conv, datasets
from lrrn.attacks import minimal_perturbation, pgd
from lrrn.learning import augment, checkpoint
from lrrn.studies.record import baselines
from lrrn.studies.record.baselines import NearestPrototypes, SortNetwork, learners
from lrrn.studies.record.baselines.learners import LEARNERS
from lrrn.studies.record.baselines.sorting import Geometry, proven_norm
from lrrn.studies.record.baselines.training import Plan, shifted, train
from lrrn.studies.record.recipes import recipe
from lrrn.studies.record.rows import Row


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


# --- sorting networks and linear classifiers ------------------------------------------------------------------------------


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


# --- convolutions ---------------------------------------------------------------------------------------------------------

PLACES = [Geometry((2, 7, 6), 1, 1), Geometry((6, 7, 6), 2, 1)]


def convolving(scale=0.6, places=PLACES):
    """Two convolutions, of which the second has a stride that leaves pixels out, and two matrices; far from norm one."""
    weights = [
        draw(6, 2, 3, 3, scale=scale),
        draw(8, 6, 4, 4, seed=1, scale=scale / 3),
        draw(10, 72, seed=2),
        draw(5, 10, seed=3),
    ]
    biases = [draw(len(w), seed=9 + k, scale=0.3) for k, w in enumerate(weights)]
    return SortNetwork(weights, biases, "max_min", places)


def unrolled(weight, place):
    """The matrix of a convolution, by its values at unit vectors."""
    units = torch.eye(math.prod(place.in_shape), dtype=torch.float64).view(-1, *place.in_shape)
    return torch.nn.functional.conv2d(units, weight, stride=place.stride, padding=place.padding).flatten(1).mT


def test_convolutions_are_those_of_torch_and_their_norms_are_proven():
    net, x = convolving(), draw(9, 84, seed=4)
    hidden = x
    for k, place in enumerate(PLACES):
        maps = torch.nn.functional.conv2d(
            hidden.view(-1, *place.in_shape), net.weights[k], net.biases[k], stride=place.stride, padding=place.padding
        )
        first, second = maps.chunk(2, 1)  # channels
        hidden = torch.cat([torch.maximum(first, second), torch.minimum(first, second)], 1).flatten(1)
        assert float(torch.linalg.matrix_norm(unrolled(net.weights[k], place), ord=2)) <= net.norms[k]
    dense = SortNetwork(list(net.weights[2:]), list(net.biases[2:]), "max_min")
    torch.testing.assert_close(net(x), dense(hidden), rtol=1e-12, atol=1e-12)


def test_no_attack_on_a_convolutional_sorting_network_lies_inside_a_radius():
    net, x = convolving(), draw(40, 84, seed=7)
    radii, label = net.radii(x), net(x).argmax(-1)
    assert (radii > 0).any() and (minimal_perturbation(net, x, label).distance >= radii).all()
    # tight where the norms are attained: convolutions that only add up to channels far apart, so that sorting changes nothing
    unit = torch.zeros(2, 1, 1, 1, dtype=torch.float64)
    unit[0] = 3.0
    last, b, far = draw(4, 18, seed=4), draw(4, seed=5), torch.tensor([100.0, -100.0], dtype=torch.float64)
    one = SortNetwork([unit, last], [far, b], "max_min", [Geometry((1, 3, 3), 1, 0)])
    x = draw(30, 9, seed=6, scale=0.1)
    exact = linear_distances(3 * last[:, :9], last @ far.repeat_interleave(9) + b, x)
    whole = linear_distances(3 * last, last @ far.repeat_interleave(9) + b, torch.cat([x, torch.zeros_like(x)], 1))
    radii = one.radii(x)
    assert (radii <= exact * (1 + 1e-9)).all()
    # the bound knows the rows of the last matrix in full
    torch.testing.assert_close(radii, whole, rtol=2e-4, atol=1e-9)


def test_rounding_of_convolutions_is_inside_the_radius():
    size = torch.tensor([1e8] * 4 + [1.0] * 4, dtype=torch.float64)
    weights = [torch.full((2, 1, 2, 2), 1e8, dtype=torch.float64), size + draw(2, 8, scale=1e-9)]
    net = SortNetwork(weights, [draw(2), draw(2)], "max_min", [Geometry((1, 3, 3), 1, 0)])
    assert (net.radii(draw(50, 9, scale=1e4)) == 0).all()
    # and the bound holds: the error of computed scores, by exact rational numbers
    net, x = convolving(), draw(3, 84, seed=8)
    still, growing = net._rounding()
    exact = [exact_scores(net, row) for row in x]
    for row, scores, true in zip(x, net(x), exact, strict=True):
        error = math.sqrt(sum(float(Fraction(float(a)) - b) ** 2 for a, b in zip(scores, true, strict=True)))
        assert error <= still + growing * float(row.norm())


def test_the_rounding_of_a_bias_is_counted_at_every_place():
    """A bias of a channel is one of every unit of it, as in the dense network of the same matrix."""
    place, weight, last = Geometry((1, 20, 20), 1, 0), draw(2, 1, 1, 1, scale=1e-3), draw(3, 800, seed=1)
    biases = [draw(2, seed=2, scale=1e6), draw(3, seed=3)]
    net = SortNetwork([weight, last], biases, "max_min", [place])
    dense = SortNetwork([unrolled(weight, place), last], [biases[0].repeat_interleave(400), biases[1]], "max_min")
    # the error of the last matrix is the same in both and the larger part, and grows with the bias
    assert 0.5 * dense._rounding()[0] < net._rounding()[0] <= dense._rounding()[0]


def exact_scores(net, row):
    """The scores of one sample, in rational numbers."""
    values = [Fraction(float(v)) for v in row]
    for k, (w, b) in enumerate(zip(net.weights, net.biases, strict=True)):
        place = net.geometry[k] if k < len(net.geometry) else None
        matrix = w if place is None else unrolled(w, place)
        shift = b if place is None else b.repeat_interleave(len(matrix) // len(b))
        sums = []
        for line, start in zip(matrix.tolist(), shift.tolist(), strict=True):
            sums.append(Fraction(start) + sum(Fraction(a) * v for a, v in zip(line, values, strict=True) if a))
        if k == len(net.weights) - 1:
            return sums
        half = len(sums) // 2
        pairs = list(zip(sums[:half], sums[half:], strict=True))
        values = [*map(max, pairs), *map(min, pairs)]
    raise AssertionError


def test_gradients_and_scores_do_not_depend_on_the_rows_at_once(monkeypatch):
    net, x = convolving(), draw(9, 84, seed=4).requires_grad_(True)
    scores = net(x)
    (whole,) = torch.autograd.grad(scores.square().sum(), x)
    monkeypatch.setattr("lrrn.studies.record.baselines.sorting.BLOCK_NUMBERS", 4 * 96 * 9)  # 9 places read 96 numbers each
    assert 1 < net._rows < 9
    again = net(x)
    (parts,) = torch.autograd.grad(again.square().sum(), x)
    torch.testing.assert_close(again, scores, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-12)


def test_layers_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"sorted by max_min; got 'group_sort'"):
        SortNetwork([draw(2, 1, 1, 1), draw(3, 8)], [draw(2), draw(3)], geometry=[Geometry((1, 2, 2), 1, 0)])
    with pytest.raises(ValueError, match="1 convolutions should come before at least one matrix"):
        SortNetwork([draw(2, 4), draw(3, 2)], [draw(2), draw(3)], "max_min", [Geometry((1, 2, 2), 1, 0)])
    for place in (Geometry((2, 2, 2), 1, 0), Geometry((1, 3, 2), 1, 0)):
        with pytest.raises(ValueError, match="does not fit the"):
            SortNetwork([draw(2, 1, 1, 1), draw(3, 8)], [draw(2), draw(3)], "max_min", [place])


# --- nearest prototypes ---------------------------------------------------------------------------------------------------


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


# --- learning -------------------------------------------------------------------------------------------------------------


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
    augmented = {"shift_share": 0.5, "shifts": 1, "flips": True, "image_shape": (1, 8, 8)}
    plan_ = Plan(3, batch_size=100, learning_rate=0.01, optimizer=optimizer, schedule="one_cycle", **augmented)

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


def test_a_convolutional_peer_is_exported_as_it_is(monkeypatch):
    pytest.importorskip("orthogonium", reason="peers are in the benchmark environment only")
    chance = np.random.default_rng(0)
    y = np.arange(80) % 10
    X = (0.08 * y[:, None] + 0.3 * chance.random((80, 3072))).astype(np.float32)
    models = []
    plain = learners._exported
    monkeypatch.setattr(learners, "_exported", lambda model, places: models.append(model) or plain(model, places))
    options = {**recipe("cifar10", "orthogonium_conv", quick=True), "batch_size": 20}
    before = torch.random.get_rng_state()
    model = LEARNERS["orthogonium_conv"].learn(X, y, options, 0, "cpu", None)
    assert torch.equal(before, torch.random.get_rng_state())
    # trained to norm one, and proven to be within a ten-thousandth of it
    assert math.prod(model.norms[:-1]) < 1.001 and max(model.norms) < 1.0005 and min(model.norms) > 0.9
    x = torch.from_numpy(X)
    with torch.no_grad():
        torch.testing.assert_close(model(x.double()).float(), models[0](x), rtol=1e-4, atol=1e-5)
    radii, label = model.radii(x.double()), model(x.double()).argmax(-1)
    assert (radii > 0).any() and (minimal_perturbation(model, x[:10].double(), label[:10]).distance >= radii[:10]).all()
    with pytest.raises(ValueError, match="convolutions without pooling, then widths"):
        LEARNERS["orthogonium_conv"].learn(X, y, {**options, "hidden_sizes": (16, Conv(4, 3))}, 0, "cpu", None)


def test_the_training_of_a_peer_continues_to_the_same_bits(tmp_path, monkeypatch):
    pytest.importorskip("orthogonium", reason="peers are in the benchmark environment only")
    X, y = np.random.default_rng(0).random((40, 3072), dtype=np.float32), np.arange(40) % 10
    options = {**recipe("cifar10", "orthogonium_conv", quick=True), "batch_size": 20, "epochs": 2}
    learn = LEARNERS["orthogonium_conv"].learn
    whole = learn(X, y, options, 0, "cpu", None)
    save = checkpoint.save

    def stopped(*arguments):
        save(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(checkpoint, "save", stopped)
        learn(X, y, options, 0, "cpu", tmp_path)
    parts = learn(X, y, options, 0, "cpu", tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(whole.weights, parts.weights, strict=True))


def test_flips_and_shifts_are_those_of_our_networks(monkeypatch):
    x, label = draw(6, 24).float(), torch.arange(6) % 2
    seen = []
    model = torch.nn.Linear(24, 2)

    def loss(inputs, classes):
        seen.append(inputs)
        return torch.nn.functional.cross_entropy(model(inputs), classes)

    options = Plan(1, batch_size=6, learning_rate=0.01, shifts=1, flips=True, image_shape=(2, 3, 4))
    train(model, loss, x, label, options, 5)
    rows = torch.randperm(6, generator=torch.Generator().manual_seed(5 * 1_000_003))
    expected = augment.flipped(augment.shifted(x[rows], rows, 0, 5, 1, (2, 3, 4)), rows, 0, 5, (2, 3, 4))
    assert torch.equal(seen[0], expected) and not torch.equal(expected, x[rows])


def test_baselines_are_saved_and_loaded(tmp_path):
    sort = SortNetwork([draw(4, 3), draw(2, 4)], [draw(4), draw(2)], "max_min")
    points = NearestPrototypes(draw(6, 3), torch.tensor([0, 1, 0, 1, 2, 2]))
    for model, x in ((sort, draw(5, 3, seed=3)), (points, draw(5, 3, seed=3)), (convolving(), draw(5, 84, seed=3))):
        baselines.save(model, tmp_path / "model")
        again = baselines.load(tmp_path / "model")
        assert torch.equal(model(x), again(x)) and torch.equal(model.radii(x), again.radii(x))


def test_a_peer_that_is_missing_is_named(monkeypatch):
    monkeypatch.setattr("lrrn.studies.record.baselines.learners._installed", lambda module: False)
    assert Row("logistic", "mnist").obstacle() is None and Row("wide", "mnist").obstacle() is None
    assert Row("torchlip", "mnist").obstacle() == "deel-torchlip is not installed here; make .venv-bench/.bench installs it"
