"""How `make docs` makes pages of the documents. The source is the whole repository: a link works there as it does here.

Nothing is fetched, neither while pages are made nor by them; `make docs` checks what was made.
"""

from __future__ import annotations

import importlib.util
import pathlib
import re
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]

project = "tvm-farm"
author = "tvm-farm maintainers"
# Read, not imported: a page's foot is not worth loading the farm.
release = version = re.findall(r'(?m)^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))[0]

extensions = ["myst_parser", "sphinx.ext.autodoc"]
root_doc = "docs/index"
source_suffix = {".md": "markdown"}
include_patterns = ["*.md", "docs/**.md", "deploy/**/README.md"]
exclude_patterns = [".*", "build", "dist", "farm", "device_agent", "tests", "benchmarks", "inventory", "requirements"]

# Every reference that leads nowhere is an error (`-W`), but for types of other packages in signatures.
nitpicky = True
nitpick_ignore_regex = [("py:.*", ".*")]
myst_heading_anchors = 4
# Links within one page and between pages; what only looks like mathematics or a substitution stays as it is.
myst_enable_extensions: list[str] = []
highlight_language = "none"
suppress_warnings: list[str] = []

# Docstrings are plain sentences in which code stands between single backquotes.
default_role = "literal"
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True

html_theme = "furo"
html_title = f"tvm-farm {version}"
html_copy_source = False
html_show_sphinx = False
# Summaries are read from pages by a script, which browsers refuse where pages are files.
html_show_search_summary = False
html_show_copyright = False
html_static_path = ["pages"]
html_css_files = ["pages.css"]
html_theme_options = {"top_of_page_buttons": []}


def _load_reference() -> Any:
    spec = importlib.util.spec_from_file_location("reference", ROOT / "deploy" / "release" / "reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def setup(app: Any) -> None:
    """Called by Sphinx."""
    reference = _load_reference()

    def fill(_app: Any, _page: str, source: list[str]) -> None:
        source[0] = reference.fill_for_site(source[0])

    app.connect("source-read", fill)
