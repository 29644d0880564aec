"""Interactive web page that demonstrates a lifted network on images drawn by the user: ``lrrn explore``."""

from __future__ import annotations

from importlib.util import find_spec

NEEDED = ("starlette", "uvicorn")


def check_installed() -> None:
    """Raise an error that says what to install if the packages of the web server are missing."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise ValueError(f"the explorer needs {' and '.join(missing)}: pip install 'lrrn[explore]'")
