"""Written certificates and the checker, which shares no code with the package, against exact truth and tampering."""

from __future__ import annotations

import ast
import copy
import hashlib
import json
import random
import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest
import torch

import check_certificate
import exact_numbers
import fuzz_inputs
import lrrn
from exact_distances import distance, programme
from exact_numbers import Matrix, Refused, Vector, exact, smallest_eigenvalue
from lrrn import datasets
from lrrn.certificates.written import written_certificates
from lrrn.persistence.shipped import shipped_models
from lrrn.reports.proofs import written_proof
from oracles import PlainNetwork, quadratic_of, random_input, random_network
from repository import ROOT
from small_estimators import blobs, classifier
from tampered_proofs import TAMPERED

SIZES = ((2, 3, 2), (3, 2, 3, 3), (4, 5, 3), (3, 2, 2, 2, 3))
NEAR = (0.99, 0.6, 0.99, 0.3)
"""A share of the exact distance that some certificate reaches: deep networks with shared multipliers reach less."""


def network(case):
    return random_network(SIZES[case], beta=(*(1.0, 0.5, 0.7)[: len(SIZES[case]) - 2], 0.0), gamma=0.5, seed=case, scale=1.5)


def checker_of(net, folder, forms):
    path = folder / "net.safetensors"
    lrrn.save(net, path)
    return check_certificate.Checker(check_certificate.build(*check_certificate.read_weights(path.read_bytes())), forms)


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    """A network in float32, its certificates as JSON reads them, and the file of its weights."""
    net = random_network((5, 6, 4, 3), beta=(1.0, 1.0, 0.0), seed=7, scale=1.5, dtype=torch.float32)
    folder = tmp_path_factory.mktemp("written")
    lrrn.save(net, folder / "net.safetensors")
    proof = json.loads(json.dumps(written_certificates(net, random_input(12, 5, seed=7))))
    return net, proof, folder / "net.safetensors"


def judged(example, change=None, k=0):
    """Why the checker refuses a certificate after a change to the proof; None if it accepts."""
    _, proof, path = example
    proof = copy.deepcopy(proof)
    if change is not None:
        change(proof, proof["certificates"][k])
    net = check_certificate.build(*check_certificate.read_weights(path.read_bytes()))
    return check_certificate.judge(check_certificate.Checker(net, proof["forms"]), proof["certificates"][k])[0]


# --- truth -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", range(len(SIZES)))
def test_claims_are_accepted_and_below_the_exact_distance(case, tmp_path):
    net = network(case)
    x = random_input(8, SIZES[case][0], seed=case)
    proof = written_certificates(net, x)
    assert len(proof["certificates"]) >= 6
    checker, plain, shares = checker_of(net, tmp_path, proof["forms"]), PlainNetwork.of(net), []
    for certificate in proof["certificates"]:
        reason, proven, refused = check_certificate.judge(checker, certificate)
        assert reason is None and refused
        truth = distance(plain, np.array(certificate["input"]), certificate["label"])
        assert certificate["radius"] <= proven <= truth * (1 + 1e-9)
        assert certificate["radius"] >= proven * (1 - 1e-6)
        assert check_certificate.judge(checker, {**certificate, "radius": 1.0005 * truth})[0] is not None
        shares.append(proven / truth)
    assert max(shares) > NEAR[case]  # the truth is near, so that a bound that exceeds it would be noticed


@pytest.mark.parametrize("case", range(len(SIZES)))
def test_no_multipliers_prove_more_than_the_truth(case, tmp_path):
    net, generator = network(case), np.random.default_rng(case)
    proof = written_certificates(net, random_input(3, SIZES[case][0], seed=case))
    truths = [distance(PlainNetwork.of(net), np.array(c["input"]), c["label"]) for c in proof["certificates"]]
    positive = 0
    for _ in range(20):
        forms = [(np.array(proof["forms"][0]) * generator.uniform(0.8, 1.02, len(proof["forms"][0]))).tolist()]
        checker = checker_of(net, tmp_path, forms)
        for certificate, truth in zip(proof["certificates"], truths, strict=True):
            other = copy.deepcopy(certificate)
            for given in (other, *other["rivals"].values()):
                for name in {"floor", "sign"} & {*given}:
                    given[name] = (np.array(given[name]) * generator.uniform(0.9, 1.1, len(given[name]))).tolist()
                if "sigma" in given:
                    given["sigma"] *= generator.uniform(0.9, 1.1)
            proven = check_certificate.judge(checker, other)[1]
            assert proven <= truth * (1 + 1e-9)
            positive += proven > 0
    assert positive > 5


