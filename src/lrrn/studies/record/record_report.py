"""Tables of the record: results of every row, comparison with baselines, certificates and training."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from lrrn.certificates.branching import NEAR
from lrrn.reports.page import line_chart
from lrrn.studies.common.sections import Comparison, Figure, Section
from lrrn.studies.record.data import compared_at, sizes_of
from lrrn.studies.record.orientation import PUBLISHED, TARGETS
from lrrn.studies.record.rows import Row
from lrrn.studies.record.scores import BEST, BRANCHES, disagreements

Results = Mapping[Row, dict[str, Any]]
"""Figures by row, for rows that have any."""


def sections(data: str, rows: Sequence[Row], results: Results, reasons: Mapping[Row, str]) -> list[Section]:
    """Return the sections of the report."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.kind, []).append(row)
    targets = [_targets(data, groups, results, reasons)] if data in TARGETS else []
    parts = [_main(data, groups, results, reasons), *targets, _held(data, groups, results), _attacks(data, groups, results)]
    return [*parts, _methods(data, groups, results), _recipes(groups, results)]


def brief(data: str, rows: Sequence[Row], results: Results) -> tuple[list[str], list[list[str]]]:
    """Return headings and rows of a table that fits a terminal: means over seeds of clean and certified accuracy."""
    lines: dict[str, list[str]] = {}
    sizes = sizes_of(data)
    for row in rows:
        done = [results[other] for other in rows if other.kind == row.kind and other in results]
        if done:
            cells = [row.title, str(len(done)), _cell([fmean(one["accuracy"] for one in done)], "{:.1f}")]
            cells += [_cell([fmean(certified(one, size) for one in done)], "{:.1f}") for size in sizes]
            lines[row.kind] = [*cells, f"{fmean(one['radii'][BEST]['median'] for one in done):.3f}"]
    return ["row", "seeds", "clean", *sizes, "median"], list(lines.values())


def certified(result: dict[str, Any], size: str) -> float:
    """Return the certified accuracy of a row with the best of its certificates."""
    return float(result["radii"][BEST]["certified"][size])


def _each(group: Sequence[Row], results: Results, read: Callable[[dict[str, Any]], float | None]) -> list[float]:
    values = [read(results[row]) for row in group if row in results]
    return [value for value in values if value is not None]


def _cell(values: Sequence[float], form: str = "{:.2f}", factor: float = 100.0) -> str:
    """Format a mean and, for several seeds, the smallest and the largest value."""
    if not values:
        return "-"
    mean = form.format(factor * fmean(values))
    if len(values) == 1:
        return mean
    return f"{mean} ({form.format(factor * min(values))} to {form.format(factor * max(values))})"


def _main(data: str, groups: Mapping[str, list[Row]], results: Results, reasons: Mapping[Row, str]) -> Section:
    section = Section("Clean and certified accuracy, in per cent")
    section.text = [
        "Certified: right, and proven to stay so under every perturbation of that Euclidean norm, in units where a pixel is "
        "from 0 to 1; by the best bound that was proven for each image. Of several seeds: the mean, in brackets the smallest "
        "and the largest. The median radius is that of the predicted label, right or wrong, as in the paper."
    ]
    section.text += PUBLISHED.get(data, ())
    lines, sizes = [], sizes_of(data)
    for group in groups.values():
        done = [row for row in group if row in results]
        if not done:
            continue
        cells = [group[0].title, f"{len(done)} of {len(group)}", f"{results[done[0]]['images']:,}"]
        cells.append(_cell(_each(group, results, lambda r: r["accuracy"])))
        cells += [_cell(_each(group, results, lambda r, size=size: certified(r, size))) for size in sizes]  # type: ignore[misc]
        cells.append(_cell(_each(group, results, lambda r: r["radii"][BEST]["median"]), "{:.3f}", 1.0))
        cells.append(f"{results[done[0]]['parameters']:,}")
        cells.append(_cell(_each(group, results, lambda r: r["seconds of training"]), "{:.0f}", 1.0))
        cells.append(_cell(_each(group, results, lambda r: sum(r["seconds of certifying"].values())), "{:.0f}", 1.0))
        lines.append(cells)
    columns = ["row", "seeds", "images", "clean", *(f"certified at {size}" for size in sizes), "median radius"]
    section.tables.append(("All rows", [*columns, "numbers kept", "seconds to train", "seconds to certify"], lines))
    told = {f"{row.title}, seed {row.seed}: {reasons[row]}" for group in groups.values() for row in group if row in reasons}
    section.text += [f"Not run or not finished: {'; '.join(sorted(told))}."] if told else []
    section.figures = _curves(groups, results)
    return section


