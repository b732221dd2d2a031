"""Configuration of the documentation site: `make docs` builds it with Sphinx into build/docs."""

import importlib.metadata

project = "stackwise"
release = importlib.metadata.version("stackwise")
extensions = ["myst_parser"]
html_theme = "furo"
html_title = f"stackwise {release}"
exclude_patterns = ["images"]
myst_heading_anchors = 4  # levels of headings that links can name
