"""A browser, and everything that its pages ask for and complain about."""

from __future__ import annotations

import json

import pytest
from explorer_page import chromium, new_page, until

from browsing import ARTEFACTS, WAIT


@pytest.fixture(scope="session")
def requests():
    """Everything any page of these tests asked for, kept as an artefact."""
    urls: list[str] = []
    yield urls
    ARTEFACTS.mkdir(parents=True, exist_ok=True)
    (ARTEFACTS / "requests.json").write_text(json.dumps(urls, indent=1) + "\n")


@pytest.fixture(scope="module")
def problems():
    """Errors and warnings of all pages: there should be none."""
    found: list[str] = []
    yield found
    assert found == []


@pytest.fixture(scope="module")
def opened(requests, problems):
    """How to open the explorer."""
    with chromium() as browser:

        def page_at(url, **options):
            page = new_page(browser, requests, problems, WAIT, **options)
            page.goto(url)
            until(page, "!document.getElementById('main').hidden", WAIT)
            until(page, "/[0-9a-z]/.test(document.getElementById('prediction').innerText)", WAIT)
            return page

        yield page_at
