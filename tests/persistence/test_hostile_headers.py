"""What is damaged is refused, and nothing in a file is executed."""

from __future__ import annotations

import os
import pickle
import struct

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from sklearn.datasets import load_iris

import lrrn
from lrrn.learning import Contrastive, Data, Settings, Trainer
from lrrn.persistence.serialization import NOT_SAVED, load_reference
from lrrn.runtime import storage
from lrrn.runtime.storage import FileFormatError
from oracles import random_input, random_network
from saved_models import INF, classifier, edited, envelope_of, rewrite, set_item

# --- files that are not what they should be -------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda: random_network((5, 4, 3)), classifier], ids=["network", "classifier"])
def test_a_file_cut_off_anywhere_is_refused(make, path):
    lrrn.save(make(), path)
    content = path.read_bytes()
    start = 8 + struct.unpack("<Q", content[:8])[0]  # where the tensors begin
    edges = {0, 1, 7, 8, 9, start - 1, start, start + 1, len(content) - 1}
    for length in sorted(edges | set(range(0, len(content), max(1, len(content) // 50)))):
        path.write_bytes(content[:length])
        with pytest.raises(FileFormatError, match=r"model\.lrrn is damaged"):
            lrrn.load(path)
    path.write_bytes(content + b"\0")
    with pytest.raises(FileFormatError):
        lrrn.load(path)


def test_bytes_that_are_no_file_of_ours_are_refused(path):
    rng = np.random.default_rng(0)
    samples = [b"", b"\0" * 100, b"\xff" * 100, b"{}", b"PK\x03\x04" + b"\0" * 50, (2).to_bytes(8, "little") + b"{}"]
    samples += [rng.integers(0, 256, int(n), dtype=np.uint8).tobytes() for n in rng.integers(1, 2000, 40)]
    for content in samples:
        path.write_bytes(content)
        with pytest.raises(FileFormatError, match=r"model\.lrrn is"):
            lrrn.load(path)


def test_a_flipped_byte_never_gives_another_kind_of_error(path):
    lrrn.save(random_network((3, 2)), path)
    content = path.read_bytes()
    header = 8 + struct.unpack("<Q", content[:8])[0]
    for at in range(header):
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        try:
            lrrn.load(path)  # a digit of a number may change and still be a number
        except FileFormatError:
            pass


def test_foreign_safetensors_files_are_refused(path):
    for metadata in (None, {"format": "pt"}):
        save_file({"W.0": torch.zeros(3, 2)}, path, metadata=metadata)
        with pytest.raises(FileFormatError, match="not one that lrrn wrote"):
            lrrn.load(path)


def test_a_newer_format_asks_for_an_update(path):
    lrrn.save(random_network((5, 4, 3)), path)
    envelope, tensors = envelope_of(path)
    rewrite(path, {**envelope, "version": storage.VERSION + 1}, tensors)
    with pytest.raises(FileFormatError, match=rf"version {storage.VERSION + 1} .* up to {storage.VERSION}: update lrrn"):
        lrrn.load(path)


def test_a_checkpoint_is_not_a_model(tmp_path):
    path = tmp_path / "run.ckpt"
    x = random_input(6, 5, dtype=torch.float32)
    net = random_network((5, 4, 3), dtype=torch.float32)
    Trainer(net, Contrastive(), Settings(epochs=1, learning_rate=0.01), checkpoint=path).fit(Data(x, x[:, :3]))
    with pytest.raises(FileFormatError, match=r"run\.ckpt holds a checkpoint, not a network or classifier"):
        lrrn.load(path)


ENVELOPES = [
    "",
    "null",
    "[]",
    "{}",
    '"x"',
    '{"version": "1"}',
    '{"version": 1}',
    '{"version": 1, "kind": "network"}',
    '{"version": 1, "kind": ["network"], "header": {}}',
    '{"version": 1, "kind": "network", "header": null}',
    '{"version": 1, "kind": "classifier", "header": {}}',
    '{"version": 1, "kind": "pickle", "header": {}}',
]


@pytest.mark.parametrize("text", ENVELOPES)
def test_envelopes_that_make_no_sense_are_refused(text, path):
    rewrite(path, text, {"W.0": torch.zeros(3, 2)})
    with pytest.raises(FileFormatError, match=r"model\.lrrn"):
        lrrn.load(path)


def test_an_endless_header_is_refused(path):
    for text in ("[" * 100_000, '{"version": ' + "1" * 5000 + "}"):
        rewrite(path, text, {"W.0": torch.zeros(3, 2)})
        with pytest.raises(FileFormatError, match="damaged"):
            lrrn.load(path)


def test_a_header_that_does_not_fit_the_tensors_is_refused(path, tmp_path):
    lrrn.save(random_network((5, 4, 3), dtype=torch.float64), path)
    for change in (
        {"sizes": [5, 4, 4]},
        {"sizes": [5, 3]},
        {"sizes": [5, 4, 3, 3]},
        {"sizes": []},
        {"sizes": [5, -4, 3]},
        {"bias": False},
        {"reconstruction_bias": False},
        {"beta": [1.0]},
        {"gamma": -1.0},
        {"intervals": [["0.0", "inf"]]},
        {"intervals": [["1.0", "0.0"], ["-inf", "inf"]]},
        {"dtype": "float8"},
    ):
        edited(path, lambda header, change=change: header.update(change), tmp_path / "edited")
        with pytest.raises(FileFormatError, match="does not fit a network"):
            lrrn.load(tmp_path / "edited")
    envelope, tensors = envelope_of(path)
    first = {name: t for name, t in tensors.items() if name != "W.0"}
    for wrong in (first, {**tensors, "W.9": torch.zeros(1)}, {**tensors, "W.0": torch.zeros(4, 6)}, {"x": torch.zeros(1)}):
        rewrite(tmp_path / "edited", envelope, wrong)
        with pytest.raises(FileFormatError, match="does not fit a network"):
            lrrn.load(tmp_path / "edited")


def test_a_header_of_another_precision_is_refused(path):
    """Weights must not be rounded in silence."""
    lrrn.save(random_network((5, 4, 3), dtype=torch.float64), path)
    edited(path, lambda header: header.update(dtype="float32"), path)
    with pytest.raises(FileFormatError, match="does not fit a network"):
        lrrn.load(path)


STRANGE = [None, True, -1, 0, 10**400, INF, "x", [], {}, [None], {"array": 1}, {"tuple": 3}, {"items": 3}, {"of": "interval"}]


def refused_or_loaded(path):
    """Load a file that was tampered with: any error other than FileFormatError fails the test."""
    try:
        return lrrn.load(path)
    except FileFormatError:
        return None


def test_no_header_of_a_network_gives_another_kind_of_error(path, tmp_path):
    lrrn.save(random_network((3, 2, 2)), path)
    for key in envelope_of(path)[0]["header"]:
        edited(path, lambda header, key=key: header.pop(key), tmp_path / "edited")
        with pytest.raises(FileFormatError, match="does not fit a network"):
            lrrn.load(tmp_path / "edited")
        for value in STRANGE:
            edited(path, lambda header, key=key, value=value: header.update({key: value}), tmp_path / "edited")
            refused_or_loaded(tmp_path / "edited")


def test_no_header_of_an_estimator_gives_another_kind_of_error(path, tmp_path):
    lrrn.save(classifier(), path)
    header = envelope_of(path)[0]["header"]
    for key in header:
        edited(path, lambda header, key=key: header.pop(key), tmp_path / "edited")
        with pytest.raises(FileFormatError, match="does not fit a classifier"):
            lrrn.load(tmp_path / "edited")
    for key in header:
        for value in STRANGE:
            edited(path, lambda header, key=key, value=value: header.update({key: value}), tmp_path / "edited")
            refused_or_loaded(tmp_path / "edited")
    for group in ("parameters", "attributes"):
        for name, _ in header[group]["items"]:
            for value in STRANGE:
                edited(path, lambda header, g=group, n=name, v=value: set_item(header, g, n, v), tmp_path / "edited")
                refused_or_loaded(tmp_path / "edited")


def test_an_estimator_without_all_its_attributes_is_refused(path, tmp_path):
    lrrn.save(classifier(), path)
    names = {name for name, _ in envelope_of(path)[0]["header"]["attributes"]["items"]}
    assert names == {"chosen_", "classes_", "n_features_in_", "history_", "offset_in_", "scale_in_", "_seed"}
    for name in names - {"chosen_"}:  # files of earlier releases have none

        def leave_out(header, name=name):
            header["attributes"]["items"] = [pair for pair in header["attributes"]["items"] if pair[0] != name]

        edited(path, leave_out, tmp_path / "edited")
        with pytest.raises(FileFormatError, match="does not fit a classifier"):
            lrrn.load(tmp_path / "edited")


def test_what_eps_chose_is_needed_with_eps(path):
    X, y = load_iris(return_X_y=True)
    lrrn.save(lrrn.LRRNClassifier(eps=0.1, hidden_sizes=(4,), epochs=1).fit(X, y), path)

    def leave_out(header):
        header["attributes"]["items"] = [pair for pair in header["attributes"]["items"] if pair[0] != "chosen_"]

    edited(path, leave_out, path)
    with pytest.raises(FileFormatError, match="does not fit a classifier"):
        lrrn.load(path)


def test_an_estimator_with_another_number_of_classes_is_refused(path):
    lrrn.save(classifier(), path)
    two = {"array": [0, 1], "dtype": "<i8"}
    edited(path, lambda header: set_item(header, "attributes", "classes_", two), path)
    with pytest.raises(FileFormatError, match="does not fit a classifier"):
        lrrn.load(path)


@pytest.mark.parametrize("names", [["a", "b", "c"], ["a", "b", "c", 4], [["a"], ["b"], ["c"], ["d"]]])
def test_feature_names_that_are_too_few_or_no_text_are_refused(path, names):
    lrrn.save(classifier(), path)
    told = {"array": names, "dtype": "object"}
    edited(path, lambda header: set_item(header, "attributes", "feature_names_in_", told), path)
    with pytest.raises(FileFormatError, match="feature_names_in_ is"):
        lrrn.load(path)


def test_a_missing_file_is_named(tmp_path):
    for place in (tmp_path / "nothing", tmp_path / "no" / "folder"):
        with pytest.raises(FileNotFoundError, match=f"no file {place}"):
            lrrn.load(place)


def test_a_folder_is_called_a_folder(tmp_path):
    for read in (lrrn.load, load_reference):
        with pytest.raises(IsADirectoryError, match=f"{tmp_path} is a folder, not a model file"):
            read(tmp_path)


# --- nothing is executed --------------------------------------------------------------------------------------------------


class Trap:
    """Creates a file when it is unpickled."""

    def __init__(self, target) -> None:
        self.target = target

    def __reduce__(self):
        return os.mkdir, (str(self.target),)


def test_a_pickle_is_refused_and_not_run(path, tmp_path):
    target = tmp_path / "sprung"
    content = pickle.dumps(Trap(target))
    prefixed = struct.pack("<Q", len(content)) + content  # where a safetensors file has its header
    for data in (content, prefixed):
        path.write_bytes(data)
        with pytest.raises(FileFormatError, match="damaged or not a file that lrrn wrote"):
            lrrn.load(path)
    torch.save({"W.0": torch.zeros(2, 2), "trap": Trap(target)}, path)
    with pytest.raises(FileFormatError, match="damaged or not a file that lrrn wrote"):
        lrrn.load(path)
    assert not target.exists()
    pickle.loads(content)
    assert target.exists()  # the trap works


@pytest.mark.parametrize(
    "name", ["predict", "network_", "__class__", "__dict__", "_optimizer_state", "callbacks", "loss_curve_"]
)
def test_no_other_attribute_can_be_set(name, path):
    lrrn.save(classifier(), path)
    edited(path, lambda header: set_item(header, "attributes", name, 1), path)
    with pytest.raises(FileFormatError, match=rf"does not fit a classifier \('{name}'\)"):
        lrrn.load(path)


@pytest.mark.parametrize("name", ["self", "network_", "predict", "no_such_parameter"])
def test_no_unknown_parameter_can_be_set(name, path):
    lrrn.save(classifier(), path)
    edited(path, lambda header: set_item(header, "parameters", name, 1), path)
    with pytest.raises(FileFormatError, match=rf"does not fit a classifier .*'{name}'"):
        lrrn.load(path)


@pytest.mark.parametrize("name", NOT_SAVED)
def test_a_file_cannot_name_files_to_write_or_resume_from(name, path):
    """The next fit would write to the checkpoint or the log that a stranger's file names."""
    lrrn.save(classifier(), path)
    value = {"callbacks": {"tuple": []}, "resume": True}.get(name, "/somewhere/else")
    edited(path, lambda header: set_item(header, "parameters", name, value), path)
    with pytest.raises(FileFormatError, match=rf"does not fit a classifier .*'{name}'"):
        lrrn.load(path)
