"""The site of the documentation builds without a warning, its links lead somewhere, and it has every public name."""

from __future__ import annotations

import dataclasses
import html.parser
import urllib.parse
from pathlib import Path

import pytest

import fusedattn
from bench import headline
from bench.report.style import drawn_from
from tests.helpers.compiling import ROOT, output

# Names that have their entry as another one: functions that hide their module, and a class that two modules have.
PLACES = {
    "fusedattn.attention": "fusedattn.attention.attention",
    "fusedattn.merge": "fusedattn.merge.merge",
    "fusedattn.caches.KVCache": "fusedattn.KVCache",
}
IN_MODULES = ("biases", "caches", "dropout", "feature_maps", "masks")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs", reason="make docs installs it")
    pytest.importorskip("mkdocstrings", reason="make docs installs it")
    folder = tmp_path_factory.mktemp("site")
    output("-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder, cwd=ROOT, NO_MKDOCS_2_WARNING="1")
    return folder


@dataclasses.dataclass
class Document(html.parser.HTMLParser):
    """The links of a page and the places that links can name."""

    links: list[str] = dataclasses.field(default_factory=list)
    places: set[str] = dataclasses.field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.places |= {value for name in ("id", "name") if (value := values.get(name))}
        wanted = values.get("href") if tag in ("a", "link") else values.get("src")
        if wanted:
            self.links.append(wanted)


def documents(site: Path) -> dict[Path, Document]:
    found = {}
    for path in site.rglob("*.html"):
        found[path] = Document()
        found[path].feed(path.read_text(encoding="utf-8"))
    return found


def broken(site: Path) -> list[str]:
    """Links to a file or a place that the site lacks, seen from each page."""
    found = documents(site)
    wrong = []
    for page, document in found.items():
        for link in document.links:
            url = urllib.parse.urlsplit(link)
            if url.scheme in ("http", "https", "mailto", "data"):
                continue
            path = urllib.parse.unquote(url.path)
            target = page if not path else (site / path.lstrip("/") if path.startswith("/") else page.parent / path)
            target = (target / "index.html" if target.is_dir() else target).resolve()
            place = urllib.parse.unquote(url.fragment)
            has_place = not place or target not in found or place in found[target].places
            if not target.exists() or not has_place:
                wrong.append(f"{page.relative_to(site)}: {link}")
    return wrong


@pytest.mark.thorough
def test_links_lead_somewhere(site: Path) -> None:
    assert broken(site) == []
    page = site / "quick/index.html"
    page.parent.mkdir()
    page.write_text('<a href="../nothing/">x</a><a href="../attention/#nothing">x</a><img src="x.png">')
    try:
        assert broken(site) == [f"quick/index.html: {x}" for x in ("../nothing/", "../attention/#nothing", "x.png")]
    finally:
        page.unlink()
        page.parent.rmdir()


@pytest.mark.thorough
def test_the_reference_has_every_public_name(site: Path) -> None:
    places = {
        place for page, document in documents(site).items() if "reference" in page.parts for place in document.places
    }
    names = {f"fusedattn.{name}" for name in fusedattn.__all__ if name != "__version__"}
    for module in IN_MODULES:
        names |= {f"fusedattn.{module}.{name}" for name in getattr(fusedattn, module).__all__}
    assert {name for name in names if PLACES.get(name, name) not in places} == set()


@pytest.mark.thorough
def test_pages_load_nothing_from_other_hosts(site: Path) -> None:
    for path in site.rglob("*.html"):
        text = path.read_text(encoding="utf-8")
        for start in ('src="http', "src='http", '<link rel="stylesheet" href="http', "@import"):
            assert start not in text, path


def test_every_page_is_in_the_navigation() -> None:
    """The build warns too, but the tests of a checkout have no MkDocs."""
    listed = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = [path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")]
    kept_out = ("package.md", "decisions/0")
    assert [page for page in pages if page not in listed and not page.startswith(kept_out)] == []


def test_the_first_page_has_the_times_of_the_committed_run() -> None:
    report = headline.results.read_green(headline.RUN)
    times = headline.times(report)
    assert next(iter(times)) == headline.OWN
    words = f"FlexAttention takes {times['flex']:.2f} times as long as fusedattn, cuDNN {times['torch.sdpa-cudnn']:.2f}"
    assert words in (ROOT / "docs/index.md").read_text(encoding="utf-8")
    for path in (headline.BLOCKS, headline.TIMES):
        assert drawn_from(path) == headline.description(), "run: python -m bench.headline"
