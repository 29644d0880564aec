"""Life cycle of the explorer: a background thread opens or trains a model, then refines the results on the page."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, final

import numpy as np

from lrrn.explore.opening import Opened
from lrrn.explore.overview import describe
from lrrn.explore.session import Session
from lrrn.reports.evaluation import lipschitz_of
from lrrn.runtime.threads import blas_threads

logger = logging.getLogger("lrrn.explore")

Opener = Callable[[Callable[[int, int], None]], Opened]
"""Opens a model and reports progress: finished epochs and total epochs."""


@final
class Explorer:
    """Holds the session that answers the page's requests, and its state until there is one.

    ``opener`` creates the session; it is called in a separate thread.
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
        """Open the model in a daemon thread, which ends with the process."""
        self._thread = threading.Thread(target=self._open, name="lrrn-explore", daemon=True)
        self._thread.start()

    @property
    def working(self) -> bool:
        """Whether the background thread is still working."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def session(self) -> Session:
        """The session; raises a RuntimeError with the reason if there is none yet."""
        if self._session is None:
            raise RuntimeError(self._error or "The model is still being trained; try again in some seconds.")
        return self._session

    def state(self) -> dict[str, Any]:
        """Return the status: opening, ready or failed, and the version number of the overview."""
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
            # compile kernels and factor matrices before the first stroke, not during it
            opened.session.analyse(np.zeros(opened.session.n_pixels))
            self._publish(opened.session)
        except Exception as error:  # the page shows any error
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
        """Compute what takes seconds: constants for local radii, the Lipschitz constant, tighter radii for the curve."""
        session = opened.session
        if session.obstacles()["local"] is None:
            session.tighten(np.zeros(session.n_pixels))
        with blas_threads(1):
            bound = lipschitz_of(session.model)
        if opened.refine is not None:
            session.reference = opened.refine()
        self._publish(session, lipschitz=bound)