def _curves(groups: Mapping[str, list[Row]], results: Results) -> list[Figure]:
    first = [next((row for row in group if row in results), None) for group in groups.values()]
    pictures = []
    for stem, ours in (("ours", True), ("baselines", False)):
        some = [row for row in first if row is not None and row.is_ours == ours and "curve" in results[row]]
        series = {row.title: (results[row]["curve"]["eps"], results[row]["curve"]["certified"]) for row in some}
        if series:
            caption = f"Certified accuracy against the size of the perturbation: {stem}, first seed"
            chart = line_chart("norm of the perturbation", "certified accuracy", series)
            pictures.append(Figure(f"certified-{stem}.svg", caption, chart))
    return pictures


def _targets(data: str, groups: Mapping[str, list[Row]], results: Results, reasons: Mapping[Row, str]) -> Section:
    section = Section("Targets", columns=["row", "quantity", "at least", "ours", "over seeds", "difference", "verdict"])
    for kind, quantity, least in TARGETS[data]:
        group = groups.get(kind, [])
        if not group:
            continue
        values = tuple(_each(group, results, lambda r, quantity=quantity: _quantity(r, quantity)))  # type: ignore[misc]
        note = next((reasons[row] for row in group if row in reasons), "")
        is_share = quantity != "median radius"
        section.comparisons.append(
            Comparison(group[0].title, quantity, least, values, below=0.0, form="{:.4f}", note=note, is_share=is_share)
        )
    return section


def _quantity(result: dict[str, Any], name: str) -> float:
    if name == "accuracy":
        return float(result["accuracy"])
    if name == "median radius":
        return float(result["radii"][BEST]["median"])
    return certified(result, name.removeprefix("certified at "))


def _held(data: str, groups: Mapping[str, list[Row]], results: Results) -> Section:
    """Compare the best of our networks at each size with every baseline."""
    section = Section("Against the baselines")
    section.text = [
        "At each size the best of our rows, by the mean over seeds, and every baseline trained by the same command on the same "
        "images. Baselines are certified by what their theory allows, with proven norms of their exported weights: pairs of "
        "outputs of sorting networks, exact distances for linear scores, bisecting hyperplanes for prototypes."
    ]
    lines, behind = [], dict[str, list[str]]()
    for size in compared_at(data):
        means = {
            kind: fmean(values)
            for kind, group in groups.items()
            if (values := _each(group, results, lambda r, size=size: certified(r, size)))  # type: ignore[misc]
        }
        ours = {kind: mean for kind, mean in means.items() if groups[kind][0].is_ours}
        if not ours:
            continue
        best = max(ours, key=lambda kind: ours[kind])
        for kind in (kind for kind in means if kind not in ours):
            gap = ours[best] - means[kind]
            titles = [groups[one][0].title for one in (best, kind)]
            cells = [size, titles[0], f"{100 * ours[best]:.2f}", titles[1], f"{100 * means[kind]:.2f}"]
            lines.append([*cells, f"{100 * gap:+.2f} points", "ahead" if gap > 0 else "not ahead"])
            if not gap > 0:
                behind.setdefault(kind, []).append(f"{-100 * gap:.2f} points at {size}")
    section.tables.append(
        ("Differences in certified accuracy", ["size", "ours", "certified", "baseline", "certified", "difference", ""], lines)
    )
    for kind, gaps in behind.items():
        clean = fmean(_each(groups[kind], results, lambda r: r["accuracy"]))
        section.text.append(
            f"Not ahead of {groups[kind][0].title}, by {', '.join(gaps)}; its clean accuracy is {100 * clean:.2f} %."
        )
    return section


