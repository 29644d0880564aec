"""How Sphinx builds these pages: `make docs`, without a network connection, warnings as errors."""

from __future__ import annotations

import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "_ext"))

# one BLAS thread: the solvers bring their own, and the pictures come out the same
os.environ.setdefault("OMP_NUM_THREADS", "1")

from docstrings import own_members  # noqa: E402
from sphinx.application import Sphinx  # noqa: E402

import lrrn  # noqa: E402

project = "lrrn"
author = "The lrrn developers"
copyright = "the lrrn developers, MIT licence"
version = release = lrrn.__version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.viewcode",
    "numpydoc",
    "myst_parser",
    "sphinx_gallery.gen_gallery",
    "mathml",
    "docstrings",
]
exclude_patterns = ["_build", "_ext", "gallery/*.rst"]

# --- Markdown ---------------------------------------------------------------------------------------------------------
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3

# --- the interface ----------------------------------------------------------------------------------------------------
autosummary_generate = True
autosummary_context = own_members("lrrn")
autodoc_typehints = "none"  # the docstrings say it in words
autodoc_member_order = "bysource"
numpydoc_show_class_members = False
templates_path = ["_templates"]

# --- the pictures -----------------------------------------------------------------------------------------------------
sphinx_gallery_conf = {
    "examples_dirs": "gallery",
    "gallery_dirs": "pictures",
    "filename_pattern": r"plot_",
    "within_subsection_order": "FileNameSortKey",
    "abort_on_example_error": True,
    "parallel": 2,
    "show_signature": False,
    "show_memory": False,
    "thumbnail_size": (800, 480),
    "write_computation_times": False,
    "remove_config_comments": True,
    "min_reported_time": 1e9,
    "reference_url": {},
}

# --- HTML -------------------------------------------------------------------------------------------------------------
html_theme = "pydata_sphinx_theme"
html_title = "lrrn"
html_static_path = ["_static"]
html_css_files = ["lrrn.css"]
# pages without a section of their own have nothing to list at the left
ALONE = ("index", "start", "command-line", "contributing", "way-of-a-sample", "releasing", "changelog")
html_sidebars = {page: [] for page in ALONE}
html_copy_source = False
html_show_sourcelink = False
html_math_renderer = "mathml"
html_theme_options = {
    "logo": {"text": "lrrn"},
    "navbar_align": "left",
    "show_prev_next": True,
    "show_nav_level": 1,
    "header_links_before_dropdown": 7,
    "navbar_end": ["theme-switcher"],
    "footer_start": ["copyright"],
    "footer_end": [],
    "secondary_sidebar_items": ["page-toc"],
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}

# --- pages that are made by commands or come with other parts of the package -------------------------------------------
RECORDS = [f"record/{data}/report" for data in ("mnist", "fashion_mnist", "kmnist", "kmnist_7011", "cifar10")]
OPTIONAL = ("benchmarks", "certified-accuracy", "explorer", "faults", "scaling-out", *RECORDS)


def without_missing(app: Sphinx, docname: str, source: list[str]) -> None:
    """Leave lines of a table of contents out whose page is not there."""
    for page in OPTIONAL:
        if not (HERE / f"{page}.md").is_file():
            source[0] = source[0].replace(f"\n/{page}\n", "\n")


def setup(app: Sphinx) -> None:
    """Look at every page before it is parsed."""
    app.connect("source-read", without_missing)
