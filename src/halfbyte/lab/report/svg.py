"""matplotlib figures as inline SVG whose colours are the page's, so that they follow its light and dark modes.

Figures are drawn in placeholder colours, and each placeholder becomes a CSS variable. Text stays text: it can be
searched, and takes the page's font.
"""

from __future__ import annotations

import re
from typing import Any
from xml.etree import ElementTree

INK, FAINT, ACCENT = "#010101", "#020202", "#030303"
SERIES = tuple(f"#0404{number:02x}" for number in range(10))
_VARIABLES = {INK: "var(--ink)", FAINT: "var(--faint)", ACCENT: "var(--accent)"} | {
    colour: f"var(--series-{number})" for number, colour in enumerate(SERIES)
}
# What tells series apart without colour: matplotlib's marker, and the sign that a legend shows for it.
MARKERS = (
    *(("o", "●"), ("s", "■"), ("^", "▲"), ("D", "◆"), ("v", "▼"), ("P", "✚"), ("X", "✖"), ("*", "★")),
    *(("<", "◀"), (">", "▶")),
)
_SETTINGS = {
    **{"font.size": 9, "axes.titlesize": 9, "axes.titlelocation": "left", "axes.labelsize": 9, "legend.fontsize": 8},
    **{"svg.fonttype": "none", "svg.hashsalt": "halfbyte", "axes.formatter.use_mathtext": False},
    **{"axes.spines.top": False, "axes.spines.right": False, "lines.markersize": 4.5, "lines.linewidth": 1.3},
    **{"text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": FAINT, "xtick.labelcolor": INK},
    **{"ytick.labelcolor": INK, "xtick.color": FAINT, "ytick.color": FAINT, "axes.titlecolor": INK},
}


def new_figure(width: float = 4.2, height: float = 3.2) -> tuple[Any, Any]:
    """A figure in inches that a phone shows at its size, and its axes.

    Raises ModuleNotFoundError without matplotlib.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("report draws with matplotlib: pip install 'halfbyte[report]'") from error
    with matplotlib.rc_context(_SETTINGS):
        figure = Figure(figsize=(width, height), layout="constrained")
        return figure, figure.add_subplot()


def inline(figure: Any, name: str, alt: str) -> str:
    """The figure as an <svg> element to put into HTML; its ids begin with `name`, `alt` says what it shows."""
    import io

    import matplotlib

    buffer = io.BytesIO()
    with matplotlib.rc_context(_SETTINGS):
        nothing = {"Date": None, "Creator": None, "Format": None, "Type": None}
        figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    root = ElementTree.fromstring(buffer.getvalue())
    for parent in root.iter():
        for child in [child for child in parent if child.tag.endswith("}metadata") or child.tag.endswith("}style")]:
            parent.remove(child)
    for element in root.iter():
        element.tag = element.tag.split("}")[-1]
        for key in list(element.attrib):
            value = _in_the_pages_colours(element.attrib.pop(key))
            element.attrib[key.split("}")[-1]] = _prefixed(key, value, name)
    viewbox = root.attrib["viewBox"]
    root.attrib.clear()
    root.attrib |= {"viewBox": viewbox, "role": "img", "aria-label": alt, "class": "plot"}
    return ElementTree.tostring(root, encoding="unicode", method="html")


def _in_the_pages_colours(value: str) -> str:
    value = re.sub(r"font(-family)?:[^;]*'[^;]*(;|$)", lambda found: _size_of(found[0]), value)
    return re.sub(r"#[0-9a-f]{6}\b", lambda found: _VARIABLES.get(found[0], found[0]), value)


def _size_of(declaration: str) -> str:
    """What of a font declaration stays: its size."""
    size = re.search(r"[\d.]+px", declaration)
    return f"font-size: {size[0]};" if size else ""


def _prefixed(key: str, value: str, name: str) -> str:
    """Ids are unique in a page that holds several figures."""
    if key == "id":
        return f"{name}-{value}"
    if key.endswith("href"):
        return value.replace("#", f"#{name}-")
    return value.replace("url(#", f"url(#{name}-")
