"""Sphinx's configuration: `scripts/docs` builds the site into build/docs.

The pages are plain Markdown, so that they read the same on a code host as on the site. The
contents of the site are the lists of links in index.md: a heading there is a caption, and each
link below it a page.
"""

import re

from sphinx.application import Sphinx

project = "hybridkv"
author = "The hybridkv authors"
copyright = "The hybridkv authors, Apache-2.0"

extensions = ["myst_parser"]
myst_heading_anchors = 4
source_suffix = {".md": "markdown"}
nitpicky = True
smartquotes = False
# Grammars and log lines are shown as they are.
highlight_language = "text"

html_theme = "furo"
html_title = "hybridkv"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False

_LIST = re.compile(r"^## (?P<caption>.+)\n(?P<links>(?:\n|(?!#).+\n)+)", re.MULTILINE)
_LINK = re.compile(r"^- \[[^]]+\]\((?P<page>[^):#]+)\.md\)", re.MULTILINE)


def contents(text: str) -> str:
    """The index with a hidden table of contents for each of its lists of links."""
    made = [text]
    for found in _LIST.finditer(text):
        pages = "\n".join(link["page"] for link in _LINK.finditer(found["links"]))
        if pages:
            made.append(f"```{{toctree}}\n:hidden:\n:caption: {found['caption']}\n\n{pages}\n```\n")
    return "\n".join(made)


def setup(app: Sphinx) -> None:
    """Sphinx calls this once."""

    def read(app: Sphinx, page: str, source: list[str]) -> None:
        if page == "index":
            source[0] = contents(source[0])

    app.connect("source-read", read)
