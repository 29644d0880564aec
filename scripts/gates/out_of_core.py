"""Out-of-core test: score a data set twice as large as the memory limit, and check that the results equal those in memory.

The limit is on the address space (``ulimit -v``): the need of a small data set, plus some MiB. First, loading the whole data
set under this limit must fail. Then ``lrrn certify`` processes it, and randomly chosen rows are certified again in this process
without a limit: labels and radii must be bit-identical. Finally, the peak memory of ``certified_radius`` is measured on a
memory map of a million rows.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

import lrrn
from lrrn.studies.bench.scaling import memory

FEATURES, CLASSES = 1024, 4
MIB = 2**20
PEAK = "import sys; from lrrn.cli import app; status = app(sys.argv[1:], standalone_mode=False); "
PEAK += "print(next(line for line in open('/proc/self/status') if line.startswith('VmPeak')), end=''); sys.exit(status)"


def rows(rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
    return rng.random((n, FEATURES), np.float32), rng.integers(0, CLASSES, n)


def write(path: Path, n: int) -> str | None:
    """Write ``n`` random samples without holding them in memory; return the value for --target."""
    rng, step = np.random.default_rng(1), 8192
    parts = (rows(rng, min(step, n - at)) for at in range(0, n, step))
    if path.suffix == ".npy":
        X = np.lib.format.open_memmap(path, "w+", np.float32, (n, FEATURES))
        labels = np.lib.format.open_memmap(path.with_suffix(".y.npy"), "w+", np.int64, (n,))
        for at, (x, y) in zip(range(0, n, step), parts, strict=True):
            X[at : at + len(x)], labels[at : at + len(x)] = x, y
        return str(path.with_suffix(".y.npy"))
    if path.suffix == ".npz":
        labels = []
        with zipfile.ZipFile(path, "w") as archive:
            with archive.open("X.npy", "w", force_zip64=True) as file:
                header = {"descr": "<f4", "fortran_order": False, "shape": (n, FEATURES)}
                np.lib.format.write_array_header_1_0(file, header)
                for x, y in parts:
                    file.write(x.tobytes())
                    labels.append(y)
            with archive.open("y.npy", "w") as file:
                np.lib.format.write_array(file, np.concatenate(labels))
        return None
    import pyarrow
    from pyarrow import parquet

    writer = None
    for x, y in parts:
        table = pyarrow.table({**{f"f{j}": np.ascontiguousarray(x[:, j]) for j in range(FEATURES)}, "y": y})
        writer = writer or parquet.ParquetWriter(path, table.schema, compression="none", use_dictionary=False)
        writer.write_table(table)
    assert writer is not None
    writer.close()
    return None


def under(limit: int | None, command: list[str]) -> subprocess.CompletedProcess[str]:
    def hold() -> None:
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120", "ARROW_DEFAULT_MEMORY_POOL": "system"}
    # glibc reserves 64 MiB of addresses for every thread that allocates while another one does, and twice that for a moment
    environment["MALLOC_ARENA_MAX"] = "1"
    return subprocess.run(command, preexec_fn=hold, env=environment, capture_output=True, text=True, check=False)


def certify(limit: int | None, model: Path, data: Path, target: str | None, out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PEAK, "certify", str(model), str(data), "--samples", str(out), "--method", "spectral"]
    done = under(limit, [*command, "--device", "cpu", *([] if target is None else ["--target", target])])
    if done.returncode:
        raise SystemExit(f"certify failed\n{done.stdout}\n{done.stderr[-3000:]}")
    return done


def again(model: Path, data: Path, target: str | None, out: Path, n: int) -> int:
    """Certify some chunks in memory and compare; return the number of rows compared."""
    classifier = lrrn.load(model)
    size, table = classifier.chunk_rows_, lrrn.datasets.open_table(data, target)
    with np.load(out) as file:
        results = {name: file[name] for name in file.files}
    lengths = {name: len(column) for name, column in results.items()}
    assert set(lengths.values()) == {n}, f"{lengths} for {n} rows"
    chunks = np.random.default_rng(2).choice(n // size, 5, replace=False)
    for chunk in chunks:
        X, y = next(table.pieces(chunk * size, chunk * size + size, size))
        part = slice(chunk * size, chunk * size + size)
        np.testing.assert_array_equal(results["radius"][part], classifier.certified_radius(np.array(X), "spectral"))
        np.testing.assert_array_equal(results["prediction"][part], classifier.predict(np.array(X)))
        np.testing.assert_array_equal(results["right"][part], results["prediction"][part] == y)
    return len(chunks) * size


def run(folder: Path, suffix: str, spare: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    model, small, large = folder / "model.safetensors", folder / f"small{suffix}", folder / f"large{suffix}"
    X, y = rows(rng, 400)
    lrrn.save(lrrn.LRRNClassifier(hidden_sizes=(8,), epochs=1, random_state=0).fit(X, y), model)
    words = certify(None, model, small, write(small, 20_000), folder / "radii.npz").stdout.splitlines()[-1].split()
    limit = 1024 * int(words[1]) + spare * MIB
    n = -(-2 * limit // (4 * FEATURES))
    target = write(large, n)
    if suffix == ".npy":
        load = "import numpy, sys; numpy.load(sys.argv[1])"
        failed = under(limit, [sys.executable, "-c", load, str(large)])
        assert failed.returncode and "MemoryError" in failed.stderr, "the limit does not bite"
    start = time.perf_counter()
    certify(limit, model, large, target, folder / "radii.npz")
    seconds = time.perf_counter() - start
    compared = again(model, large, target, folder / "radii.npz", n)
    report = {
        "file": suffix,
        "limit_bytes": limit,
        "data_bytes": large.stat().st_size,
        "rows": n,
        "features": FEATURES,
        "seconds": seconds,
        "rows_compared_with_memory": compared,
    }
    report["data_over_limit"] = report["data_bytes"] / limit
    large.unlink()
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a .npy file only")
    parser.add_argument(
        "--spare", type=int, default=64, help="MiB beyond what a small data set takes, four times that for Parquet"
    )
    parser.add_argument("--folder", type=Path, help="where to put the data, some GB; the system's folder for such if not given")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    reports = []
    for suffix in (".npy",) if options.quick else (".npy", ".npz", ".parquet"):
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            # Arrow keeps the metadata of every row group, and allocates memory in blocks
            reports.append(run(Path(folder), suffix, options.spare * (4 if suffix == ".parquet" else 1)))
        print(json.dumps(reports[-1]), flush=True)
    report: dict[str, Any] = {"larger than memory": reports}
    if not options.quick:
        report["certified_radius of a memory map"] = memory(1_000_000)
        print(json.dumps(report["certified_radius of a memory map"]), flush=True)
        assert report["certified_radius of a memory map"]["peak_bytes"] < 2**30
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
