"""Make pages of the documents by Sphinx: every warning is an error, and what is made fetches nothing from anywhere.

`pages.py --out FOLDER`, by the farm's own Python with the packages of requirements/docs.txt on its path: `make docs`.
"""

from __future__ import annotations

import argparse
import html.parser
import pathlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parents[2]
FIRST = "docs/index.html"
# A page there only sends on: documents keep the places that they have in the repository.
_SENDS_ON = (
    '<!doctype html><meta charset="utf-8"><title>tvm-farm</title>'
    f'<meta http-equiv="refresh" content="0; url={FIRST}">\n'
)
# Elements whose addresses a browser opens by itself. Of `link`, what is no resource is left out.
_OPENED = {"audio", "embed", "iframe", "img", "input", "link", "object", "script", "source", "track", "video"}
_ELSEWHERE = re.compile(r"(?:[a-z][a-z0-9+.-]*:)?//", re.IGNORECASE)
_IN_CSS = re.compile(r"""(?:url\(\s*['"]?|@import\s+['"])((?:[a-z]+:)?//[^'")\s]+)""", re.IGNORECASE)


class _Opened(html.parser.HTMLParser):
    """Collects addresses elsewhere that a page makes a browser open."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        said = {key: value or "" for key, value in attrs}
        if tag in _OPENED and said.get("rel") not in ("author", "canonical", "index", "next", "prev", "search"):
            addresses = [said.get(key, "") for key in ("src", "href", "data", "poster")] + said.get(
                "srcset", ""
            ).split()
            self.found += [each for each in addresses if _ELSEWHERE.match(each)]
        self.found += _IN_CSS.findall(said.get("style", ""))


def find_foreign(folder: pathlib.Path) -> Iterator[str]:
    """What pages, style sheets and drawings of a folder would fetch from elsewhere, each with the file that does."""
    for path in sorted(folder.rglob("*")):
        if path.suffix == ".html":
            text = path.read_text(encoding="utf-8")
            page = _Opened()
            page.feed(text)
            found = page.found + [
                each for style in re.findall(r"(?s)<style.*?</style>", text) for each in _IN_CSS.findall(style)
            ]
        elif path.suffix in (".css", ".svg"):
            found = _IN_CSS.findall(path.read_text(encoding="utf-8"))
        else:
            continue
        for address in found:
            yield f"{path.relative_to(folder)}: {address}"


def make(out: pathlib.Path) -> None:
    """Write the pages. Raises SystemExit where a reference is broken or something would be fetched."""
    # What is left of another run would keep its list of pages.
    shutil.rmtree(out, ignore_errors=True)
    command = [
        "-m",
        "sphinx",
        "-W",
        "--keep-going",
        "-q",
        "-E",
        "-b",
        "html",
        "-c",
        "docs",
        "-d",
        str(out.with_name("trees")),
        ".",
        str(out),
    ]
    if subprocess.run([sys.executable, *command], cwd=ROOT, check=False).returncode:
        raise SystemExit("error: the documents have faults, named above")
    (out / "index.html").write_text(_SENDS_ON, encoding="utf-8")
    if foreign := list(find_foreign(out)):
        raise SystemExit("error: pages would fetch from elsewhere:\n  " + "\n  ".join(foreign))


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=pathlib.Path, required=True, help="the folder of the pages")
    out = parser.parse_args().out.resolve()
    make(out)
    print(f"{out / FIRST}")


if __name__ == "__main__":
    main()
