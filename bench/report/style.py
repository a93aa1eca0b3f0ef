"""The look of the plots of the repository: colours, styles, and how a figure is made and written."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from fusedattn.cli.demo.figure import FUSED, STYLE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OURS, CEILING = FUSED, "#8a8a8a"
COLORS = ("#d1743c", "#5b6fb5", "#b5495b", "#7a9a3c", "#8c5fa8", "#c2a13a", "#4a4a4a")  # of others
MARKERS = "os^Dvp*X"
SVG_STYLE: Any = STYLE | {"svg.fonttype": "none", "svg.hashsalt": "fusedattn"}


@contextlib.contextmanager
def drawing(
    size: tuple[float, float], dpi: int = 130, style: Any = STYLE, pad: tuple[float, float] | None = (0.08, 0.08)
) -> Iterator[Figure]:
    """A figure of `size` inches in the style; without `pad` its axes lie where the caller puts them."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    with matplotlib.rc_context(style):
        layout = None if pad is None else ConstrainedLayoutEngine(w_pad=pad[0], h_pad=pad[1])
        figure = Figure(figsize=size, dpi=dpi, layout=layout)
        FigureCanvasAgg(figure)
        yield figure


def save_png(figure: Figure, path: Path, description: str = "", colors: int = 48) -> None:
    """Write a PNG with a palette, which makes the file a third as large, and what :func:`drawn_from` reads."""
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    drawn = io.BytesIO()
    figure.savefig(drawn, format="png")
    kept = PngInfo()
    if description:
        kept.add_text("Description", description)
    Image.open(drawn).convert("RGB").quantize(colors).save(path, optimize=True, pnginfo=kept)


def drawn_from(path: Path) -> str:
    """The description that a PNG or SVG keeps of what it shows: a test compares it with the present one."""
    if path.suffix == ".svg":
        text = path.read_text(encoding="utf-8")
        return ElementTree.fromstring(text).findtext(".//{http://purl.org/dc/elements/1.1/}description") or ""
    from PIL import Image

    with Image.open(path) as image:
        return str(image.info.get("Description", ""))


def digest(data: Any) -> str:
    """A short description of long data: bytes, or what a result file has."""
    encoded = data if isinstance(data, bytes) else json.dumps(data, sort_keys=True).encode()
    return hashlib.sha256(encoded).hexdigest()[:16]
