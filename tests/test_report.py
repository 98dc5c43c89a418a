"""`halfbyte report`: its numbers against the package, and against GGUF's and bitsandbytes' own decoding; bad input."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import quants
from gguf.constants import GGMLQuantizationType
from typer.testing import CliRunner

from halfbyte import cli
from halfbyte.formats import FAMILIES, PackedWeight, get_format
from halfbyte.lab import prove as prove_module
from halfbyte.lab.report import write_report
from halfbyte.lab.report.explorer import K, N, example, explorer_data, families
from halfbyte.lab.report.page import _embedded
from halfbyte.lab.report.plots import bandwidth_groups, error_group, roofline_groups, time_groups
from halfbyte.lab.report.proof import read_proof
from halfbyte.lab.report.rows import SUITES, latest, read_rows
from halfbyte.lab.report.tables import speedups
from halfbyte.lab.report.tile import bits_per_weight, memories, multiples, part_sizes
from kernel_samples import KEYS
from kernel_samples import multiples as known_multiples
from report_samples import RESULTS, code_bytes, ladder, make_proof, make_report, row, write_rows

pytest.importorskip("matplotlib")

FORMATS = {each["key"]: each for each in explorer_data()}


class Elements(HTMLParser):
    """The start tags of a page, and the text inside of scripts and tables."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))

    def values(self, attribute: str) -> list[str]:
        return [attributes[attribute] for _, attributes in self.tags if attribute in attributes]


