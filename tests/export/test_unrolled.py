"""Oracles: solves to the end in float64, mpmath, and a runtime that rounds as badly as the standard model allows."""

from __future__ import annotations

import json

import mpmath
import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

import convolutions
import lrrn
from lrrn.export.rounding import Box, IterationError, Rounding, Stored
from lrrn.export.splitting import InputMap, Splitting
from varied_networks import NETWORKS, network

KINDS = [*NETWORKS, "linear"]


def simple(kind):
    """Return a network whose Hessian is diagonal, or whose output does not move."""
    sizes = (4, 1, 2) if kind == "one unit" else (4, 3, 2)
    beta = (0.0, 0.0) if kind == "no reconstruction" else (1.0, 0.0)
    net = lrrn.LRRN(sizes, beta=beta, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with torch.no_grad():
        if kind.startswith("zero"):
            net.W[kind == "zero read-out"].zero_()
    return net


def made(kind):
    if kind == "wide":
        return lrrn.LRRN((2, 60, 60, 3), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    if kind == "linear":
        return lrrn.LRRN((12, 3), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return network(kind)


def inside(lower, upper, n=200, d=12):
    """Inputs of a box, half of them corners."""
    share = torch.rand(n, d, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    share[: n // 2] = share[: n // 2].round()
    return lower + share * (upper - lower)


def exact_output(net, x):
    """Outputs, and how far they may be from those of the exact minimiser."""
    solved = net.infer(x, tol=1e-13, solver="newton", on_failure="ignore")
    gain = float(torch.linalg.matrix_norm(net.W[-1].detach(), 2)) + 1
    return solved.output, gain * solved.error_bound[:, None] + 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("error", [None, 1.0, 0.05])
@pytest.mark.parametrize("kind", KINDS)
def test_the_bound_holds_inside_the_box(kind, error, dtype):
    net = made(kind)
    plain = lrrn.unroll(net, -0.5, 1.5, error=error, dtype=dtype)
    x = inside(-0.5, 1.5).to(dtype)
    output, slack = exact_output(net, x.double())
    assert plain(x).dtype == dtype
    assert ((plain(x).double() - output).abs() <= plain.error_bound + slack).all()
    assert error is None or float(plain.error_bound.max()) <= error
    assert float(plain.error_bound.max()) < (1.0 if error else 5e-3 if dtype == torch.float32 else 1e-7)


@pytest.mark.parametrize("unfolded", [False, True], ids=["products", "matrices"])
def test_the_bound_holds_with_convolutions(unfolded, monkeypatch):
    net = convolutions.network("then dense", monkeypatch, unfolded)
    plain = lrrn.unroll(net, 0, 1, dtype=torch.float64)
    x = inside(0, 1, 50, 64)
    output, slack = exact_output(convolutions.dense_twin(net), x)
    assert ((plain(x) - output).abs() <= plain.error_bound + slack).all()
    assert float(plain.error_bound.max()) < 1e-7


def test_large_convolutions_are_refused_before_any_work():
    net = lrrn.LRRN(((3, 32, 32), lrrn.Conv(32, 5, stride=2), 10))
    with pytest.raises(
        ValueError, match=r"convolutions has 6,272; at most 4,096 are possible\. torch\.export of the network itself"
    ):
        lrrn.unroll(net, 0, 1)


def test_the_box_holds_its_ends_when_they_are_rounded():
    plain = lrrn.unroll(network("paper"), -0.1, 0.7)
    ends = torch.tensor([-0.1, 0.7]).double()
    assert ends[0] < -0.1 and float(plain.lower[0]) == ends[0] and float(plain.upper[0]) == 0.7 > ends[1]


def parts(kind, lower=-0.5, upper=1.5, dtype=torch.float32):
    net = made(kind)
    energy = net.energy_snapshot(torch.float64)
    offset, scale, *ends = (torch.full((net.sizes[0],), v, dtype=torch.float64) for v in (0.1, 1.3, lower, upper))
    given, box = InputMap(offset, scale), Box(*ends)
    exact = Splitting.of(energy, given)
    kept = (exact.matrix, exact.input, exact.bias, exact.lo, exact.hi, exact.fixed_point(box.centre), exact.bias, exact.bias)
    stored = Stored(*(t.to(dtype) for t in kept))
    return net, given, exact, stored, box


@pytest.mark.parametrize("kind", NETWORKS)
def test_the_fixed_point_projects_to_the_minimiser(kind):
    net, given, exact, _, _ = parts(kind)
    for x in inside(-0.5, 1.5, 4):
        s = exact.fixed_point(x)
        solved = net.infer(((x - given.offset) / given.scale)[None], tol=1e-13, on_failure="ignore")
        z = torch.cat(solved.activations, -1)[0, : len(s)]
        torch.testing.assert_close(s.clamp(exact.lo, exact.hi) * exact.units, z, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("kind", ["paper", "output an unknown", "zero not feasible"])
def test_errors_of_the_matrices_against_higher_precision(kind):
    net, given, exact, _, _ = parts(kind)
    energy, n = net.energy_snapshot(torch.float64), len(exact.units)
    with mpmath.workdps(50):
        w, c, b = ([mpmath.matrix(p.detach().tolist()) for p in group] for group in (net.W, net.c, net.b))
        h, q, at = mpmath.zeros(n), mpmath.zeros(n, 1), 0
        gain = mpmath.zeros(n, 12)
        for k, size in enumerate(energy.free_sizes):
            a, beta, mid = mpmath.mpf(net.gamma) ** k, mpmath.mpf(net.beta[k]), slice(at, at + size)
            blocks = [(mid, mid, a * (mpmath.eye(size) + beta * w[k] * w[k].T)), (mid, None, a * (b[k] + beta * w[k] * c[k]))]
            if k:
                low = slice(at - energy.free_sizes[k - 1], at)
                below = energy.free_sizes[k - 1]
                blocks += [(low, low, a * (w[k].T * w[k] + beta * mpmath.eye(below))), (mid, low, -a * (1 + beta) * w[k])]
                blocks += [(low, mid, -a * (1 + beta) * w[k].T), (low, None, -a * (w[k].T * b[k] + beta * c[k]))]
            else:
                gain[mid, :] = a * (1 + beta) * w[0]
            for rows, columns, value in blocks:
                if columns is None:
                    q[rows, 0] = q[rows, 0] + value
                else:
                    h[rows, columns] = h[rows, columns] + value
            at += size
        d = mpmath.diag([mpmath.mpf(v) for v in exact.units.tolist()])
        offset, scale = (mpmath.matrix(t.tolist()) for t in (given.offset, given.scale))
        unscaled = mpmath.diag([1 / v for v in scale])
        scaled, step = d * h * d, mpmath.mpf(exact.step)
        inverse = (mpmath.eye(n) + step * scaled) ** -1
        found = {
            "matrix": (2 * inverse - mpmath.eye(n), exact.matrix, exact.matrix_error),
            "input": (2 * step * inverse * d * gain * unscaled, exact.input, exact.input_error),
            "bias": (2 * step * inverse * d * (q - gain * unscaled * offset), exact.bias[:, None], exact.bias_error),
        }
        for name, (value, computed, bound) in found.items():
            off = value - mpmath.matrix(computed.tolist())
            if name == "input":
                assert all(mpmath.mnorm(off[:, j], "f") <= float(bound[j]) < 1e-10 for j in range(12))
            else:
                assert mpmath.mnorm(off, "f") <= bound < 1e-10, name


@pytest.mark.parametrize("lower", [-0.5, 1.5], ids=["box", "point"])
@pytest.mark.parametrize("kind", [*NETWORKS, "wide"])
def test_the_worst_runtime_that_the_model_allows(kind, lower):
    """Every product and sum is wrong by as much as the model allows, in the directions that decay most slowly."""
    _, _, exact, stored, box = parts(kind, lower)
    proven, rounding = IterationError.of(exact, stored, box), Rounding.of(torch.float32)
    matrix, gain, bias = stored.matrix.double(), stored.input.double(), stored.bias.double()
    slow = torch.linalg.eigh(matrix)[1][:, [0, -1]].mT.sign()
    x = inside(lower, 1.5, 40, gain.shape[1])
    target = torch.stack([exact.fixed_point(one) for one in x])
    worst = 0.0
    for turn, push in ((1, slow[1]), (-1, slow[0]), (1, -slow[1])):
        pull = x @ gain.mT + bias + push * rounding.inner(gain.shape[1] + 1) * (x.abs() @ gain.abs().mT + bias.abs())
        s = stored.start.double().expand(len(x), -1)
        for k in range(1, 60):
            mirrored = exact.reflected(s)
            error = rounding.inner(len(matrix) + 1) * (mirrored.abs() @ matrix.abs() + pull.abs())
            s = mirrored @ matrix + pull + turn**k * push * error
            off = float((s - target).norm(dim=1).max())
            assert off <= proven.after(k) + 1e-8
        worst = max(worst, off)
    assert worst > 0.1 * proven.limit  # the bound is not vacuous


@pytest.mark.parametrize("kind", NETWORKS)
def test_the_distance_before_the_first_iteration(kind):
    _, _, exact, stored, box = parts(kind)
    proven = IterationError.of(exact, stored, box)
    far = max(float((exact.fixed_point(x) - stored.start).norm()) for x in inside(-0.5, 1.5, 40))
    assert 0.05 * proven.start < far < proven.start


def test_nothing_is_proven_of_a_matrix_that_does_not_contract():
    _, _, exact, stored, box = parts("paper")
    assert IterationError.of(exact, stored._replace(matrix=1.5 * stored.matrix), box).limit == float("inf")
    net = network("paper").requires_grad_(False)
    net.W[0].mul_(1e18)
    with pytest.raises(ValueError, match=r"cannot be proven|no error could be proven"):
        lrrn.unroll(net, 0, 1, error=1e-6)


def off_by(model, X):
    """Bound how far the library's own outputs are from those of the exact minimiser."""
    scaled = torch.tensor((X - model.offset_in_) / model.scale_in_)
    gain = float(torch.linalg.matrix_norm(model.network_.W[-1].detach().double(), 2))
    return 1.01 * gain * float(model.network_.infer(scaled).error_bound.max())


@pytest.mark.parametrize("standardize", [False, "common", "features"])
def test_estimators_in_their_own_units(standardize):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(200, 4)) * [1, 10, 0.1, 3] + [0, 5, 1, -2]
    y = X @ [1.0, 0.3, -5.0, 0.2] + 30
    model = lrrn.LRRNRegressor(8, epochs=3, standardize=standardize, random_state=0).fit(X, y)
    plain = lrrn.unroll(model, X.min(0), X.max(0), dtype=torch.float64)
    own = off_by(model, X) * float(model.scale_out_[0])
    assert np.abs(plain(torch.tensor(X))[:, 0].numpy() - model.predict(X)).max() <= float(plain.error_bound) + own
    labels = np.where(y > 30, "high", "low")
    model = lrrn.LRRNClassifier(8, epochs=3, standardize=standardize, random_state=0).fit(X, labels)
    plain = lrrn.unroll(model, X.min(0), X.max(0), dtype=torch.float64)
    assert plain.classes.tolist() == ["high", "low"]
    difference = plain(torch.tensor(X)) @ torch.tensor([-1.0, 1.0], dtype=torch.float64)
    assert np.abs(difference.numpy() - model.decision_function(X)).max() <= float(plain.error_bound.sum()) + 2 * off_by(
        model, X
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(dtype=torch.float16), "dtype must be"),
        (dict(error=-1.0), "error must be a positive number"),
        (dict(error=1e-9), r"cannot be proven in torch\.float32 on this box"),
        (dict(lower=[0.0, 1.0]), "one for each of 12 features"),
        (dict(upper=float("inf")), "upper must be a finite number"),
        (dict(upper=1e300), r"must be finite in torch\.float32"),
        (dict(upper=1e36), "no error could be proven"),
        (dict(upper=1e300, dtype=torch.float64), "no error could be proven"),
        (dict(lower=2.0), "lower must not exceed upper; it does in feature 0"),
        (dict(model="paper"), "takes an LRRN"),
        (dict(model=lrrn.LRRNEnergyModel()), "takes an LRRN"),
    ],
)
def test_bad_arguments(change, message):
    with pytest.raises((ValueError, TypeError), match=message):
        lrrn.unroll(**dict(model=network("paper"), lower=0.0, upper=1.0) | change)


def test_energies_of_classes_are_not_outputs():
    X, y = load_digits(return_X_y=True)
    model = lrrn.LRRNClassifier(4, objective="class_energy", epochs=1, random_state=0).fit(X[:50] / 16, y[:50])
    with pytest.raises(ValueError, match="cannot be unrolled"):
        lrrn.unroll(model, 0, 1)


def test_torch_exports_it():
    plain = lrrn.unroll(network("paper"), 0, 1)
    x = torch.rand(5, 12)
    program = torch.export.export(plain, (x[:2],), dynamic_shapes=({0: torch.export.Dim("n")},))
    torch.testing.assert_close(program.module()(x), plain(x))
    assert "lrrn" not in str(program.graph)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")  # torch warns of itself
def test_torch_writes_it_as_onnx(tmp_path):
    pytest.importorskip("onnxscript", reason="torch writes ONNX by onnxscript, of the extra test")
    runtime = pytest.importorskip("onnxruntime", reason="running ONNX needs onnxruntime, of the extra test")
    plain, x = lrrn.unroll(network("paper"), 0, 1), torch.rand(5, 12)
    torch.onnx.export(plain, (x,), tmp_path / "net.onnx", input_names=["x"], dynamo=True, verbose=False)
    session = runtime.InferenceSession(tmp_path / "net.onnx", providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(session.run(None, {"x": x.numpy()})[0], plain(x), rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def digits():
    X, y = load_digits(return_X_y=True)
    X = X / 16
    return lrrn.LRRNClassifier(random_state=0).fit(X[:1347], y[:1347]), X


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_onnxruntime_stays_within_a_hundredth_of_the_margin(digits, dtype, tmp_path):
    pytest.importorskip("onnx", reason="writing ONNX needs onnx, of the extra test")
    runtime = pytest.importorskip("onnxruntime", reason="running ONNX needs onnxruntime, of the extra test")
    model, X = digits
    plain = lrrn.unroll(model, 0, 1, dtype=dtype)
    lrrn.save_onnx(plain, tmp_path / "digits.onnx")
    session = runtime.InferenceSession(tmp_path / "digits.onnx", providers=["CPUExecutionProvider"])
    rng = np.random.default_rng(0)
    inputs = np.concatenate([X, rng.random((4000, 64)), rng.integers(0, 2, (4203, 64))]).astype(np.float32)
    assert len(inputs) == 10_000
    (y,) = session.run(None, {"x": inputs.astype(np.float32 if dtype == torch.float32 else np.float64)})
    bound, library = plain.error_bound.numpy(), model.decision_function(inputs)
    own = off_by(model, inputs.astype(np.float64))
    assert (np.abs(y - library) <= bound + own).all()
    top = np.sort(model.decision_function(X[1347:]), 1)
    assert bound.max() + own <= 0.01 * np.median(top[:, -1] - top[:, -2])
    sure = np.sort(library, 1)[:, -1] - np.sort(library, 1)[:, -2] > 2 * bound.max()
    assert (model.classes_[y.argmax(1)] == model.predict(inputs))[sure].all() and sure.mean() > 0.9
    known = session.get_modelmeta().custom_metadata_map
    assert json.loads(known["lrrn.error_bound"]) == bound.tolist()
    assert json.loads(known["lrrn.lower"]) == [0.0] * 64 and json.loads(known["lrrn.classes"]) == list(range(10))


@pytest.mark.parametrize("kind", ["output an unknown", "deep, betas apart", "linear"])
def test_every_kind_of_network_becomes_the_same_graph(kind, tmp_path):
    pytest.importorskip("onnx", reason="writing ONNX needs onnx, of the extra test")
    runtime = pytest.importorskip("onnxruntime", reason="running ONNX needs onnxruntime, of the extra test")
    plain = lrrn.unroll(made(kind), 0, 1, dtype=torch.float64)
    lrrn.save_onnx(plain, tmp_path / "net.onnx")
    x = inside(0, 1, 7)
    session = runtime.InferenceSession(tmp_path / "net.onnx", providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(session.run(None, {"x": x.numpy()})[0], plain(x), rtol=0, atol=1e-12)


def test_only_unrolled_networks_are_written(tmp_path):
    with pytest.raises(TypeError, match=r"takes the result of lrrn\.unroll"):
        lrrn.save_onnx(network("paper"), tmp_path / "net.onnx")


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "onnx", None)
    with pytest.raises(ImportError, match=r"pip install 'lrrn\[onnx\]'"):
        lrrn.save_onnx(lrrn.unroll(network("paper"), 0, 1), tmp_path / "net.onnx")


@pytest.mark.parametrize("error", [None, 1e-3])
@pytest.mark.parametrize("kind", ["one unit", "no reconstruction", "zero weights", "zero read-out"])
def test_networks_that_one_iteration_solves(kind, error):
    net = simple(kind)
    plain = lrrn.unroll(net, 0, 1, error=error, dtype=torch.float64)
    x = inside(0.0, 1.0, d=net.sizes[0])
    output, slack = exact_output(net, x)
    assert ((plain(x) - output).abs() <= plain.error_bound + slack).all() and float(plain.error_bound.max()) < 1e-6
