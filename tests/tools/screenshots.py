"""``python -m tests.tools.screenshots SITE OUT`` opens every page of a built site in Chromium, at two widths.

It writes a picture of each page and lists what a reader would trip over: a page or a table that is wider than the
screen, a picture that does not load or is too small to read, an error in a script, a request to another host.
It needs ``pip install playwright`` and Chromium (``--browser``, by default /usr/bin/chromium). Exit status 1 if
anything is listed.
"""

from __future__ import annotations

import argparse
import functools
import http.server
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SCREENS = {"desktop": (1280, 900), "phone": (390, 844)}  # CSS pixels
SMALLEST = 240  # pixels of a picture with text

TROUBLE = """least => {
    const screen = document.documentElement.clientWidth, found = [];
    if (document.documentElement.scrollWidth > screen) found.push("the page is wider than the screen");
    for (const image of document.querySelectorAll("article img"))
        if (!image.complete || !image.naturalWidth) found.push("no picture: " + image.src);
        else if (image.clientWidth < least) found.push("a picture of " + image.clientWidth + " pixels: " + image.src);
    for (const table of document.querySelectorAll("article table"))
        if (table.getBoundingClientRect().right > screen + 1 && !table.closest(".md-typeset__scrollwrap, .highlight"))
            found.push("a table is cut off");
    return found;
}"""


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files without a log."""

    def log_message(self, *arguments: object) -> None: ...


@contextmanager
def served(site: Path) -> Iterator[str]:
    """The address of a folder, on this machine."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=site)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def look(page: Any, address: str, path: str, picture: Path) -> list[str]:
    """Open one page; what is wrong with it."""
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: errors.extend(_elsewhere(request.url, address)))
    page.goto(address + path, wait_until="load")
    found = page.evaluate(TROUBLE, SMALLEST)
    page.screenshot(path=picture, full_page=True)
    return found + errors


def _elsewhere(url: str, address: str) -> list[str]:
    return [] if url.startswith((address, "data:", "blob:")) else [f"asks {url}"]


def main() -> int:
    """Print a line for each trouble, and return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("site", type=Path, help="what make docs built")
    parser.add_argument("out", type=Path, help="folder for the pictures")
    parser.add_argument("--browser", default="/usr/bin/chromium")
    parser.add_argument("--page", action="append", help="a page alone, e.g. learn/index.html; may be repeated")
    options = parser.parse_args()
    from playwright.sync_api import sync_playwright

    pages = options.page or sorted(path.relative_to(options.site).as_posix() for path in options.site.rglob("*.html"))
    options.out.mkdir(parents=True, exist_ok=True)
    n_troubles = 0
    with served(options.site) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=options.browser, args=["--no-sandbox", "--disable-gpu"])
        for (screen, (width, height)), path in ((s, p) for s in SCREENS.items() for p in pages):
            tab = browser.new_page(viewport={"width": width, "height": height})
            found = look(tab, address, path, options.out / f"{path.replace('/', '-')}.{screen}.png")
            tab.close()
            n_troubles += len(found)
            for trouble in found:
                print(f"{screen}, {path}: {trouble}")
        browser.close()
    print(f"{len(pages)} pages; troubles: {n_troubles}")
    return int(n_troubles > 0)


if __name__ == "__main__":
    sys.exit(main())