def _attacks(data: str, groups: Mapping[str, list[Row]], results: Results) -> Section:
    section = Section("Attacks on the first images, in per cent")
    section.text = [
        "What the same images come to under attack: the smallest perturbations our walks find, projected gradient ascent at "
        "every size, and AutoAttack where it was run. Certified is the best bound on the very images that were attacked. An "
        "attack inside a radius, or attacked accuracy below certified accuracy, would refute a certificate."
    ]
    lines, wrong, sizes = [], [], sizes_of(data)
    for group in groups.values():
        for row in group:
            attacks = results.get(row, {}).get("attacks")
            if attacks is None:
                continue
            best, theirs = attacks["certified"][BEST], attacks["AutoAttack"]
            cells = [f"{row.title}, seed {row.seed}", str(attacks["images"]), str(theirs["images"] if theirs else 0)]
            cells.append(f"{100 * attacks['accuracy']:.1f}")
            pairs = [(best["certified"][size], attacks["attacked"][size]) for size in sizes]
            cells += [f"{100 * low:.1f} / {100 * high:.1f}" for low, high in pairs]
            distance = attacks["median distance"]
            cells.append(f"{best['median, 0 where wrong']:.3f} / {math.inf if distance is None else distance:.3f}")
            found = disagreements(results[row])
            wrong += [f"{row.title}, seed {row.seed}: {what}" for what in found]
            lines.append([*cells, str(max(attacks["attacks inside a radius"].values())), "yes" if not found else "no"])
    columns = ["row", "images", "of these by AutoAttack", "clean", *(f"certified / attacked at {size}" for size in sizes)]
    columns += ["median radius / distance, 0 where wrong", "attacks inside a radius", "attacked >= certified everywhere"]
    section.tables.append(("All rows that were attacked", columns, lines))
    section.tables += _autoattacks(data, groups, results)
    if lines:
        verdict = "in every row, by every method and at every size" if not wrong else f"except: {'; '.join(wrong)}"
        section.text.append(f"Attacked accuracy is at least certified accuracy, and no attack lies inside a radius, {verdict}.")
    return section


def _autoattacks(data: str, groups: Mapping[str, list[Row]], results: Results) -> list[tuple[str, list[str], list[list[str]]]]:
    """Return the table of AutoAttack alone, on images that stay in [0, 1] and without that limit, if it was run."""
    lines, sizes = [], compared_at(data)
    for group in groups.values():
        for row in group:
            attacks = results.get(row, {}).get("attacks") or {}
            both = [attacks.get(name) for name in ("AutoAttack", "AutoAttack, not clipped")]
            best = attacks.get("certified on AutoAttack's")
            if best is None or None in both:
                continue
            cells = [f"{row.title}, seed {row.seed}", str(best["images"]), f"{100 * best['accuracy']:.1f}"]
            for size in sizes:
                shares = (best["certified"][size], *(one["attacked"][size] for one in both if one))
                cells.append(" / ".join(f"{100 * share:.1f}" for share in shares))
            lines.append(cells)
    columns = ["row", "images", "clean", *(f"certified / clipped / not clipped at {size}" for size in sizes)]
    return [("AutoAttack alone, on images that stay in [0, 1] and without that limit", columns, lines)] if lines else []


