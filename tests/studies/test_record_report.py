"""The record's report says what was measured, and keeps what an earlier one had."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

from lrrn import datasets
from lrrn.cli import app
from lrrn.runtime.storage import FileFormatError
from lrrn.studies.record import record as record_module
from lrrn.studies.record import record_report, stages
from lrrn.studies.record.data import sizes_of
from lrrn.studies.record.earlier import earlier
from lrrn.studies.record.record import Options, record
from lrrn.studies.record.rows import Extent, Row, plan
from lrrn.studies.record.scores import BEST, figures
from lrrn.studies.record.stages import ATTACK, STAGES, execute
from records import LITTLE, TINY
from repository import ROOT

# --- the report -----------------------------------------------------------------------------------------------------------


def made_up(accuracy, share, median=1.0, data="mnist"):
    """Figures of a row with one certified accuracy at every size."""
    part = {"images": 10, "accuracy": accuracy, "median": median, "median, 0 where wrong": median}
    part["certified"] = dict.fromkeys(sizes_of(data), share)
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
    results = {row: made_up(0.98, 0.81 + 0.01 * row.seed) for row in rows if row.kind == "wide"}
    results |= {row: made_up(0.95, 0.85) for row in rows if row.kind == "prototypes"}
    results |= {row: made_up(0.97, 0.5, median=1.19) for row in rows if row.kind == "paper_a" and row.seed == 0}
    reasons = {row: "absent" for row in rows if row not in results}
    parts = {section.title.split(",")[0]: section for section in record_report.sections("mnist", rows, results, reasons)}
    main = parts["Clean and certified accuracy"]
    assert main.tables[0][2][0][:5] == [
        "lrrn wide (784-2048-10)",
        "2 of 2",
        "10",
        "98.00 (98.00 to 98.00)",
        "81.50 (81.00 to 82.00)",
    ]
    assert "deel-torchlip MLP, seed 0: absent" in main.text[-1]
    verdicts = {(c.row, c.quantity): c.verdict for c in parts["Targets"].comparisons}
    assert verdicts["lrrn wide (784-2048-10)", "certified at 1.58"] == "met"
    assert verdicts["lrrn paper_a (784-64-64-10)", "median radius"] == "missed"
    assert record_report.brief("mnist", rows, results)[1][0] == ["lrrn wide (784-2048-10)", "2", "98.0", *["81.5"] * 5, "1.000"]
    held = parts["Against the baselines"]
    assert [line[-2:] for line in held.tables[0][2]] == [["-3.50 points", "not ahead"]] * 3
    assert held.text[-1].startswith("Not ahead of nearest prototypes") and "3.50 points at 1.58" in held.text[-1]


def test_the_report_on_cifar_10_has_its_own_sizes_and_targets():
    rows = plan("cifar10", None, 1, 0, Extent())
    results = {row: made_up(0.65, 0.58 if row.kind == "conv" else 0.4, data="cifar10") for row in rows}
    wide = next(row for row in rows if row.kind == "wide")
    results[wide]["radii"]["multiplier"] = made_up(0.65, 0.31, data="cifar10")["radii"][BEST]
    results[wide]["recipe"] = {"hidden_sizes": [{"conv": [512, 8, 4, 0, 1]}, 7], "margin": 0.25}
    parts = {section.title.split(",")[0]: section for section in record_report.sections("cifar10", rows, results, {})}
    main = parts["Clean and certified accuracy"]
    assert [name for name in main.tables[0][1] if "at" in name.split()] == [f"certified at {k}/255" for k in (36, 72, 108)]
    assert any("BRONet" in text and "AOL" in text for text in main.text)
    verdicts = {c.quantity: c.verdict for c in parts["Targets"].comparisons}
    assert verdicts == {"accuracy": "met", **{f"certified at {k}/255": "met" for k in (36, 72, 108)}}
    sizes = [line[0] for line in parts["Against the baselines"].tables[0][2]]  # two baselines
    assert sizes == [f"{k}/255" for k in (36, 72, 108) for _ in range(2)]
    assert (
        "by `multiplier` alone" in parts["By certificate"].text[-1]
        and "has 31.0 % at 108/255" in parts["By certificate"].text[-1]
    )
    assert parts["Recipes and machines"].tables[0][2][0][2] == "hidden_sizes [Conv(512, 8, 4, 0, 1), 7], margin 0.25"
    headings, lines = record_report.brief("cifar10", rows, results)
    assert headings[3:6] == ["36/255", "72/255", "108/255"] and [line[0].split()[1] for line in lines[:2]] == ["wide", "conv"]


def test_the_sentence_about_the_certificate_agrees_with_the_committed_figures():
    content = content_of(COMMITTED)["rows"]
    rows = [Row("wide", "mnist", result["seed"]) for result in content.values() if "-wide-" in result["row"]]
    results = dict(zip(rows, (result for result in content.values() if "-wide-" in result["row"]), strict=True))
    (text,) = record_report._share_of_the_certificate("mnist", {"wide": rows}, results)
    measured = [result for result in results.values() if "multiplier" in result["radii"]]
    alone, best = (np.mean([one["radii"][name]["certified"]["1.58"] for one in measured]) for name in ("multiplier", BEST))
    assert len(measured) < len(results)  # so that seeds without the bound must not count
    assert f"`wide` has {100 * alone:.1f} % at 1.58, and {100 * best:.1f} % by the best bound (seed" in text


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


# --- rows of an earlier report --------------------------------------------------------------------------------------------


COMMITTED = ROOT / "docs" / "record" / "mnist"


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
    return record("mnist", work, output, Options(rows=rows, stages=stages, n_images=3, **common, **options))


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
    record("mnist", tmp_path / "work", tmp_path / "out", Options(seeds=1, report_only=True))
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
            record("mnist", tmp_path / "w", tmp_path / "o", Options(root=root, download=False, **options))
    with pytest.raises(datasets.DataError, match="there is neither train-images"):
        record("kmnist", tmp_path / "w", tmp_path / "o", Options(root=root, download=False))
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
    assert STAGES[0] == "train"
