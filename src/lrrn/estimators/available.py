"""Methods that exist only for some parameters of an estimator."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any, final


@final
class AvailableIf:
    """Descriptor of a method that exists only if ``check`` raises no AttributeError.

    scikit-learn's ``available_if`` hides the message of the check behind one of its own, which does not say what to do.

    Parameters
    ----------
    check : callable
        Takes the estimator and raises an AttributeError that says when the method exists.
    """

    def __init__(self, check: Callable[[Any], None]) -> None:
        self.check = check

    def __call__(self, method: Callable[..., Any]) -> AvailableIf:
        """Decorate a method."""
        self.method = method
        functools.update_wrapper(self, method)
        return self

    def __get__(self, estimator: Any, owner: type | None = None) -> Callable[..., Any]:
        """Return the method of an estimator, or the function if it is looked up in the class."""
        if estimator is None:
            return self.method
        self.check(estimator)
        return MethodType(self.method, estimator)
