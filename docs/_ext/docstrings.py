"""Helpers for the pages made from docstrings."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from functools import cached_property
from typing import Any

from sphinx.application import Sphinx

LITERAL = re.compile(r"(``.*?``)")
BACK = re.compile(r'(href="[^"#]*/api/(?P<module>[\w.]+)\.(?P<name>\w+)\.html#)[\w.]*?\.(?P=name)(?=[."])')
"""A link from source code to the page of an object: the page is named after the object, the anchor may have another module."""


def escape_norms(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Escape vertical bars outside literals: docstrings are plain text, where ``|v|`` is a norm and no substitution."""
    for number, line in enumerate(lines):
        parts = LITERAL.split(line)
        parts[::2] = [part.replace("|", r"\|") for part in parts[::2]]
        lines[number] = "".join(parts)


def mend_links_back(app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: Any) -> None:
    """Point links from source code at the anchors that pages have.

    Sphinx keeps one module name per source file, that of the first object documented. Objects of the same file that are
    documented under another module's name get anchors that do not exist.
    """
    if pagename.startswith("_modules/"):
        context["body"] = BACK.sub(r"\g<1>\g<module>.\g<name>", context["body"])


def own_members(package: str) -> dict[str, dict[str, list[str]]]:
    """Return, by class name, the public methods and properties that a package's classes do not owe to another package."""
    methods: dict[str, list[str]] = {}
    properties: dict[str, list[str]] = {}
    for cls in _classes(package):
        for name, member in inspect.getmembers(cls):
            if name.startswith("_") or name == "extra_repr":
                continue
            getter = member.fget if isinstance(member, property) else getattr(member, "func", member)
            if not str(getattr(getter, "__module__", "")).startswith(package):
                continue
            if isinstance(member, property | cached_property):
                properties.setdefault(cls.__name__, []).append(name)
            elif callable(member) and not inspect.isclass(member):
                methods.setdefault(cls.__name__, []).append(name)
    return {"own_methods": methods, "own_properties": properties}


def _classes(package: str) -> list[type]:
    found: dict[str, type] = {}
    path = importlib.import_module(package).__path__
    for module in pkgutil.walk_packages(path, f"{package}.", onerror=lambda name: None):
        if any(part.startswith("_") for part in module.name.split(".")):
            continue
        try:
            names = vars(importlib.import_module(module.name))
        except ModuleNotFoundError:
            continue  # needs an extra that is not installed here, and so is no part of the interface
        found |= {
            name: value for name, value in names.items() if inspect.isclass(value) and value.__module__.startswith(package)
        }
    return list(found.values())


def setup(app: Sphinx) -> dict[str, bool]:
    """Look at every docstring before numpydoc does, and at pages of source code before they are written."""
    app.connect("autodoc-process-docstring", escape_norms, priority=100)
    app.connect("html-page-context", mend_links_back)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
