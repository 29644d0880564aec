"""Changes to a written certificate, each of which a checker must refuse, with words of the reason."""

from __future__ import annotations

import numpy as np


def nearest(certificate):
    """A rival that has multipliers of its own."""
    return next(given for given in certificate["rivals"].values() if "floor" in given)


def raised(proof, certificate):
    certificate["radius"] *= 1.001


def negative_sigma(proof, certificate):
    nearest(certificate)["sigma"] *= -1


def negative_floor(proof, certificate):
    given = nearest(certificate)
    given["floor"][int(np.argmin(given["floor"]))] = -1e-9


def negative_sign(proof, certificate):
    given = nearest(certificate)
    given["sign"][int(np.argmin(given["sign"]))] = -1e-9


def negative_product(proof, certificate):
    proof["forms"][0][0] *= -1


def large_products(proof, certificate):
    proof["forms"][0] = [2 * value for value in proof["forms"][0]]


def other_floor(proof, certificate):
    given = nearest(certificate)
    given["floor"] = [1.1 * value + 0.01 for value in given["floor"]]


def other_sign(proof, certificate):
    given = nearest(certificate)
    given["sign"] = [0.9 * value for value in given["sign"]]


def moved_input(proof, certificate):
    certificate["input"][0] += 0.5


def other_label(proof, certificate):
    label = certificate["label"]
    certificate["label"] = (label + 1) % 3
    certificate["rivals"][str(label)] = certificate["rivals"].pop(str((label + 1) % 3))


def missing_rival(proof, certificate):
    certificate["rivals"].popitem()


def missing_sign(proof, certificate):
    del nearest(certificate)["sign"]


def no_number(proof, certificate):
    certificate["radius"] = float("nan")


def below_zero(proof, certificate):
    certificate["radius"] = -1e-3


def no_label(proof, certificate):
    certificate["label"] = bool(certificate["label"])


def other_form(proof, certificate):
    nearest(certificate)["form"] = 1


TAMPERED = (
    (raised, "claimed radius"),
    (negative_sigma, "sigma must not be negative"),
    (negative_floor, "floor must not be negative"),
    (negative_sign, "sign must not be negative"),
    (negative_product, "positive definite"),
    (large_products, "positive definite"),
    (other_floor, "claimed radius"),
    (other_sign, "claimed radius"),
    (moved_input, "claimed radius"),
    (other_label, "claimed radius"),
    (missing_rival, "every other output"),
    (missing_sign, "not complete"),
    (no_number, "not a finite number"),
    (below_zero, "claimed radius"),
    (no_label, "there is no output"),
    (other_form, "no multipliers of products"),
)
