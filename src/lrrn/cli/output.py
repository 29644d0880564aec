"""What commands write: tables on the terminal, JSON files, pages, and errors as messages."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from rich.console import JustifyMethod

    from lrrn.reports.audit import Audit
    from lrrn.reports.evaluation import Evaluation
    from lrrn.reports.intervals import Intervals
    from lrrn.studies.common.sections import Section

console = Console(markup=False, emoji=False)
STDOUT = Path("-")
"""The name of a file that means standard output."""
AS_OPTIONS = {
    "standardize=True": "--standardize common",
    "standardize='features'": "--standardize features",
    "max_seconds=": "--max-seconds ",
    "Raise max_seconds, or lower epochs": "Raise --max-seconds, or lower --epochs",
}
"""What warnings of the library advise, and the options that do it."""


def make_way(json_file: Path | None) -> Path | None:
    """Leave standard output to the JSON if it goes there; tables and messages then go to standard error."""
    console.stderr = json_file == STDOUT
    return json_file


@contextmanager
def errors_explained(checkpoint: Path | None = None, advice: str | None = None) -> Iterator[None]:
    """Turn errors that users can solve into a message, and say after Ctrl-C how to continue.

    That is with ``checkpoint`` if there is one; or what the work said when it was stopped; or else ``advice``.
    """
    try:
        yield
    except typer.Exit:  # which is a RuntimeError
        raise
    except KeyboardInterrupt as error:
        from lrrn.runtime.interrupts import Terminated

        if checkpoint is not None and checkpoint.exists():
            typer.echo(f"stopped; the same command with --resume continues from {checkpoint}", err=True)
        elif error.args or advice is not None:
            typer.echo(f"stopped; {error if error.args else advice}", err=True)
        raise typer.Exit(143 if isinstance(error, Terminated) else 130) from None
    except (ValueError, ArithmeticError, OSError) as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from error
    except (MemoryError, RuntimeError) as error:
        from lrrn.network.solution import ConvergenceError  # slow to import, and rarely needed

        if isinstance(error, ConvergenceError):
            typer.echo(f"Error: {error}", err=True)
            raise typer.Exit(1) from error
        if isinstance(error, RuntimeError) and "memory" not in str(error):  # torch reports a lack of memory this way
            raise
        typer.echo(f"Error: not enough memory ({error}); take a smaller --hidden-sizes or --batch-size, or less data", err=True)
        raise typer.Exit(1) from error


def warning_line(message: Warning | str, *_: Any, **__: Any) -> str:
    """Return a warning as a line for a reader who wrote no Python: without its place in a source, and with options."""
    text = str(message)
    for argument, option in AS_OPTIONS.items():
        text = text.replace(argument, option)
    return f"Warning: {text}\n"


@contextmanager
def arguments_checked() -> Iterator[None]:
    """Turn what the library itself finds wrong with an argument into a usage error, with status 2."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error


def writable(path: Any, make_folder: bool = False) -> Any:
    """Return a path, refused before any work is done if it cannot be written; make its folder if asked to."""
    if path is None or path == STDOUT:
        return path
    from lrrn.runtime.storage import check_writable

    with arguments_checked():
        if make_folder:
            path.parent.mkdir(parents=True, exist_ok=True)
        check_writable(path)
    return path


def samples_file(path: Path | None) -> Path | None:
    """Return a file for the results of each sample, refused before any work is done if it cannot be one."""
    if path is not None:
        from lrrn.reports.scoring import Parts

        with arguments_checked():
            Parts(path, {})  # which only checks the path at first
    return path


def check_distinct(reads: tuple[str | Path | None, ...], *writes: Path | None) -> None:
    """Refuse to overwrite a file that the same command reads, or to write two results to one file."""
    known = {Path(path).resolve(): path for path in reads if path is not None and Path(path).is_file()}
    for path in writes:
        if (
            path is None or path == STDOUT or (path.exists() and not path.is_file())
        ):  # devices such as /dev/null may be named twice
            continue
        other = known.setdefault(path.resolve(), path)
        if other is not path:
            raise typer.BadParameter(f"{path} would be written over {other}, which this command uses too; give it another name")


def write_text(path: Path, text: str) -> None:
    """Write a file as a whole or not at all, or to standard output."""
    if path == STDOUT:
        typer.echo(text, nl=False)
        return
    from lrrn.runtime.storage import write_bytes

    with errors_explained():
        write_bytes(path, text.encode())


def write_json(path: Path | None, content: dict[str, Any]) -> None:
    """Write a JSON file if one is asked for."""
    if path is not None:
        write_text(path, json.dumps(content, indent=2) + "\n")


def show_table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    first: JustifyMethod = "left",
    others: JustifyMethod = "left",
) -> None:
    """Print a table, with the alignment of the first column and of the others."""
    table = Table(title=title)
    for index, column in enumerate(columns):
        table.add_column(column, justify=others if index else first)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def show_comparisons(sections: Sequence[Section]) -> None:
    """Print the comparisons of a report, and what there is to remark on them."""
    for section in sections:
        if section.comparisons:
            show_table(section.title, section.columns, [comparison.cells() for comparison in section.comparisons])
            for remark in section.remarks():
                console.print(remark, highlight=False)


def publish(
    title: str, results: list[Evaluation], json_file: Path | None, page: Path | None, image_shape: tuple[int, ...] | None
) -> None:
    """Print evaluations, and write them to the files asked for."""
    from lrrn.reports.evaluation import as_page, as_table

    show_table(title, *as_table(results), others="right")
    write_json(json_file, {"title": title, "models": [result.as_json() for result in results]})
    if page is not None:
        write_text(page, as_page(title, results, image_shape))
        console.print(f"charts and filters: {page}")


def publish_audit(
    title: str, result: Audit | Intervals, json_file: Path | None, page: Path | None, samples: Path | None = None
) -> None:
    """Print an audit, and write it to the files asked for."""
    from lrrn.reports import audit, intervals

    report: Any = audit if isinstance(result, audit.Audit) else intervals
    columns, rows = report.as_table(result)
    show_table(title, columns, rows, first="right", others="right")
    console.print(report.summary(result))
    write_json(json_file, {"title": title, **result.as_json(samples is None)})
    if page is not None:
        write_text(page, report.as_page(title, result))
        console.print(f"chart: {page}")
