"""The life of an explorer: a model is opened or trained in the background, then refined while people look at it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, final

import numpy as np

from lrrn.explore.opening import Opened
from lrrn.explore.overview import describe
from lrrn.explore.session import Session
from lrrn.runtime.threads import blas_threads

logger = logging.getLogger("lrrn.explore")

Opener = Callable[[Callable[[int, int], None]], Opened]
"""Opens a model, and tells how many epochs of how many are done."""


@final
class Explorer:
    """Holds the session that the page asks, from before it exists.

    Parameters
    ----------
    name : str
        What the model is called.
    opener : callable
        Makes the session; called in a thread of its own.
    """

    def __init__(self, name: str, opener: Opener) -> None:
        self.name = name
        self._opener = opener
        self._thread: threading.Thread | None = None
        self._progress = (0, 0)
        self._session: Session | None = None
        self._error: str | None = None
        self._overview: dict[str, Any] = {}
        self._version = 0
        self._refined = False

    def start(self) -> None:
        """Open the model in the background; the thread ends with the process."""
        self._thread = threading.Thread(target=self._open, name="lrrn-explore", daemon=True)
        self._thread.start()

    @property
    def working(self) -> bool:
        """Whether something is still going on in the background."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def session(self) -> Session:
        """The session; a RuntimeError says why there is none yet."""
        if self._session is None:
            raise RuntimeError(self._error or "The model is still being trained; try again in some seconds.")
        return self._session

    def state(self) -> dict[str, Any]:
        """Say how far things are: opening, ready or failed, and which version of the overview there is."""
        phase = "failed" if self._error else "ready" if self._session else "opening"
        done, total = self._progress
        return {
            "phase": phase,
            "done": done,
            "total": total,
            "error": self._error,
            "version": self._version,
            "refined": self._refined,
        }

    def overview(self) -> dict[str, Any]:
        """Describe the model."""
        _ = self.session
        return self._overview

    def _open(self) -> None:
        try:
            opened = self._opener(self._tell)
            # kernels are compiled and matrices factored before the first stroke, not during it
            opened.session.analyse(np.zeros(opened.session.n_pixels))
            self._publish(opened.session)
        except Exception as error:  # whatever it is, the page has to say so
            logger.exception("the model could not be opened")
            self._error = f"The model could not be opened: {error}"
            return
        try:
            self._refine(opened)
        except Exception:
            logger.exception("what was to be refined stays as it is")
        self._refined = True

    def _tell(self, done: int, total: int) -> None:
        self._progress = (done, total)

    def _publish(self, session: Session, **more: Any) -> None:
        self._overview = {**describe(session, self.name), **more}
        self._session = session
        self._version += 1

    def _refine(self, opened: Opened) -> None:
        """Prove what takes seconds: what local radii begin from, the Lipschitz constant, tighter radii for the curve."""
        session = opened.session
        if session.obstacles()["local"] is None:
            session.tighten(np.zeros(session.n_pixels))
        with blas_threads(1):
            bound = session.model.lipschitz_
        if opened.refine is not None:
            session.reference = opened.refine()
        self._publish(session, lipschitz=float(bound))
