"""Relative links in Markdown files lead to files that exist, and their fragments to headings of these."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).parents[3]
FENCE = re.compile(r"^ *(```|~~~).*?^ *\1 *$", re.M | re.S)
CODE = re.compile(r"(`+).*?\1")
LINK = re.compile(r"\]\((?P<target>[^()\s]+(?:\([^()\s]*\)[^()\s]*)*)(?:\s+\"[^\"]*\")?\)")
HEADING = re.compile(r"^#{1,6} +(?P<text>.*?)[ #]*$", re.M)
ANCHOR = re.compile(r"<a id=\"(?P<id>[^\"]+)\">")


@dataclass(frozen=True)
class Link:
    """A link of `page`; `path` is empty within the page, `fragment` where there is none."""

    page: Path
    path: str
    fragment: str

    def fault(self) -> str | None:
        """Why the link leads nowhere, or None."""
        if self.path.startswith("/"):
            return "is absolute"
        target = (self.page.parent / unquote(self.path)).resolve() if self.path else self.page
        if not target.exists():
            return "there is no such file"
        if self.fragment and target.suffix == ".md" and self.fragment not in fragments(target.read_text()):
            return "there is no such heading"
        return None

    def __str__(self) -> str:
        return f"{self.path}{'#' * bool(self.fragment)}{self.fragment}"


def pages() -> list[Path]:
    """All Markdown files that git knows or would add."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    # Without git (a source archive), the folders that have documentation.
    found = [ROOT / line for line in listed.stdout.splitlines()] or [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    return [page for page in found if page.exists()]


def links(page: Path) -> Iterator[Link]:
    """The relative links of a page, those in code left out."""
    for match in LINK.finditer(CODE.sub("``", FENCE.sub("", page.read_text()))):
        path, _, fragment = match["target"].partition("#")
        if not re.match(r"[a-z]+:", path):
            yield Link(page, path, fragment)


def fragments(text: str) -> set[str]:
    """The fragments that GitHub gives a page's headings, and its explicit anchors."""
    prose = FENCE.sub("", text)
    slugs: list[str] = []
    for match in HEADING.finditer(prose):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", match["text"]).lower()
        slug = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        count = sum(re.fullmatch(rf"{re.escape(slug)}(-\d+)?", other) is not None for other in slugs)
        slugs.append(f"{slug}-{count}" if count else slug)
    return {*slugs, *ANCHOR.findall(prose)}


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    assert [f"{link}: {fault}" for link in links(page) if (fault := link.fault())] == []


def test_pages_are_found() -> None:
    assert {"README.md", "docs/index.md", "CONTRIBUTING.md"} <= {str(page.relative_to(ROOT)) for page in pages()}


def test_every_page_of_the_documentation_can_be_reached_from_its_index() -> None:
    docs = ROOT / "docs"
    reached, open_pages = set[Path](), [docs / "index.md"]
    while open_pages:
        page = open_pages.pop()
        if page in reached or not page.exists():
            continue
        reached.add(page)
        targets = [(page.parent / unquote(link.path)).resolve() for link in links(page) if link.path]
        # A link to a folder leads to all of its pages.
        found = [each for target in targets for each in (target.glob("*.md") if target.is_dir() else (target,))]
        open_pages += [each for each in found if each.suffix == ".md" and each.is_relative_to(docs)]
    assert {page for page in pages() if page.is_relative_to(docs)} <= reached


def test_a_link_to_nowhere_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A page: `here`\n\n[1](page.md#a-page-here) [2](#a-page-here) [3](https://a.org/none.md) `[4](none.md)`\n"
        "```\n[5](none.md)\n```\n[6](none.md) [7](#none) [8](page.md#none) [9](/page.md)\n"
    )
    assert {str(link) for link in links(page) if link.fault()} == {"none.md", "#none", "page.md#none", "/page.md"}
