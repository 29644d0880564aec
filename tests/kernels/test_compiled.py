"""How kernels are compiled: once, into the kernel that Python calls, and kept on disk."""

from __future__ import annotations

import gc
import importlib.util
import json
import operator
import os
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from numba import types
from numba.core import config, event
from numba.core.errors import TypingError
from numba.core.registry import cpu_target
from numba.core.runtime import _nrt_python, rtsys

from lrrn.kernels.cpu import cache, parts
from lrrn.kernels.cpu import compiled as decorators

COLD_FIT = """
import json, sys
from sklearn.datasets import load_digits
from lrrn import LRRNClassifier
from numba.core import event

with event.install_recorder("numba:compile") as recorder:
    x, y = load_digits(return_X_y=True)
    LRRNClassifier(epochs=1, random_state=0).fit(x / 16, y)
functions = [event.data["dispatcher"].py_func for _, event in recorder.buffer if event.is_start]
print(json.dumps([[f"{one.__module__}.{one.__qualname__}" for one in functions], "torch._dynamo" in sys.modules]))
"""
MOST = 50
"""Functions that the first fit may compile, those of Numba included."""


def cold_fit(folder) -> list:
    """Return the functions that a fit compiles in a process of its own, and whether it imported torch's compiler."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(folder)}
    done = subprocess.run([sys.executable, "-c", COLD_FIT], env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_the_first_fit_compiles_every_kernel_once_and_the_next_process_none(tmp_path):
    functions, compiler = cold_fit(tmp_path)
    ours = Counter(name for name in functions if name.startswith("lrrn."))
    assert ours and not {name: count for name, count in ours.items() if count > 1}
    assert len(functions) <= MOST and not compiler
    assert cold_fit(tmp_path) == [[], False]


KERNELS = """
from typing import Any, NamedTuple

import numpy as np
from lrrn.kernels.cpu.compiled import kernel, summing

class Pair(NamedTuple):
    left: Any
    right: Any

@kernel
def shifted(x, by, twice):
    out = np.empty_like(x)
    for i in range(x.shape[0]):
        out[i] = x[i] + (2 * by if twice else by)
    return out

@summing
def total(x):
    found = 0.0
    for i in range(x.shape[0]):
        found += x[i]
    return found

@kernel
def positive(x):
    if x < 0:
        raise ValueError("negative")
    return x

@kernel
def fivefold(x):
    return x + x + x + x + x

@kernel
def outer(x, by):
    a, b = shifted(x, 0, False), shifted(x, by, True)
    positive(by)
    return total(a) + 10 * total(b)

@kernel
def of_pair(pair):
    return total(pair.left) + total(pair.right)

@kernel
def sums(pair, rounds):
    found = 0.0
    for i in range(rounds):
        new = shifted(pair.left, i, False)
        other = new if i % 2 == 0 else pair.right
        found += total(other) + of_pair(pair)
    return found

@kernel
def entries(x, i, j):
    y = np.zeros_like(x)
    y[i, j] = x[j, i]
    y[-1, j] += x[i, -2]
    return y, x[i][j], x[i, j:][0]

@kernel
def counted(flags, small):
    found = 0
    for i in range(flags.shape[0]):
        if flags[i]:
            found += small[i]
    small[np.uint8(0)] = found
    return found

@kernel
def of_new_pair(x, rounds):
    found = 0.0
    for i in range(rounds):
        pair = Pair(shifted(x, 1, False), shifted(x, 2, False))
        shifted(x, 100, False)  # takes the memory of the pair, if that is free
        found += of_pair(pair)
    return found