@pytest.fixture(scope="module")
def proof(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_proof(tmp_path_factory.mktemp("proof"))


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_report(tmp_path_factory.mktemp("report"))


class TestRows:
    def test_the_repositorys_files_are_read_whole(self) -> None:
        assert RESULTS
        lines = sum(len(file.read_text().splitlines()) for file in RESULTS)
        assert len(read_rows(RESULTS)) == lines

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ('{"suite": ', "rows.jsonl, line 2 is not JSON"),
            ("[1]", "line 2 holds list, where a row is a JSON object"),
            (row(suite="leanear"), "line 2 is of an unknown suite 'leanear'; known: linear, "),
            ("{}", "unknown suite None"),
            ({"suite": ["linear"]}, "unknown suite"),
            ({name: value for name, value in row().items() if name != "us"}, "'linear' without the field 'us'"),
            (row(us="fast"), "'us' must be a number above 0, got 'fast'"),
            (row(us=float("nan")), "'us' must be a number above 0"),
            (row(M=True), "'M' must be a number above 0"),
            (row(kernel=3), "'kernel' must be a text"),
            (row(suite="ladder"), "'ladder' without the field 'rung'"),
        ],
    )
    def test_a_bad_row_is_named(self, tmp_path: Path, line: object, message: str) -> None:
        file = write_rows(tmp_path / "rows.jsonl", row(), line)
        with pytest.raises(ValueError, match=message):
            read_rows([file])

    def test_a_file_that_is_not_there_or_no_text(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match=r"none\.jsonl: no such file of rows"):
            read_rows([tmp_path / "none.jsonl"])
        (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
        with pytest.raises(ValueError, match=r"binary\.jsonl is not a JSONL file"):
            read_rows([tmp_path / "binary.jsonl"])

    def test_of_one_thing_the_last_measurement_counts(self) -> None:
        first, later, other = row(us=1), row(us=2, date="2026-02-01T00:00:00+00:00"), row(M=2)
        assert latest([later, first, other]) == [later, other]
        assert latest([first, first | {"us": 9}])[0]["us"] == 9
        served = [row(suite="serve", layers=layers) for layers in (8, 32)]
        assert latest(served) == served, "a model cut to fewer layers is another"
        served = [row(suite="serve", adapters=8), row(suite="serve", adapters=8, adapters_in_use=0)]
        assert latest(served) == served, "adapters that nobody asks for cost something else"

    def test_every_suite_that_the_lab_writes_is_known(self) -> None:
        written = {"linear", "linear-warm", "overhead", "nf4-16", "nf4-16-case", "serve", "ladder", "prove", "layer"}
        assert written <= set(SUITES)


class TestFigures:
    def test_speedups_are_geometric_means_of_one_run(self) -> None:
        late = {"date": "2026-03-01T00:00:00+00:00"}
        rows = [
            row(us=2), row(us=8, kernel="cublas 1", format="bf16"), row(us=5, kernel="bitsandbytes 1"),
            row(us=2, N=64), row(us=4, N=64, kernel="cublas 1", format="bf16"),
            row(us=1, N=32), row(us=100, N=32, kernel="cublas 1", format="bf16", **late),  # of another run
            row(us=7, kernel="bitsandbytes 1", format="nf4-64-nested"), row(us=3, format="nf4-64-nested"),
        ]  # fmt: skip
        (table,) = speedups(rows)
        assert table.columns == ["halfbyte's", "peer", "M = 1"]
        ours = "halfbyte codebook_mma, nf4-64"
        assert table.rows == [
            [ours, "cublas 1", "2.83 (2)"],
            [ours, "bitsandbytes 1, nf4-64", "2.50 (1)"],
            [f"{ours}-nested", "cublas 1", "2.67 (1)"],
            [f"{ours}-nested", "bitsandbytes 1, nf4-64-nested", "2.33 (1)"],
        ]

    def test_time_has_a_figure_for_each_shape_with_several_m_and_its_floor(self) -> None:
        rows = [row(M=m, N=n, us=m + n) for n in (128, 256) for m in (1, 4)] + [row(N=512)]
        (group,) = time_groups([*rows, row(kernel="cublas 1", format="bf16", us=50)])
        assert [plot.title for plot in group.plots] == ["N × K = 128 × 256", "N × K = 256 × 256"]
        assert [key.label for key in group.legend[:2]] == ["halfbyte codebook_mma, nf4-64", "cublas 1"]
        assert "nf4-64: 129.0 at M = 1, 132.0 at M = 4; cublas 1: 50.0 at M = 1; floor: 0.0." in group.plots[0].svg

    def test_roofline_quotes_a_card_it_knows_and_says_where_it_knows_none(self) -> None:
        (known,) = roofline_groups([row(), row(M=8)])
        assert any("989 TFLOP/s" in line and "not measured" in line for line in known.about)
        (unknown,) = roofline_groups([row(device="some CPU"), row(device="some CPU", M=8)])
        assert any("No roof of arithmetic" in line for line in unknown.about)
        assert roofline_groups([row()]) == []

    def test_many_series_look_different(self) -> None:
        rows = [row(kernel=f"peer {i}", M=m, adapters=i % 2, rank=8) for i in range(25) for m in (1, 2)]
        legend = time_groups(rows)[0].legend
        assert len({(key.colour, key.sign) for key in legend}) == len(legend) == 25
        assert legend[1].label == "peer 1, nf4-64, 1 adapters of rank 8"

    def test_bandwidth_has_the_l2_and_the_ceilings(self) -> None:
        (group,) = bandwidth_groups(ladder())
        assert [key.label for key in group.legend] == ["fp16", "cuBLAS fp16"]
        assert len(group.plots) == 2
        for plot in group.plots:
            assert "L2, 50 MiB" in plot.svg
            assert ">read<" in plot.svg
            assert ">copy<" in plot.svg
        assert "fp16 at most 3.00, at 4 MiB" in group.plots[0].svg

    def test_figures_have_the_pages_colours_alone(self) -> None:
        for plot in bandwidth_groups(ladder())[0].plots:
            assert "var(--series-1)" in plot.svg
            assert "var(--ink)" in plot.svg
            assert "#0" not in plot.svg.replace("#bandwidth0", "")


class TestExplorerData:
    def test_every_family_is_there(self) -> None:
        assert {get_format(key).name for key in FORMATS} == {get_format(name).name for name in FAMILIES}
        assert {"nf4-64-nested", "fp4-64-nested"} <= FORMATS.keys()

    @pytest.mark.parametrize("key", FORMATS)
    def test_bytes_mean_what_the_package_says(self, key: str) -> None:
        """Random bytes put into the example, decoded whole, against the tables that the page looks up."""
        shown, weight = FORMATS[key], example(get_format(key))
        octets = weight.codes.clone().view(torch.uint8).reshape(-1)
        draw = random.Random(0)
        chosen = {}
        places = code_bytes(key)
        for index, place in enumerate(places):
            chosen[index] = octets[place] = draw.randrange(256)
        changed = octets.view(weight.codes.dtype).view(weight.codes.shape)
        decoded = PackedWeight(weight.format, (N, K), {**weight.parts, weight.format.layout.part: changed})
        codes, values, scales, offsets = decoded.unpack(), decoded.dequantize(), decoded.scales(), decoded.offsets()
        assert len(shown["positions"]) == len(places)
        for index, position in enumerate(shown["positions"]):
            first, second = position["nibbles"]
            assert (first["n"], first["k"]) < (second["n"], second["k"])
            for nibble in position["nibbles"]:
                code = int(shown["codes"][nibble["half"]][chosen[index]], 16)
                block = shown["blocks"][str(nibble["block"])]
                at = nibble["n"], nibble["k"]
                assert code == codes[at]
                assert np.float32(block["values"][code]) == values[at]
                assert np.float32(block["scale"]) == scales[nibble["block"]]
                assert (
                    block["offset"] is None
                    if offsets is None
                    else np.float32(block["offset"]) == offsets[nibble["block"]]
                )
                assert eval(nibble["expression"], {"byte": chosen[index]}) == code
                if nibble["word"]:
                    word = int.from_bytes(octets[places[index] // 4 * 4 :][:4].tolist(), "little")
                    assert eval(nibble["word"], {"word": word}) == code

    @pytest.mark.parametrize(
        ("key", "kind"),
        [("q4_0", "Q4_0"), ("q4_1", "Q4_1"), ("q4_k", "Q4_K"), ("iq4_nl", "IQ4_NL"), ("mxfp4_gguf", "MXFP4")],
    )
    def test_against_ggufs_own_decoding(self, key: str, kind: str) -> None:
        theirs = quants.dequantize(example(get_format(key)).codes.numpy(), GGMLQuantizationType[kind])
        for nibble, value in shown_values(FORMATS[key]):
            assert value == pytest.approx(theirs[nibble["n"], nibble["k"]], rel=1e-6, abs=1e-9)

    @pytest.mark.parametrize("key", ["nf4-64", "fp4-64"])
    def test_against_bitsandbytes_own_decoding(self, key: str) -> None:
        functional = pytest.importorskip("bitsandbytes").functional
        weight = example(get_format(key))
        state = functional.QuantState(
            absmax=weight.parts["absmax"], shape=torch.Size((N, K)), dtype=torch.float32, blocksize=64,
            quant_type=key[:3], code=torch.tensor(weight.format.codebook),
        )  # fmt: skip
        theirs = functional.dequantize_4bit(weight.codes.view(-1, 1), state)
        for nibble, value in shown_values(FORMATS[key]):
            assert value == pytest.approx(float(theirs[nibble["n"], nibble["k"]]), rel=1e-6)


def shown_values(shown: dict[str, Any]) -> Iterator[tuple[dict[str, Any], float]]:
    """Each nibble of the example's own bytes with the value that the page shows for it."""
    for position in shown["positions"]:
        for nibble in position["nibbles"]:
            code = int(shown["codes"][nibble["half"]][position["byte"]], 16)
            yield nibble, shown["blocks"][str(nibble["block"])]["values"][code]


class TestTileData:
    @pytest.mark.parametrize("key", [key for keys in families().values() for key in keys])
    def test_bytes_of_parts_are_the_formats(self, key: str) -> None:
        format = get_format(key)
        n_step, k_step = multiples(format)
        draw = random.Random(key)
        for _ in range(20):
            n, k = draw.randrange(1, 60) * n_step, draw.randrange(1, 60) * k_step
            wanted = {
                name: int(np.prod(part.shape)) * torch.empty(0, dtype=part.dtypes[0]).element_size()
                for name, part in format.parts(n, k).items()
            }
            assert {part["name"]: bytes_of(part, n, k) for part in part_sizes(format)} == wanted

    def test_multiples_and_bits(self) -> None:
        for key in KEYS:
            if key != "gptq_v2-40":
                assert multiples(get_format(key)) == known_multiples(key)
        bits = {key: bits_per_weight(get_format(key)) for key in ("nf4-64", "q4_1", "mxfp4", "gptq-128")}
        assert bits == {"nf4-64": 4.5, "q4_1": 5, "mxfp4": 4.25, "gptq-128": 4 + 20 / 128}  # docs/formats.md

    def test_memories_are_measured_or_say_that_they_are_quoted(self) -> None:
        cpu = row(device="a CPU", arch="AVX2", ceiling_tb_per_s=0.03)
        first, second, *others = memories([cpu, row(), row(ceiling_tb_per_s=4.2), row(ceiling_tb_per_s=4.4)])
        assert first == {"name": "NVIDIA H200, read ceiling measured", "tb_per_s": 4.2, "tflops": 989}
        assert second == {"name": "a CPU, read ceiling measured", "tb_per_s": 0.03, "tflops": None}
        assert all(each["name"].endswith("quoted") for each in others)


def bytes_of(part: dict[str, Any], n: int, k: int) -> int:
    return int(part["fixed"] + part["bytes"] * -(-n * k // part["weights"]))


class TestProof:
    def test_shows_what_the_terminal_shows(self, proof: Path) -> None:
        shown = read_proof(proof, 0)
        assert shown.inside
        assert "2 layers, within the contract" in shown.verdict
        document = json.loads(proof.read_text())
        names = [layer["name"] for layer in document["layers"]]
        worst = next(table for table in shown.tables if "worst layers" in table.title)
        assert {cells[0] for cells in worst.rows} == set(names)
        assert [group.title for group in shown.groups][:1] == ["Every layer"]
        assert len(shown.groups) == 2

    def test_an_outside_layer_is_told(self, proof: Path, tmp_path: Path) -> None:
        document = json.loads(proof.read_text())
        document["layers"][0]["ok"] = False
        document["layers"][0]["halfbyte"]["over_limit"]["bf16"] = 1.7
        document["summary"] = prove_module.summarise(document)
        file = tmp_path / "outside.json"
        file.write_text(json.dumps(document))
        shown = read_proof(file, 0)
        assert not shown.inside
        assert "OUTSIDE the contract: layers.0.proj.weight" in shown.verdict
        assert "1.700" in error_group(document, "x").plots[0].svg

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda text: text[:-9], "is not JSON"),
            (lambda text: "[]", "is not a document of halfbyte prove"),
            (lambda text: '{"run": {}, "layers": []}', "unfinished run"),
            (lambda text: text.replace('"schema": 1', '"schema": 7'), "schema 7"),
            (lambda text: text.replace('"over_limit"', '"over"'), "no whole document of halfbyte prove: KeyError"),
            (lambda text: text.replace('"us": ', '"us": -'), "'us' must be a number above 0"),
        ],
    )
    def test_other_files_are_refused(self, proof: Path, tmp_path: Path, change: Any, message: str) -> None:
        file = tmp_path / "proof.json"
        file.write_text(change(proof.read_text()))
        with pytest.raises(ValueError, match=message):
            read_proof(file, 0)

    def test_a_file_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match="halfbyte prove MODEL --out"):
            read_proof(tmp_path / "none.json", 0)


class TestThePage:
    def test_loads_nothing_and_names_things_once(self, report: Path) -> None:
        page = Elements(report.read_text())
        for attribute in ("src", "href", "action", "srcset", "poster"):
            assert all(value.startswith("#") for value in page.values(attribute)), attribute
        assert not {"link", "img", "iframe", "object", "embed"} & {tag for tag, _ in page.tags}
        assert "@import" not in report.read_text()
        ids = page.values("id")
        assert len(ids) == len(set(ids))
        for target in page.values("href"):
            assert target[1:] in ids
        policy = next(attributes["content"] for tag, attributes in page.tags if "http-equiv" in attributes)
        assert policy.startswith("default-src 'none'")

    def test_says_what_is_not_there(self, tmp_path: Path, report: Path) -> None:
        write_report(tmp_path / "empty.html", [])
        empty = (tmp_path / "empty.html").read_text()
        for words in ("No files of rows were given", "No rows of suite <code>ladder</code>", "No proof was given"):
            assert words in empty
            assert words not in report.read_text()

    def test_what_rows_hold_is_text(self, tmp_path: Path) -> None:
        wicked = "</script><script>alert(1)</script><b>&"
        file = write_rows(tmp_path / "rows.jsonl", *(row(device=wicked, kernel=wicked, M=m) for m in (1, 2)))
        write_report(tmp_path / "page.html", [file], title=wicked)
        page = Elements((tmp_path / "page.html").read_text())
        assert [tag for tag, _ in page.tags].count("script") == 2
        assert json.loads(_embedded({"name": wicked})) == {"name": wicked}

    def test_a_failure_leaves_the_earlier_page_and_nothing_else(self, tmp_path: Path, monkeypatch: Any) -> None:
        out = tmp_path / "page.html"
        out.write_text("earlier")
        with pytest.raises(ValueError, match="unknown suite"):
            write_report(out, [write_rows(tmp_path / "rows.jsonl", row(suite="x"))])

        def full(*_: object) -> None:
            raise OSError("no space left")

        monkeypatch.setattr("halfbyte.lab.report.page.os.replace", full)
        with pytest.raises(OSError, match="no space left"):
            write_report(out, [])
        assert out.read_text() == "earlier"
        assert sorted(file.name for file in tmp_path.iterdir()) == ["page.html", "rows.jsonl"]

    def test_without_matplotlib_it_says_what_to_install(self, tmp_path: Path, monkeypatch: Any) -> None:
        monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
        with pytest.raises(ModuleNotFoundError, match=r"pip install 'halfbyte\[report\]'"):
            write_report(tmp_path / "page.html", [write_rows(tmp_path / "rows.jsonl", row(), row(M=2))])
        assert write_report(tmp_path / "page.html", []).figures == 0


class TestTheCommand:
    def test_reads_the_folder_of_results_by_default(self, tmp_path: Path, monkeypatch: Any, proof: Path) -> None:
        (tmp_path / "benchmarks" / "results").mkdir(parents=True)
        write_rows(tmp_path / "benchmarks" / "results" / "a.jsonl", row(), row(M=2))
        monkeypatch.chdir(tmp_path)
        words = ["report", "--proof", str(proof), "--json"]
        result = CliRunner().invoke(cli.app, words, catch_exceptions=False)
        summary = json.loads(result.stdout)
        assert summary["rows"] == 2
        assert summary["proofs"] == 1
        assert summary["bytes"] == (tmp_path / "report.html").stat().st_size

    def test_mistakes_are_one_line(self, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
        file = write_rows(tmp_path / "rows.jsonl", row(suite="nonsense"))
        for words in ([str(file)], [str(tmp_path / "none.jsonl")], ["--out", str(tmp_path)]):
            monkeypatch.setattr("sys.argv", ["halfbyte", "report", *words])
            with pytest.raises(SystemExit) as stopped:
                cli.main()
            assert stopped.value.code == 1
            assert "Traceback" not in capsys.readouterr().err
