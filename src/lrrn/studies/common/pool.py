"""Pool that executes many runs, of the paper's tables or of the record: one subprocess per run, progress bars, a clean stop.

The process executors of concurrent.futures and joblib are not used: if one child is killed, all pending runs fail. Neither of
them forwards an interrupt to its children, or ends them when this process is killed.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from pathlib import Path
from threading import Event, Semaphore, Thread
from typing import Any, Protocol, TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from lrrn.learning.many import MOST_ON_DEVICE
from lrrn.runtime.devices import choose_device, open_connections
from lrrn.runtime.storage import write_bytes
from lrrn.studies.common.runs import Run, execute, finished, train

POLL = 0.2
"""Seconds between checks of the processes."""


class Task(Protocol):
    """Interface of a run in a pool."""

    @property
    def name(self) -> str:
        """Name of its folder."""

    @property
    def epochs(self) -> int:
        """Number of lines in the log of a finished run."""


T = TypeVar("T", bound=Task)


def carry_out(runs: Sequence[Run], work: Path, jobs: int, root: Path | None, device: str, download: bool) -> dict[Run, str]:
    """Execute the paper's runs that have no result yet, the longest first, so that no long run is left at the end.

    Returns
    -------
    dict of Run to str
        Failed runs and the reasons.
    """
    ordered = sorted(dict.fromkeys(runs), key=lambda run: -_cost(run))
    arguments = (root, device, download)

    def is_finished(run: Run, folder: Path) -> bool:
        return finished(run, folder) is not None

    if device != "cpu":
        open_connections()
    if choose_device(device).type != "cuda":
        return in_processes(ordered, work, jobs, execute, arguments, is_finished)
    # small networks leave most of a device idle: several train concurrently, and the CPU cores measure those already trained
    stages = [
        (MOST_ON_DEVICE, lambda run, folder, stop: train(run, folder, *arguments, stop)),
        (jobs, lambda run, folder, stop: _in_child(execute, run, folder, arguments, stop)),
    ]
    with _one_thread_each():
        return in_threads(ordered, work, stages, is_finished)


def in_threads(
    runs: Sequence[T],
    work: Path,
    stages: Sequence[tuple[int, Callable[[T, Path, Event], Any]]],
    is_finished: Callable[[T, Path], bool],
) -> dict[T, str]:
    """Execute unfinished runs in threads of this process, each run one stage after the other.

    On Ctrl-C every run is signalled to stop at the end of its epoch, and the next call resumes there.

    Parameters
    ----------
    runs, work, is_finished
        As in :func:`in_processes`.
    stages : sequence of (int, callable)
        For each stage, the largest number of concurrent runs, and a function. The function is called with the run, its folder
        and an Event that is set when the run is to stop.

    Returns
    -------
    dict of Task to str
        Failed runs and the reasons.
    """
    waiting = [run for run in runs if not is_finished(run, work / run.name)]
    failed: dict[T, str] = {}
    stop = Event()
    gates = [Semaphore(most) for most, _ in stages]
    # one stage: as many threads as concurrent runs, which keeps the order; several stages: one thread per run, since runs that
    # wait for the second stage must not block the first
    threads = stages[0][0] if len(stages) == 1 else max(1, len(waiting))
    with _Display(len(waiting)) as display, ThreadPoolExecutor(threads, "lrrn-run") as pool:

        def carry_out_one(run: T) -> None:
            for k, (gate, (_, execute)) in enumerate(zip(gates, stages, strict=True)):
                with gate:
                    if stop.is_set():
                        return
                    if k == 0:
                        display.begin(run, work / run.name)
                    execute(run, work / run.name, stop)

        under_way = {pool.submit(carry_out_one, run): run for run in waiting}
        try:
            while under_way:
                done, _ = wait(under_way, POLL, FIRST_COMPLETED)
                display.look()
                for future in done:
                    run, error = under_way.pop(future), future.exception()
                    if error is not None:
                        failed[run] = str(error) or type(error).__name__
                    display.end(run, failed.get(run), is_finished(run, work / run.name))
        except KeyboardInterrupt:
            stop.set()
            wait(under_way)
            raise
    return failed


def in_processes(
    runs: Sequence[T],
    work: Path,
    jobs: int,
    execute: Callable[..., Any],
    arguments: tuple[Any, ...],
    is_finished: Callable[[T, Path], bool],
    one_thread: bool = True,
) -> dict[T, str]:
    """Execute unfinished runs, ``jobs`` at a time, each in a separate process.

    On Ctrl-C every process is interrupted. It leaves a checkpoint, and the next call resumes there. The same happens when this
    process is killed.

    Parameters
    ----------
    runs : sequence of Task
    work : Path
        Folder that contains the folder of each run.
    jobs : int
    execute : callable
        Called in the subprocess with the run, its folder and ``arguments``; must be importable there.
    arguments : tuple
    is_finished : callable
        Called with a run and its folder.
    one_thread : bool, default=True
        Whether each process is limited to one thread.

    Returns
    -------
    dict of Task to str
        Runs that failed, and why.
    """
    stages = [(jobs, lambda run, folder, stop: _in_child(execute, run, folder, arguments, stop))]
    with _one_thread_each() if one_thread else nullcontext():
        return in_threads(runs, work, stages, is_finished)


def _in_child(execute: Callable[..., Any], run: Task, folder: Path, arguments: tuple[Any, ...], stop: Event) -> None:
    """Execute a run in a subprocess, from a thread: raise its error, and forward the stop signal."""
    child = multiprocessing.get_context("spawn").Process(target=_child, args=(execute, run, folder, *arguments), name=run.name)
    child.start()
    while child.exitcode is None:
        child.join(POLL)
        if stop.is_set() and child.pid is not None and child.is_alive():
            os.kill(child.pid, signal.SIGINT)
            child.join()
            raise KeyboardInterrupt
    if child.exitcode:
        raise RuntimeError(_reason(folder, child.exitcode))


def _cost(run: Run) -> float:
    """Estimate the duration of a run, in seconds at full scale; only the order matters."""
    images = {"kmnist_7011": 0.12}.get(run.data, 1.0)
    an_epoch = {"energy": 1.0, "margin": 8.0}.get(run.kind, 2.5)
    return images * an_epoch * run.epochs + 0.5 * run.closely


def _child(execute: Callable[..., Any], run: Task, folder: Path, *arguments: Any) -> None:
    # a shell may start a background program with SIGINT ignored, which its children inherit
    signal.signal(signal.SIGINT, signal.default_int_handler)
    Thread(target=_stop_with_parent, daemon=True).start()
    try:
        execute(run, folder, *arguments)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except Exception as error:
        folder.mkdir(parents=True, exist_ok=True)
        write_bytes(folder / "error.txt", f"{error}\n\n{traceback.format_exc()}".encode())
        raise SystemExit(1) from error


def _stop_with_parent() -> None:
    """Interrupt this process when its parent is gone, so that a restarted parent finds no run still in progress."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGINT)