"""


@pytest.fixture
def kernels(tmp_path):
    """A module with kernels that are not in any cache."""
    path = tmp_path / "kernels_of_a_test.py"
    path.write_text(KERNELS)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_kernels_inside_kernels_give_what_they_give_alone(kernels):
    x = np.arange(4.0)
    assert kernels.outer(x, 3) == kernels.outer.py_func(x, 3) == 6 + 10 * 30
    assert np.array_equal(kernels.shifted(x, 3, True), x + 6) and kernels.total(x) == 6


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize(("i", "j"), [(0, 2), (-1, 1), (2, -3), (np.uint32(1), np.int8(-2))])
def test_entries_of_arrays_are_those_of_numpy(kernels, order, i, j):
    x = np.asarray(np.arange(9.0).reshape(3, 3), order=order)
    for found, expected in zip(kernels.entries(x, i, j), kernels.entries.py_func(x, int(i), int(j)), strict=True):
        assert np.array_equal(found, expected)
    spread = np.arange(36.0).reshape(6, 6)[::2, ::2]
    assert np.array_equal(kernels.entries(spread, i, j)[0], kernels.entries.py_func(spread, int(i), int(j))[0])


def test_entries_of_any_type_are_read_and_written(kernels):
    flags, small = np.array([True, False, True]), np.array([3, 5, 7], np.int16)
    assert kernels.counted(flags, small) == 10 and small.tolist() == [10, 5, 7]


def test_an_error_inside_passes_through(kernels):
    with pytest.raises(ValueError, match="negative"):
        kernels.outer(np.arange(4.0), -1)
    with pytest.raises(ValueError, match="negative"):
        kernels.positive(-1)


def test_the_types_of_an_operation_are_resolved_once(kernels, monkeypatch):
    monkeypatch.setattr(parts, "_resolved", {})
    calls, resolve = Counter(), parts._resolve

    def count(function, context, args, kws):
        calls[function.typing_key, args] += 1
        return resolve(function, context, args, kws)

    monkeypatch.setattr(parts, "_resolve", count)
    assert kernels.fivefold(2.0) == 10
    assert calls[operator.add, (types.float64, types.float64)] == 1


def test_literals_are_numbers_and_inner_kernels_have_no_machine_code(kernels):
    with event.install_recorder("numba:compile") as recorder:
        kernels.outer(np.arange(4, dtype=np.float32), 3)
    compiled = Counter(event.data["dispatcher"].py_func.__name__ for _, event in recorder.buffer if event.is_start)
    assert [compiled[name] for name in ("outer", "shifted", "total", "positive")] == [1, 1, 1, 1]
    assert kernels.outer.signatures and not kernels.shifted.signatures  # which are those for calls from Python


def test_kernels_release_the_arrays_they_make_and_no_others(kernels):
    pair, few = kernels.Pair(np.arange(4.0), np.full(4, 7.0)), 2
    kernels.sums(pair, few)
    kernels.of_new_pair(pair.left, few)
    references = sys.getrefcount(pair.left)
    _nrt_python.memsys_enable_stats()
    try:
        before = rtsys.get_allocation_stats()
        assert kernels.sums(pair, 4) == 4 * (6 + 28) + 6 + 28 + (6 + 8) + 28
        assert kernels.of_new_pair(pair.left, 3) == 3 * (6 + 4 + 6 + 8)
        after = rtsys.get_allocation_stats()
    finally:
        _nrt_python.memsys_disable_stats()
    made, released = after.mi_alloc - before.mi_alloc, after.mi_free - before.mi_free
    assert made == released > 4 + 9
    kept = sys.getrefcount(pair.left)  # inside an assertion, pytest holds one more
    assert kept == references
    assert np.array_equal(pair.left, np.arange(4.0)) and np.array_equal(pair.right, np.full(4, 7.0))


@pytest.mark.parametrize("enabled", [True, False])
def test_the_garbage_collector_and_the_compiler_are_as_before(kernels, enabled):
    codegen = cpu_target.target_context.codegen()
    before = config.OPT, codegen._library_class, types.Function.get_call_type
    (gc.enable if enabled else gc.disable)()
    try:
        assert kernels.total(np.arange(4.0)) == 6
        assert gc.isenabled() == enabled and gc.get_freeze_count() == 0
        with pytest.raises(TypingError):
            kernels.total("text")
        assert (config.OPT, codegen._library_class, types.Function.get_call_type) == before
    finally:
        gc.enable()


def loaded_from(path):
    """Import a file with kernels as another process would; return whether they were compiled before, where, and the module."""
    cache.version_of.cache_clear()
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    finally:
        cache.version_of.cache_clear()
    assert module.total(np.arange(4.0)) == 6
    return sum(module.total.stats.cache_hits.values()), module.total.stats.cache_path, module


def test_kernels_are_kept_in_the_users_cache_and_found_from_another_environment(tmp_path, monkeypatch):
    """The same package in two environments, and then with another file of kernels, into which its callers are compiled."""
    monkeypatch.setattr(config, "CACHE_DIR", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def loaded(environment, limit):
        folder = tmp_path / environment / "kernels"
        folder.mkdir(parents=True, exist_ok=True)
        monkeypatch.setattr(cache, "KERNELS", folder)
        (folder / "inner.py").write_text(f"LIMIT = {limit}\n")
        (folder / "kernels_of_a_test.py").write_text(KERNELS)
        return loaded_from(folder / "kernels_of_a_test.py")[:2]

    (first, folder), (second, same), (third, other) = loaded("one", 1), loaded("two", 1), loaded("one", 2)
    monkeypatch.setattr(cache.numba, "__version__", "0.0.0")
    fourth, older = loaded("one", 2)
    assert (first, second, third, fourth) == (0, 1, 0, 0) and folder == same and len({folder, other, older}) == 3
    assert str(tmp_path / "cache" / "lrrn" / "kernels") in folder and not list(tmp_path.rglob("__pycache__"))


def test_kernels_of_somebody_else_are_told_apart_by_where_they_are(tmp_path, monkeypatch):
    """The same text may import another constant."""
    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path / "cache"))
    factors = []
    for factor in (2, 3):
        project = tmp_path / f"project{factor}"
        project.mkdir()
        (project / "constant.py").write_text(f"FACTOR = {factor}\n")
        (project / "mine.py").write_text(
            "import runpy\nfrom pathlib import Path\n" + KERNELS + "\n"
            "FACTOR = runpy.run_path(str(Path(__file__).with_name('constant.py')))['FACTOR']\n\n"
            "@kernel\ndef scaled(x):\n    return x * FACTOR\n"
        )
        factors.append(loaded_from(project / "mine.py")[2].scaled(1))
    assert factors == [2, 3]


@pytest.mark.parametrize("home", ["", "relative"])
def test_no_machine_code_is_read_from_the_current_folder(home, monkeypatch):
    """Without a home, or with an empty name for the cache, the user's folder would be a relative one."""
    monkeypatch.setattr(config, "CACHE_DIR", "")
    monkeypatch.setenv("XDG_CACHE_HOME", home)
    assert all(folder.is_absolute() for folder in cache.folders(__file__))


@pytest.mark.parametrize("missing", ["the file of the kernel", "the files of the package"])
def test_kernels_without_sources_are_compiled_and_not_kept(missing, tmp_path, monkeypatch):
    """As in a package of bytecode only, in an archive, or in a cell of a notebook."""
    monkeypatch.setattr(decorators, "_told", {"told before"})
    name = tmp_path / "kernels_of_a_test.py"
    if missing == "the files of the package":
        name.write_text(KERNELS)
        monkeypatch.setattr(cache, "KERNELS", tmp_path)
        (tmp_path / "gone.py").symlink_to(tmp_path / "nowhere")
    cache.version_of.cache_clear()
    space: dict = {"__name__": "kernels_of_a_test"}
    try:
        exec(compile(KERNELS, str(name), "exec"), space)
        assert space["total"](np.arange(4.0)) == 6
    finally:
        cache.version_of.cache_clear()
    assert any("no locator available" in reason for reason in decorators._told)