def test_the_bound_is_the_minimum_of_the_lagrangian(example):
    net, proof, path = example
    plain = PlainNetwork.of(net)
    h, by_input, q = programme(plain)
    lam = np.array(proof["forms"][0])
    exact_net = check_certificate.build(*check_certificate.read_weights(path.read_bytes()))
    form, compared = check_certificate.Form(exact_net, proof["forms"][0]), 0
    for certificate in proof["certificates"]:
        x, i = np.array(certificate["input"]), certificate["label"]
        for j, given in certificate["rivals"].items():
            own = given if "floor" in given else certificate
            c = np.zeros(len(h))
            c[-4:] = plain.weights[-1][i] - plain.weights[-1][int(j)]
            m = plain.b[-1][i] - plain.b[-1][int(j)]

            def lagrangian(zu, c=c, m=m, own=own, x=x, sigma=given["sigma"]):
                z, u = zu[: len(h)], zu[len(h) :]
                g = h @ z - q - by_input @ (x + u)
                return u @ u + sigma * (m + c @ z) + lam * z @ g - np.array(own["floor"]) @ z - np.array(own["sign"]) @ g

            matrix, linear, constant = quadratic_of(lagrangian, len(h) + len(x))
            least = constant - linear @ np.linalg.solve(matrix, linear) / 2
            sample = check_certificate.Sample(exact_net, x.tolist())
            found = float(sample.bound(form, (i, int(j)), given["sigma"], sample.without_lead(form, own)))
            assert found == pytest.approx(least, rel=1e-8, abs=1e-8)
            compared += 1
    assert compared >= 20


def test_the_programme_of_the_checker_is_that_of_the_energy(example):
    net, _, path = example
    found = check_certificate.build(*check_certificate.read_weights(path.read_bytes()))
    h, by_input, q = programme(PlainNetwork.of(net))
    for matrix, expected in ((found.hessian, h), (found.gram, by_input @ by_input.T), (found.by_input, by_input[:6])):
        assert np.allclose(np.array([[float(Fraction(e, 1 << matrix.shift)) for e in row] for row in matrix.rows]), expected)
    assert np.allclose([float(Fraction(e, 1 << found.constant.shift)) for e in found.constant.entries], q)


# --- arithmetic ------------------------------------------------------------------------------------------------------


def test_eigenvalues_are_bounded_from_below():
    basis = np.linalg.qr(np.random.default_rng(0).normal(size=(6, 6)))[0]
    for least in (0.3, 1e-3, 1e-9):
        a = basis @ np.diag([least, 1, 1, 2, 3, 9]) @ basis.T
        rows = exact((a + a.T).flatten().tolist(), 36, "a")
        bound = smallest_eigenvalue(Matrix([rows.entries[i : i + 6] for i in range(0, 36, 6)], rows.shift + 1))
        assert 0.2 * least < bound < least * (1 + 1e-5)
    for entries in ([[1, 2], [2, 1]], [[0, 0], [0, 0]], [[-1, 0], [0, 5]]):
        with pytest.raises(Refused, match="positive definite"):
            smallest_eigenvalue(Matrix(entries, 0))


@pytest.mark.parametrize("bits", [4, 6, 8])
def test_eigenvalues_are_bounded_from_below_however_coarse_the_factors_are(bits, monkeypatch):
    monkeypatch.setattr(exact_numbers, "BITS", bits)
    generator, accepted = np.random.default_rng(bits), 0
    for _ in range(300):
        basis = np.linalg.qr(generator.normal(size=(4, 4)))[0]
        a = np.round(basis @ np.diag([generator.uniform(-0.3, 1), 1, 2, 3]) @ basis.T * 2**20)
        rows = np.tril(a) + np.tril(a, -1).T
        least = np.linalg.eigvalsh(rows / 2**20)[0]
        try:
            bound = float(smallest_eigenvalue(Matrix(rows.astype(int).tolist(), 20)))
        except Refused:
            continue
        assert 0 < bound <= least + 1e-9
        accepted += 1
    assert accepted > 30


