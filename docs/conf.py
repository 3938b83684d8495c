"""Settings of Sphinx. ``make docs`` builds README.md and docs/ into build/docs."""

from __future__ import annotations

import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import thinwire  # noqa: E402 - the path of the checkout comes first

project = "Thinwire"
author = "The Thinwire authors"
version = release = thinwire.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "docs/index"
include_patterns = ["*.md", "docs/**", "bench/**/*.md"]
exclude_patterns = ["docs/conf.py"]

html_theme = "furo"
html_title = f"Thinwire {release}"

#: Pages link to headings by the names that GitHub gives them, whatever their level.
myst_heading_anchors = 5
myst_enable_extensions = ["colon_fence"]

# Docstrings are in Google's style; single backticks name code.
default_role = "code"
napoleon_numpy_docstring = False
napoleon_use_ivar = True
autodoc_member_order = "bysource"
autodoc_typehints = "none"