def _methods(data: str, groups: Mapping[str, list[Row]], results: Results) -> Section:
    section = Section("By certificate, in per cent")
    section.text = [
        '"shared" and "local" look at each image: the first at all of them at once, the second, which takes long, at the first '
        "ones one by one."
    ]
    limits = sorted({str(result[BRANCHES]) for result in results.values() if BRANCHES in result})
    if limits:
        section.text.append(
            f'"branched" is "shared" with branch and bound towards {", ".join(compared_at(data))}, on images that are right '
            f"and at most {100 * (NEAR - 1):.0f} % short of one of these sizes; with at most {'; '.join(limits)} branches of "
            "an image and a pair of classes. Other images keep their radius."
        )
    section.text += _share_of_the_certificate(data, groups, results)
    lines, sizes = [], sizes_of(data)
    for group in groups.values():
        done = [row for row in group if row in results]
        methods = dict.fromkeys(method for row in done for method in results[row]["radii"])
        for method in methods:
            some = [row for row in done if method in results[row]["radii"]]
            each = [results[row]["radii"][method] for row in some]
            counts = sorted({one["images"] for one in each})
            cells = [group[0].title, method, " to ".join(f"{n:,}" for n in {counts[0]: 0, counts[-1]: 0})]
            cells.append(_cell([one["accuracy"] for one in each]))
            cells += [_cell([one["certified"][size] for one in each]) for size in sizes]
            cells.append(_cell([one["median"] for one in each], "{:.3f}", 1.0))
            cells.append(_cell([one["median, 0 where wrong"] for one in each], "{:.3f}", 1.0))
            seconds = [results[row]["seconds of certifying"].get(method) for row in some]
            cells.append(_cell([s for s in seconds if s is not None], "{:.1f}", 1.0))
            lines.append(cells)
    columns = ["row", "certificate", "images", "clean", *(f"certified at {size}" for size in sizes)]
    section.tables.append(("All certificates", [*columns, "median radius", "the same, 0 where wrong", "seconds"], lines))
    return section


def _share_of_the_certificate(data: str, groups: Mapping[str, list[Row]], results: Results) -> list[str]:
    """Say how much of the certified accuracy of a wide network is due to the per-sample certificate."""
    size, group = list(sizes_of(data))[-1], groups.get("wide", [])
    both = [row for row in group if row in results and "multiplier" in results[row]["radii"]]
    if not both:
        return []
    alone = _each(both, results, lambda r: r["radii"]["multiplier"]["certified"][size])
    best = _each(both, results, lambda r: certified(r, size))
    seeds = "seed" + "s" * (len(both) > 1) + " " + ", ".join(str(row.seed) for row in both)
    return [
        "The gain over 1-Lipschitz libraries is mostly the certificate: by `multiplier` alone, a constant for each pair of "
        f"classes as theirs, `wide` has {100 * fmean(alone):.1f} % at {size}, and {100 * fmean(best):.1f} % by the best bound "
        f"({seeds})."
    ]


def _shown(value: Any) -> str:
    """Format a hyper-parameter; convolutions by their channels, kernel, stride, padding and pooling."""
    if isinstance(value, dict) and list(value) == ["conv"]:
        return f"Conv({', '.join(map(str, value['conv']))})"
    if isinstance(value, list):
        return f"[{', '.join(map(_shown, value))}]"
    return str(value)


def _recipes(groups: Mapping[str, list[Row]], results: Results) -> Section:
    section = Section("Recipes and machines")
    lines = []
    for group in groups.values():
        done = [results[row] for row in group if row in results]
        if not done:
            continue
        options = ", ".join(f"{name} {_shown(value)}" for name, value in done[0]["recipe"].items())
        versions = dict.fromkeys(", ".join(f"{name} {value}" for name, value in one["versions"].items()) for one in done)
        trained = dict.fromkeys(one["device of training"] for one in done)
        certified_on = dict.fromkeys(device for one in done for device in one["device of certifying"])
        places = [", ".join(trained), ", ".join(certified_on)]
        lines.append([group[0].title, f"{done[0]['samples']:,}", options or "-", *places, "; ".join(versions)])
    columns = ["row", "training images", "recipe", "trained on", "certified on", "versions"]
    section.tables.append(("One recipe a row", columns, lines))
    return section