def test_the_bound_holds_however_far_the_point_is_from_the_minimiser(example, monkeypatch):
    _, proof, path = example
    net = check_certificate.build(*check_certificate.read_weights(path.read_bytes()))
    form, certificate = check_certificate.Form(net, proof["forms"][0]), proof["certificates"][0]
    sample, generator = check_certificate.Sample(net, certificate["input"]), np.random.default_rng(0)
    rest = sample.without_lead(form, certificate)
    pair = certificate["label"], int(next(iter(certificate["rivals"])))
    best, near = sample.bound(form, pair, 0.5, rest), form.solve
    for size in (1e-9, 1e-3, 0.1, 10):
        moved = exact((size * generator.normal(size=10)).tolist(), 10, "a")
        monkeypatch.setattr(form, "solve", lambda b, moved=moved: near(b) + moved)
        assert sample.bound(form, pair, 0.5, rest) < best


def test_vectors_are_exact():
    third, tiny = exact([1 / 3, -2.0], 2, "a"), exact([5e-324, 1e300], 2, "b")
    for vector, numbers in ((third, (1 / 3, -2.0)), (tiny, (5e-324, 1e300))):
        assert [Fraction(e, 1 << vector.shift) for e in vector.entries] == [Fraction(x) for x in numbers]
    assert third.dot(tiny) == Fraction(1 / 3) * Fraction(5e-324) - 2 * Fraction(1e300)
    both = third - tiny
    assert [Fraction(e, 1 << both.shift) for e in both.entries] == [Fraction(1 / 3) - Fraction(5e-324), -2 - Fraction(1e300)]
    assert Vector([5, -5], 1).at(0) == [2, -3]


# --- tampering -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("change", "reason"), TAMPERED, ids=lambda value: getattr(value, "__name__", ""))
def test_a_tampered_certificate_is_refused(example, change, reason):
    for k in range(3):
        assert judged(example, k=k) is None
        assert reason in judged(example, change, k)


def test_what_is_not_a_certificate_is_refused_and_what_is_accepted_is_true(example):
    """Random changes to the whole proof: no other error than a refusal, and nothing is accepted that is not true."""
    net, proof, path = example
    plain, chance, counts = PlainNetwork.of(net), random.Random(0), {True: 0, False: 0}
    exact_net = check_certificate.build(*check_certificate.read_weights(path.read_bytes()))
    small = {"forms": proof["forms"], "certificates": proof["certificates"][:1]}
    for _ in range(400):
        changed = fuzz_inputs.tree(small, chance)
        if not (isinstance(changed.get("forms"), list) and isinstance(changed.get("certificates"), list)):
            continue
        for certificate in changed["certificates"]:
            reason, proven, _ = check_certificate.judge(check_certificate.Checker(exact_net, changed["forms"]), certificate)
            counts[reason is None] += 1
            if reason is None:
                assert certificate["radius"] <= proven
                assert proven <= distance(plain, np.array(certificate["input"]), certificate["label"]) * (1 + 1e-9)
    assert min(counts.values()) > 10, counts


# --- the program -----------------------------------------------------------------------------------------------------