def _reason(folder: Path, code: int | None) -> str:
    path = folder / "error.txt"
    if code == 1 and path.is_file():
        return path.read_text().splitlines()[0]
    return f"its process ended with {code}"


@contextmanager
def _one_thread_each() -> Any:
    """Limit child processes to one thread each; parallel runs use the cores better than parallel threads."""
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class _Display:
    """Shows the runs in progress: a progress bar each on a terminal, otherwise a line when a run ends."""

    def __init__(self, total: int) -> None:
        self._console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[note]}"), TimeElapsedColumn())
        self._bars = Progress(*columns, console=self._console, disable=not self._console.is_terminal)
        self._all = self._bars.add_task("runs", total=total, note=f"of {total}")
        self._tasks: dict[Task, Any] = {}
        self._folders: dict[Task, Path] = {}
        self._began: dict[Task, float] = {}
        self._done, self._total = 0, total

    def begin(self, run: Task, folder: Path) -> None:
        self._tasks[run] = self._bars.add_task(run.name, total=run.epochs, note="beginning")
        self._folders[run], self._began[run] = folder, time.monotonic()

    def look(self) -> None:
        if self._bars.disable:
            return
        for run, folder in list(self._folders.items()):  # other threads may add runs
            path = folder / "log.jsonl"
            epochs = path.read_bytes().count(b"\n") if path.is_file() else 0
            note = f"epoch {epochs} of {run.epochs}" if epochs < run.epochs else "measuring"
            self._bars.update(self._tasks[run], completed=epochs, note=note)

    def end(self, run: Task, failure: str | None, is_finished: bool) -> None:
        self._done += 1
        del self._folders[run]
        self._bars.remove_task(self._tasks.pop(run))
        self._bars.advance(self._all)
        seconds = time.monotonic() - self._began[run]
        outcome = f"done in {seconds:.0f} s" if is_finished else f"stopped after {seconds:.0f} s"
        outcome = outcome if failure is None else f"failed: {failure}"
        self._console.print(f"{self._done}/{self._total} {run.name}: {outcome}", highlight=False)

    def __enter__(self) -> _Display:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()
