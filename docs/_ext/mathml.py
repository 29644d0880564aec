"""Formulae as MathML, which browsers draw themselves: nothing to fetch, nothing to run.

docutils brings the converter. What it cannot convert is a warning, and warnings stop the build.
"""

from __future__ import annotations

import re
from typing import Any
from xml.etree import ElementTree

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.util import logging

logger = logging.getLogger(__name__)

TAG = re.compile(r"\\tag\{([^}]*)\}")
OPENING = re.compile(r'<mo class="mathopen">([|‖])</mo>')
CLOSING = re.compile(r"<mo>([|‖])</mo>")
ACCENTS = ("\u02c6", "\u02c9", "~", "_")


def converted(latex: str, block: bool, node: nodes.Node) -> str:
    """Return a formula as MathML; bars of norms lean on what they enclose, and accents sit on letters, not on indices."""
    try:
        mathml = tex2mathml(latex, as_block=block)
    except MathError as error:
        logger.warning("cannot convert the formula %r: %s", latex, error, location=node)
        return f"<code>{latex}</code>"
    mathml = OPENING.sub(r'<mo form="prefix" stretchy="false">\1</mo>', mathml)
    mathml = CLOSING.sub(r'<mo form="postfix" stretchy="false">\1</mo>', mathml)
    # HTML needs no namespace and does not know all names of characters that XML may have
    tree = ElementTree.fromstring(
        mathml.replace(' xmlns="http://www.w3.org/1998/Math/MathML"', "").replace("&ApplyFunction;", "\u2061")
    )
    for element in tree.iter("munderover"):
        letter, index, accent = element
        if accent.text in ACCENTS:
            # docutils takes the index of an accented letter for a limit
            marked = ElementTree.Element("mover", {"accent": "true"})
            marked.extend([letter, accent])
            element.tag = "msub"
            element[:] = [marked, index]
    return ElementTree.tostring(tree, encoding="unicode")


def visit_inline(translator: Any, node: nodes.math) -> None:
    """Write a formula inside a paragraph."""
    translator.body.append(converted(node.astext(), False, node))
    raise nodes.SkipNode


def visit_block(translator: Any, node: nodes.math_block) -> None:
    r"""Write a displayed formula, with its number, given by \tag, at the right."""
    latex = node.astext()
    number = TAG.search(latex)
    body = converted(TAG.sub("", latex), True, node)
    tag = f'<span class="equation-number">({number[1]})</span>' if number else ""
    translator.body.append(f'<div class="equation">{body}{tag}</div>\n')
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the renderer under the name that ``html_math_renderer`` asks for."""
    app.add_html_math_renderer("mathml", (visit_inline, None), (visit_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
