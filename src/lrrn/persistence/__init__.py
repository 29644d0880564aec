"""Model files: fitted estimators, Pipelines, networks and reference samples as safetensors with a JSON header, never pickle.

Some models ship with the package; see :mod:`lrrn.persistence.shipped`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lrrn.persistence.serialization import load, save

__all__ = ["load", "save"]


def __getattr__(name: str) -> Any:
    # on first use: the command line resolves names without torch, which takes seconds to import
    if name not in __all__:
        raise AttributeError(f"module 'lrrn.persistence' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module("lrrn.persistence.serialization"), name)
    return value
