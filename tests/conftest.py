from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings

# the same examples every run; HYPOTHESIS_PROFILE=explore draws new ones
settings.register_profile("fixed", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("explore", deadline=None, max_examples=1000, suppress_health_check=[HealthCheck.too_slow])
# where any failure will do, it need not be made smaller
settings.register_profile("first", settings.get_profile("fixed"), phases=[Phase.explicit, Phase.reuse, Phase.generate])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))


@pytest.fixture(
    params=[
        "cpu",
        pytest.param(
            "cuda",
            marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")],
        ),
    ]
)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Send the counts of a worker of pytest-xdist to the main process."""
    from doc_pages import ran

    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["ran"] = ran


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Add the counts of a worker of pytest-xdist to those of the main process."""
    from doc_pages import ran

    for what, n in getattr(node, "workeroutput", {}).get("ran", {}).items():
        ran[what] += n


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many code blocks of the documentation ran, where any did."""
    from doc_pages import ROOT, ran

    if any(ran.values()):
        gallery = len(list((ROOT / "docs" / "_build" / "html" / "pictures").glob("plot_*.html")))
        terminalreporter.write_line(f"documentation: {', '.join(f'{n} {what}' for what, n in ran.items())}")
        terminalreporter.write_line(f"documentation: {gallery} scripts of the gallery ran when the pages were built")
