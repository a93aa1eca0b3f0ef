"""What MkDocs does not do by itself: pages for files outside docs, and links to them.

The documentation links to source files, as a code host shows them. The site has a page for each linked file.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"(?<=\]\()(?P<target>[^)\s#:]+)(?P<anchor>#[^)\s]*)?(?=\))")
TOP_PAGES = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
LANGUAGES = {".py": "python", ".json": "json", ".toml": "toml", ".txt": "text"}
FENCE = "~" * 8  # longer than those inside


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the top folder, and one for each source file that a page links to."""
    for name, uri in TOP_PAGES.items():
        files.append(File.generated(config, uri, content=(ROOT / name).read_text(encoding="utf-8")))
    linked = {path for page in files.documentation_pages() for path in _linked(page)}
    for path in sorted(linked):
        if _site_path(path).startswith("source/"):
            files.append(File.generated(config, _site_path(path), content=_source_page(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links at pages of the site; complete the list of decisions."""
    here = _repository_path(page.file)
    if page.file.src_uri == "decisions/README.md":
        markdown += "\n" + "\n".join(_decisions())
    if page.file.src_uri.startswith("source/"):
        return markdown
    return LINK.sub(lambda link: _link(link, here, page.file.src_uri), markdown)


def _link(link: re.Match[str], here: str, page: str) -> str:
    path = _path(link, here)
    if path is None:
        return link[0]
    return posixpath.relpath(_site_path(path), posixpath.dirname(page) or ".") + (link["anchor"] or "")


def _linked(page: File) -> Iterator[str]:
    """Paths in the repository of the files that a page links to."""
    here = _repository_path(page)
    for link in LINK.finditer(page.content_string):
        if path := _path(link, here):
            yield path


def _path(link: re.Match[str], here: str) -> str | None:
    """The file of the repository that a link names; None if there is none."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(here), link["target"]))
    return path if (ROOT / path).is_file() else None


def _repository_path(file: File) -> str:
    names = {uri: name for name, uri in TOP_PAGES.items()}
    return names.get(file.src_uri, f"docs/{file.src_uri}")


def _site_path(path: str) -> str:
    """Where the site has a file of the repository."""
    if path in TOP_PAGES:
        return TOP_PAGES[path]
    if path == "README.md":
        return "index.md"
    if path.startswith("docs/") and not path.endswith(".py"):
        return path.removeprefix("docs/")
    return f"source/{path}.md"


def _source_page(path: str) -> str:
    language = LANGUAGES.get(Path(path).suffix, "text")
    code = (ROOT / path).read_text(encoding="utf-8")
    lines = [f"# {posixpath.basename(path)}", f"`{path}` of the repository."]
    if path.startswith("docs/"):
        up = posixpath.relpath(path.removeprefix("docs/"), posixpath.dirname(f"source/{path}"))
        lines.append(f"[Download this file]({up}){{ .md-button download }}")
    return "\n\n".join([*lines, f"{FENCE}{language}\n{code.rstrip()}\n{FENCE}", ""])


def _decisions() -> Iterator[str]:
    """A list item for each record."""
    for path in sorted((ROOT / "docs/decisions").glob("0*.md")):
        title = path.read_text(encoding="utf-8").splitlines()[0].lstrip("# ")
        yield f"- [{title}]({os.path.basename(path)})"