def run(proof, weights, folder, *options):
    path = folder / "proof.json"
    path.write_text(json.dumps(proof))
    # without site-packages
    command = [sys.executable, "-S", ROOT / "checker" / "check_certificate.py", path, weights, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout


def test_the_program_accepts_refuses_and_compares_digests(example, tmp_path):
    net, proof, path = example
    proof = {**proof, "weights": {"sha256": hashlib.sha256(path.read_bytes()).hexdigest()}}
    n = len(proof["certificates"])
    status, text = run(proof, path, tmp_path)
    assert status == 0 and f"{n} of {n} certificates accepted; {n} of {n} refused at 1.001" in text
    wrong = copy.deepcopy(proof)
    wrong["certificates"][1]["radius"] *= 1.001
    status, text = run(wrong, path, tmp_path)
    assert status == 1 and "certificate 1 is refused" in text and f"{n - 1} of {n} certificates accepted" in text
    # another weight: refused by its digest, and by the mathematics where the digest is ignored
    other = copy.deepcopy(net)
    with torch.no_grad():
        other.b[-1][proof["certificates"][0]["label"]] -= 5
    lrrn.save(other, tmp_path / "other.safetensors")
    status, text = run(proof, tmp_path / "other.safetensors", tmp_path)
    assert status == 1 and proof["weights"]["sha256"] in text and "accepted" not in text
    status, text = run(proof, tmp_path / "other.safetensors", tmp_path, "--ignore-digest")
    assert status == 1 and "certificate 0 is refused" in text
    for certificates in ([], 5, [{**proof["certificates"][0], "radius": radius} for radius in (10**400, 0, 0.0)]):
        status, text = run({**proof, "certificates": certificates}, path, tmp_path)
        assert status == 1 and ("refused: " in text or text.count("is refused") == len(certificates))
        assert "accepted" not in text or "0 of" in text
    # the last of two keys would win
    (tmp_path / "proof.json").write_text(json.dumps(proof).replace('"radius": ', '"radius": 1000.0, "radius": ', 1))
    command = [sys.executable, "-S", ROOT / "checker" / "check_certificate.py", tmp_path / "proof.json", path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "a key is repeated" in done.stdout


def test_classifiers_that_are_more_than_their_network_are_refused(tmp_path):
    X, y = blobs()
    for options, text in (({"standardize": True}, "standardizes"), ({"objective": "class_energy"}, "least energy"), ({}, None)):
        model = classifier(epochs=1, **options).fit(X, y)
        lrrn.save(model, tmp_path / "model.safetensors")
        content = (tmp_path / "model.safetensors").read_bytes()
        if text is None:
            assert check_certificate.read_weights(content)[0]["sizes"] == list(model.network_.sizes)
            continue
        with pytest.raises(Refused, match=text):
            check_certificate.read_weights(content)
    lrrn.save(lrrn.LRRNRegressor(hidden_sizes=(3,), epochs=1).fit(X, y), tmp_path / "model.safetensors")
    with pytest.raises(Refused, match="not files of kind 'regressor'"):
        check_certificate.read_weights((tmp_path / "model.safetensors").read_bytes())


def test_the_checker_imports_the_standard_library_alone():
    for path in (ROOT / "checker").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
                assert all(name == "exact_numbers" or name.split(".")[0] in sys.stdlib_module_names for name in names)


def test_other_networks_are_refused(tmp_path):
    for options in ({"constraint": "box"}, {"output_constraint": "nonneg"}, {"beta": (1.0, 1.0)}):
        net = random_network((3, 4, 2), **{"beta": (1.0, 0.0), **options})
        with pytest.raises(ValueError, match="certificates are written for networks"):
            written_certificates(net, random_input(2, 3))
        with pytest.raises(Refused, match="are covered"):
            checker_of(net, tmp_path, [])


@pytest.mark.data
def test_certificates_of_the_shipped_network_are_accepted_and_no_more():
    model = shipped_models(ROOT / "models")["mnist-paper-a"]
    try:
        X, _ = datasets.load("mnist", "test")
    except datasets.DataError:
        pytest.skip("the images of MNIST are not at hand")
    clf = lrrn.load(model.weights_path)
    proof = json.loads(json.dumps(written_proof(model.weights_path, clf, X[:5])))
    content = model.weights_path.read_bytes()
    assert proof["weights"]["sha256"] == hashlib.sha256(content).hexdigest() and len(proof["certificates"]) == 5
    checker = check_certificate.Checker(check_certificate.build(*check_certificate.read_weights(content)), proof["forms"])
    radii = lrrn.certify(clf.network_, torch.from_numpy(X[:5]), "shared", guarantee="exact").radius
    for certificate, radius in zip(proof["certificates"], radii, strict=True):
        assert check_certificate.judge(checker, certificate)[0] is None
        assert certificate["radius"] > 0.999 * float(radius)
        assert check_certificate.judge(checker, {**certificate, "radius": 1.001 * certificate["radius"]})[0] is not None


def test_models_whose_certificates_cannot_be_written_say_why(tmp_path):
    X, y = blobs()
    for options, text in (
        ({"standardize": True}, "standardizes its inputs"),
        ({"objective": "class_energy"}, "not a classifier"),
    ):
        with pytest.raises(ValueError, match=text):
            written_proof(tmp_path / "m", classifier(epochs=1, **options).fit(X, y), X)
