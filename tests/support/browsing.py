"""What the tests of the explorer's page share: where artefacts go, how long to wait, and what to wait for."""

from __future__ import annotations

import json
import os
from pathlib import Path

from explorer_page import until

ARTEFACTS = Path(__file__).resolve().parents[2] / "out" / "browser"
WAIT = float(os.environ.get("LRRN_BROWSER_WAIT", "60"))
"""Seconds to wait for anything to happen; machines that are busy need more."""


def settled(page, card="answer-card"):
    """Wait until what a card shows is the answer to the image as it is now."""
    until(page, f"document.getElementById('{card}').ariaBusy === 'false'", WAIT)


def says(page, selector, text):
    until(page, f"document.querySelector({json.dumps(selector)}).innerText.includes({json.dumps(text)})", WAIT)
