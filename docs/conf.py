"""Sphinx settings: Markdown by MyST, the Furo theme. `make docs` builds with warnings as errors."""

from __future__ import annotations

import echo2

project = "echo2"
copyright = "the echo2 authors, Apache-2.0"
release = version = echo2.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"echo2 {release}"
autodoc_member_order = "bysource"
autodoc_typehints = "description"
nitpicky = False
