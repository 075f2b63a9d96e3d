"""Sphinx configuration."""

from importlib import metadata

project = "shadowrun"
author = "The shadowrun developers"
copyright = author  # noqa: A001 - the name that Sphinx reads
release = metadata.version("shadowrun")
extensions = ["myst_parser"]
html_theme = "furo"
html_title = f"shadowrun {release}"
exclude_patterns = ["_build"]
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence", "deflist"]
