"""The page of `halfbyte report` in headless Chromium; without a browser all of this is skipped, and says so."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from halfbyte import reference
from halfbyte.formats import PackedWeight, get_format
from halfbyte.lab.report.explorer import K, N, example, explorer_data, families
from halfbyte.lab.report.tile import MMA, tile_data
from headless_chromium import Page, find_browser
from report_samples import code_bytes, make_report

pytest.importorskip("matplotlib")

BROWSER = find_browser()
if BROWSER is None:
    pytest.skip("no browser: Debian's package chromium, to look at the page", allow_module_level=True)
FORMATS = [each["key"] for each in explorer_data()]
EXPLORED = ("nf4-64", "fp4-64-nested", "q4_0", "q4_k", "mxfp4", "gptq-128", "awq-128")  # every order of nibbles

COUNTED = "JSON.parse(document.getElementById('tile-{}').dataset.counted)"
FOCUSED = "document.activeElement.id || document.activeElement.dataset.bit || document.activeElement.textContent"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_report(tmp_path_factory.mktemp("report"))


@pytest.fixture(scope="module")
def browser(report: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    assert BROWSER
    with Page(BROWSER, tmp_path_factory.mktemp("profile")) as page:
        page.size(1200, 900)
        page.open(report)
        yield page


@pytest.fixture
def page(browser: Page, report: Path) -> Page:
    """The page as it opens on a desktop, in the light scheme."""
    browser.size(1200, 900)
    browser.media()
    browser.open(report)
    return browser


def set_value(page: Page, name: str, value: object, event: str = "input") -> None:
    """What a person does who picks or types a value."""
    page.run(
        f"(() => {{ const it = document.getElementById('{name}'); it.value = {json.dumps(str(value))}; "
        f"it.dispatchEvent(new Event('{event}', {{bubbles: true}})); }})()"
    )


def press_tab(page: Page, shift: bool = False) -> str:
    page.press("Tab", 9, shift=shift)
    return str(page.run(FOCUSED))


class TestInChromium:
    def test_all_parts_are_there_and_nothing_complains(self, page: Page, report: Path) -> None:
        for name in ("results", "roofline", "time", "bandwidth", "proof", "explorer", "tile", "environment"):
            assert page.run(f"document.getElementById('{name}').getBoundingClientRect().height") > 0, name
        assert page.run("document.querySelectorAll('#results svg.plot').length") >= 14
        assert page.run("document.querySelectorAll('#proof svg.plot').length") == 2
        assert page.run("[...document.querySelectorAll('svg.plot')].every(each => each.getAttribute('aria-label'))")
        labels = "[...document.querySelectorAll('select, input')].every(each => each.labels.length === 1)"
        assert page.run(labels)
        assert page.console == []
        assert set(page.requests) == {report.resolve().as_uri()}

    @pytest.mark.parametrize("key", EXPLORED)
    def test_the_explorer_is_right_for_all_256_bytes(self, page: Page, key: str) -> None:
        """Every byte typed into the field at a place, against the example decoded whole with that byte in it."""
        set_value(page, "explorer-format", FORMATS.index(key), "change")
        index = 3
        set_value(page, "explorer-position", index)
        shown = page.run("""(() => {
            const field = document.getElementById("explorer-hex");
            return Array.from({length: 256}, (_, byte) => {
                field.value = byte.toString(16);
                field.dispatchEvent(new Event("input"));
                return [...document.querySelectorAll("#explorer-pair article")].map(each => ({...each.dataset}));
            });
        })()""")
        weight, place = example(get_format(key)), code_bytes(key)[index]
        octets = weight.codes.clone().view(torch.uint8).reshape(-1)
        scales, offsets, book = weight.scales(), weight.offsets(), weight.format.codebook
        order = ["high", "low"] if key[:3] in ("nf4", "fp4") else ["low", "high"]
        confused = 0
        for byte, cards in enumerate(shown):
            octets[place] = byte
            changed = octets.view(weight.codes.dtype).view(weight.codes.shape)
            decoded = PackedWeight(weight.format, (N, K), {**weight.parts, weight.format.layout.part: changed})
            codes, values = decoded.unpack(), decoded.dequantize()
            assert [card["half"] for card in cards] == order
            for card in cards:
                at = int(card["n"]), int(card["k"])
                block = (at[0] * K + at[1]) // weight.format.blocksize
                assert int(card["code"]) == codes[at]
                assert np.float32(card["entry"]) == np.float32(book[codes[at]])
                assert np.float32(card["value"]) == values[at]
                assert np.float32(card["scale"]) == scales[block]
                assert (card["offset"] == "") if offsets is None else (np.float32(card["offset"]) == offsets[block])
            swapped = reference.swap_nibbles(decoded).unpack()
            confused += all(int(card["code"]) == swapped[int(card["n"]), int(card["k"])] for card in cards)
        assert confused == 16  # a reference with the halves swapped agrees where both are equal, nowhere else
        assert page.console == []

    def test_every_format_and_place_can_be_chosen(self, page: Page) -> None:
        seen = page.run("""(() => {
            const [format, place] = ["explorer-format", "explorer-position"].map(id => document.getElementById(id));
            return Array.from(format.options, (option) => {
                format.value = option.value;
                format.dispatchEvent(new Event("change"));
                return Array.from({length: Number(place.max) + 1}, (_, index) => {
                    place.value = index;
                    place.dispatchEvent(new Event("input"));
                    return [...document.querySelectorAll("#explorer-pair article")].map(
                        ({dataset}) => [dataset.n, dataset.k, dataset.value].map(Number));
                });
            });
        })()""")
        assert len(seen) == len(FORMATS)
        for key, places in zip(FORMATS, seen, strict=True):
            values = example(get_format(key)).dequantize()
            assert len(places) == len(code_bytes(key))
            for n, k, value in (nibble for place in places for nibble in place):
                assert np.float32(value) == values[n, k], (key, n, k)

    def test_bits_by_keyboard(self, page: Page) -> None:
        set_value(page, "explorer-hex", "00")
        byte = "document.getElementById('explorer-hex').value"
        page.run("document.querySelector('[data-bit=\"7\"]').focus()")
        page.press(" ", 32, " ")
        assert page.run(byte) == "80"
        assert page.run("document.activeElement.getAttribute('aria-pressed')") == "true"
        page.press("ArrowRight", 39)
        page.press("Enter", 13, "\r")
        assert page.run(byte) == "C0"
        page.press("End", 35)
        page.press("1", 49, "1")
        page.press("1", 49, "1")
        assert page.run(byte) == "C1"
        page.press("Home", 36)
        page.press("ArrowLeft", 37)
        page.press("0", 48, "0")
        assert page.run(byte) == "41"
        assert "0x41" in page.run("document.getElementById('explorer-said').textContent")
        assert page.run("document.getElementById('explorer-said').ariaLive") == "polite"

    def test_the_field_by_keyboard(self, page: Page) -> None:
        field = "document.getElementById('explorer-hex')"
        page.run(f"{field}.focus(); {field}.select()")
        for key in "f0":
            page.press(key, ord(key.upper()), key)
        assert page.run("document.querySelector('#explorer-pair [data-half=high]').dataset.code") == "15"
        page.press("ArrowDown", 40)
        assert page.run(f"{field}.value") == "EF"
        page.run(f"{field}.select()")
        page.press("z", 90, "z")
        assert page.run(f"{field}.getAttribute('aria-invalid')") == "true"
        press_tab(page)
        assert page.run(f"{field}.value") == "EF"
        assert page.run(f"{field}.getAttribute('aria-invalid')") is None

    def test_tab_reaches_every_control_and_the_focus_shows(self, page: Page) -> None:
        wanted = set(page.run("[...document.querySelectorAll('main [id]:is(select, input, button)')]"
                              ".filter(it => !it.disabled && it.offsetParent).map(it => it.id)"))  # fmt: skip
        assert len(wanted) >= 12
        assert press_tab(page) == "Skip to the content"
        reached = set()
        for _ in range(150):
            reached.add(press_tab(page))
            outline = page.run("getComputedStyle(document.activeElement).outlineStyle")
            if page.run("document.activeElement === document.body"):
                break
            assert outline == "solid", page.run(FOCUSED)
        assert wanted <= reached
        assert "7" in reached  # the bits: one stop for all eight
        assert not {"6", "5", "4", "3", "2", "1", "0"} & reached

    def test_steps_by_keyboard(self, page: Page) -> None:
        current = "[...document.querySelectorAll('#tile-steps > li')].findIndex(it => it.ariaCurrent === 'step')"
        visible = "[...document.querySelectorAll('#tile-steps .body')].filter(it => it.offsetHeight > 0).length"
        page.run("document.querySelector('#tile-steps button').focus()")
        assert (page.run(current), page.run(visible)) == (0, 1)
        page.press("ArrowDown", 40)
        page.press("ArrowDown", 40)
        assert page.run(current) == 2
        assert page.run("document.activeElement.getAttribute('aria-expanded')") == "true"
        page.press("End", 35)
        assert page.run(current) == 7
        assert page.run("document.getElementById('tile-next').disabled") is True
        page.run("document.getElementById('tile-back').focus()")
        page.press("Enter", 13, "\r")
        assert page.run(current) == 6
        assert page.run("document.getElementById('tile-where').textContent").startswith("Step 7 of 8: Each block")

    def test_the_tile_counts_what_the_formats_take(self, page: Page) -> None:
        draw = random.Random(1)
        tile = tile_data([])
        for index, family in enumerate(tile["families"]):
            set_value(page, "tile-family", index, "change")
            for number in range(len(family["formats"])):
                described = family["formats"][number]
                format = get_format(described["key"])
                m, n, k = (draw.randrange(1, 300), draw.randrange(1, 40) * described["n_multiple"],
                           draw.randrange(1, 40) * described["k_multiple"])  # fmt: skip
                tile_rows = draw.choice(tile["tile_rows"])
                for name, value in (("M", m), ("N", n), ("K", k)):
                    set_value(page, f"tile-{name}", value)
                set_value(page, "tile-rows", tile_rows, "change")
                set_value(page, "tile-blocksize", number, "change")
                rows = min(n, tile_rows)
                counted = page.run(COUNTED.format("steps"))
                packed = packed_bytes(format.parts(rows, k))
                blocks = sum(len({(r * k + c) // format.blocksize for c in range(k)}) for r in range(rows))
                assert counted == {
                    "rows": rows, "weights": rows * k, "code_bytes": -(-rows * k // 2), "packed_bytes": packed,
                    "scale_bytes": packed - -(-rows * k // 2), "dense_bytes": 2 * rows * k, "x_bytes": 2 * m * k,
                    "out_bytes": 2 * m * rows, "sum_bytes": 4 * m * rows, "tiles": -(-n // tile_rows),
                    "mma": -(-rows // MMA["m"]) * -(-m // MMA["n"]) * -(-k // MMA["k"]),
                    "multiply_adds": m * rows * k, "fill": m / (-(-m // 8) * 8), "scale_steps": blocks * m,
                }  # fmt: skip
                layer = page.run(COUNTED.format("layer"))
                assert layer["packed"] == packed_bytes(format.parts(n, k))
                assert layer["dense"] == 2 * n * k
                assert page.run("document.getElementById('tile-offset').hidden") is (format.offset is None)
        assert page.console == []

    def test_the_whole_layers_time_is_bytes_over_bandwidth(self, page: Page) -> None:
        set_value(page, "tile-M", 4)
        seconds = page.run(COUNTED.format("layer"))["seconds"]
        bandwidth = page.run("DATA.tile.memories[0].tb_per_s") * 1e12
        moved = 2 * 4 * (4096 + 4096)
        assert seconds == pytest.approx(
            [(4096 * 4096 * 9 / 16 + moved) / bandwidth, (4096 * 4096 * 2 + moved) / bandwidth]
        )
        assert "H200" in page.run("DATA.tile.memories[0].name")
        bound = "document.getElementById('tile-bound').textContent"
        assert "memory is the bound" in page.run(bound)
        set_value(page, "tile-M", 8192)  # 2 · 8192 · 4096² FLOP at 989 TFLOP/s
        assert "278 µs, a 16-bit one 278 µs: 1.00 times as long" in page.run(bound)
        assert "that is the bound, not memory" in page.run(bound)

    def test_sizes_that_cannot_be_are_refused(self, page: Page) -> None:
        error = "document.getElementById('tile-error').textContent"
        set_value(page, "tile-M", "0")
        assert "M must be a whole number from 1 to 65,536" in page.run(error)
        assert page.run("document.getElementById('tile-body').hidden") is True
        set_value(page, "tile-M", "1")
        assert page.run(error) == ""
        set_value(page, "tile-family", list(families()).index("Q4_K"), "change")
        set_value(page, "tile-K", "4097")
        assert page.run(error) == "q4_k: K must be a multiple of 256."
        assert page.run("document.getElementById('tile-K').getAttribute('aria-invalid')") == "true"

    @pytest.mark.parametrize("width", [320, 360, 412])
    def test_a_phone_needs_no_scrolling_sideways(self, page: Page, report: Path, width: int) -> None:
        page.size(width, 740, phone=True)
        page.open(report)
        for key in range(len(FORMATS)):
            set_value(page, "explorer-format", key, "change")
            assert page.run("[document.documentElement.scrollWidth, innerWidth]") == [width, width]
        smallest = page.run("""Math.min(...[...document.querySelectorAll(":is(#results, #proof) svg.plot text")]
            .map(it => parseFloat(getComputedStyle(it).fontSize) * it.ownerSVGElement.clientWidth
                       / it.ownerSVGElement.viewBox.baseVal.width))""")
        assert smallest >= 7.5  # CSS pixels, at twice or three times as many of the screen's
        targets = page.run("[...document.querySelectorAll('main button, main select, main input[id]')]"
                           ".filter(it => it.offsetParent).map(it => it.getBoundingClientRect().height)")  # fmt: skip
        assert min(targets) >= 24  # WCAG 2.2, target size

    @pytest.mark.parametrize("scheme", ["light", "dark"])
    def test_colours_can_be_read(self, page: Page, scheme: str) -> None:
        page.media(scheme)
        names = [
            *("paper", "panel", "ink", "faint", "accent", "focus", "high", "low"),
            *(f"series-{i}" for i in range(10)),
        ]
        found = page.run(f"""{json.dumps(names)}.map(name => getComputedStyle(document.documentElement)
            .getPropertyValue("--" + name).trim())""")
        colours = dict(zip(names, map(luminance, found), strict=True))
        assert (colours["paper"] > colours["ink"]) == (scheme == "light")
        for ground in ("paper", "panel"):
            for text in ("ink", "faint", "high", "low"):
                assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground)
        for line in names[4:]:
            assert contrast(colours[line], colours["paper"]) >= 3, line

    def test_printed_all_steps_are_there_on_white(self, page: Page) -> None:
        page.media("dark", "print")
        assert page.run("[...document.querySelectorAll('#tile-steps .body')].every(it => it.offsetHeight > 0)")
        assert page.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        assert page.run("document.querySelector('nav').offsetHeight") == 0
        printed = page.pdf()
        assert printed.startswith(b"%PDF")
        assert len(printed) > 50_000

    def test_screenshots(self, page: Page, report: Path, tmp_path: Path) -> None:
        """Light, dark and phone; kept by pytest for whoever wants to look."""
        from matplotlib.image import imread

        means = {}
        for name, scheme, width in (("light", "light", 1200), ("dark", "dark", 1200), ("phone", "light", 360)):
            page.media(scheme)
            page.size(width, 900, phone=width < 1000)
            page.open(report)
            page.run("document.getElementById('time').scrollIntoView({behavior: 'instant'})")
            page.screenshot(tmp_path / f"{name}.png")
            pixels = imread(tmp_path / f"{name}.png")[:, :, :3]
            means[name] = float(pixels.mean())
            assert len(np.unique((pixels * 255).astype(np.int64) @ [65536, 256, 1])) > 20, (
                name
            )  # text and lines in colours
        assert means["light"] > 0.85
        assert means["phone"] > 0.85
        assert means["dark"] < 0.25


def packed_bytes(parts: dict[str, Any]) -> int:
    """Of all tensors that a format's weight has."""
    return sum(
        int(np.prod(part.shape)) * torch.empty(0, dtype=part.dtypes[0]).element_size() for part in parts.values()
    )


def luminance(colour: str) -> float:
    """Relative luminance of "#rrggbb", as WCAG 2 defines it."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(first: float, second: float) -> float:
    """Contrast ratio of two luminances, as WCAG 2 defines it."""
    return (max(first, second) + 0.05) / (min(first, second) + 0.05)
