"""Files → rows: every format, and every way in which a file can be wrong (B32)."""

import gzip
import json
import sys
import types
from pathlib import Path

import pytest

from kformer.data import load_splits, read_labelled, read_pairs, read_texts

SHARED = Path(__file__).parent.parent.parent / "shared" / "data"
PAIRS = [("one", "uno"), ("two words", "dos palabras"), ("ñ “quoted”", "日本 \u202eשלום")]
TSV = "".join(f"{a}\t{b}\n" for a, b in PAIRS)
CSV = "".join(f'{a},"{b}"\n' for a, b in PAIRS)
JSONL = "".join(json.dumps({"source": a, "target": b, "more": 1}) + "\n" for a, b in PAIRS)


def write(path, content):
    """Text or bytes, through gzip if the name says so."""
    content = content.encode() if isinstance(content, str) else content
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


@pytest.mark.parametrize("ending", ["", ".gz"])
@pytest.mark.parametrize("suffix", ["tsv", "csv", "jsonl"])
def test_formats(tmp_path, suffix, ending):
    content = {"tsv": TSV, "csv": CSV, "jsonl": JSONL}[suffix]
    variants = {
        "plain": content,
        "crlf": content.replace("\n", "\r\n"),
        "bom": "\ufeff" + content,
        "no_end": content.rstrip("\n"),
        "blank": content.replace("\n", "\n\n"),
    }
    for name, text in variants.items():
        path = write(tmp_path / f"{name}.{suffix}{ending}", text)
        assert list(read_pairs(path)) == PAIRS, name
        assert list(read_pairs(str(path))) == PAIRS


@pytest.mark.parametrize(("suffix", "between"), [("tsv", "\t"), ("csv", ",")])
def test_headers_name_the_columns(tmp_path, suffix, between):
    header = between.join(["id", "Target", "source"]) + "\n"
    lines = "".join(between.join(["7", b, a]) + "\n" for a, b in PAIRS[:2])
    assert list(read_pairs(write(tmp_path / f"a.{suffix}", header + lines))) == PAIRS[:2]
    extra = "".join(between.join([a, b, "licence"]) + "\n" for a, b in PAIRS[:2])
    assert list(read_pairs(write(tmp_path / f"b.{suffix}", extra))) == PAIRS[:2]


def test_csv_cells_may_hold_lines_and_commas(tmp_path):
    path = write(tmp_path / "a.csv", '"a, ""b""\nc",d\n')
    assert list(read_pairs(path)) == [('a, "b"\nc', "d")]
    assert list(read_pairs(write(tmp_path / "b.tsv", '"a\tb"\n'))) == [('"a', 'b"')]  # no quoting


def test_labels_come_first_without_a_header(tmp_path):
    rows = [("play it", "music"), ("what time is it", "clock")]
    bare = write(tmp_path / "a.tsv", "".join(f"{label}\t{text}\n" for text, label in rows))
    named = write(tmp_path / "b.csv", "text,label\n" + "".join(f"{t},{c}\n" for t, c in rows))
    lines = (json.dumps({"text": text, "label": label}) for text, label in rows)
    for path in (bare, named, write(tmp_path / "c.jsonl", "\n".join(lines))):
        assert list(read_labelled(path)) == rows
    assert list(read_labelled(bare, class_names=["clock", "music"])) == rows
    with pytest.raises(ValueError, match=r"a\.tsv, line 2: .* of the 1 classes, got 'clock'"):
        list(read_labelled(bare, class_names=["music"]))
    number = write(tmp_path / "d.jsonl", '{"text": "a", "label": 3}')
    assert list(read_labelled(number)) == [("a", "3")]


def test_texts(tmp_path):
    play = "First Citizen:\r\nBefore we proceed\n\n" * 1500
    blocks = list(read_texts(write(tmp_path / "a.txt.gz", play)))
    assert len(blocks) == 3 and "".join(blocks) == play.replace("\r\n", "\n")
    assert all(block.endswith("\n") for block in blocks)
    assert list(read_texts(write(tmp_path / "b.txt", "\ufeffone"))) == ["one"]
    assert list(read_texts(write(tmp_path / "c.jsonl", '{"text": "a\\nb"}'))) == ["a\nb"]
    assert list(read_texts(write(tmp_path / "d.tsv", "id\ttext\n1\ta\n"))) == ["a"]


def test_files_are_read_as_they_are_asked_for(tmp_path):
    """A generator stops where it is: what comes later is not even decoded."""
    path = write(tmp_path / "a.tsv", b"a\tb\n" * 5000 + b"\xff\n")
    rows = read_pairs(path)
    assert [next(rows) for _ in range(5000)] == [("a", "b")] * 5000
    with pytest.raises(ValueError, match="line 5001: .*0xff at column 0"):
        next(rows)


WRONG = [
    (
        "a.tsv",
        b"a\tb\nc\t\xffd\n",
        r"a\.tsv, line 2: text must be UTF-8, got byte 0xff at column 2",
    ),
    ("a.tsv", "a\tb".encode("utf-16"), r"line 1: text must be UTF-8, got byte 0xff at column 0"),
    ("a.tsv", "a\tb\nalone\n", r"line 2: a line must have 2 columns, got 1 in 'alone'"),
    ("a.csv", "x,source,target\n1,a\n", r"line 2: a line must have 3 columns, got 2 in '1 a'"),
    ("a.csv", 'a,"b\n', r"line 1: a line must be CSV, got unexpected end of data"),
    ("a.tsv", "", r"a\.tsv: a data file must have at least one row, got none"),
    ("a.csv.gz", "\n\n", r"a\.csv\.gz: a data file must have at least one row, got none"),
    ("a.tsv", "source\ttarget\n", r"at least one row, got none"),
    ("a.jsonl", '{"source": "a", "target": "b"}\n{"source": "a"}', r"line 2: .*got \['source'\]"),
    ("a.jsonl", "[1]", r"line 1: a line must have source and target, got list"),
    ("a.jsonl", "{nonsense}", r"line 1: a line must be JSON, got Expecting"),
    ("a.jsonl", "[" * 100000, r"line 1: a line must be JSON, got "),
    ("a.jsonl", "9" * 5000, r"line 1: a line must be JSON, got Exceeds"),
    ("a.jsonl", '{"source": null, "target": "b"}', r"line 1: source must be a string, got null"),
    ("a.jsonl", '{"source": "a", "target": [1]}', r"line 1: target must be a string, got \[1\]"),
    ("a.jsonl", '{"source": "\\ud800", "target": ""}', r"line 1: source must be without lone"),
    ("a.txt", "text", r"source and target need a \.tsv, \.csv or \.jsonl file, got .*a\.txt"),
    ("a.parquet", "text", r"must end in \.tsv \.csv \.jsonl \.txt \(or \.gz\), got a\.parquet"),
]


@pytest.mark.parametrize(("name", "content", "message"), WRONG, ids=range(len(WRONG)))
def test_b32_a_bad_file_stops_with_its_line(tmp_path, name, content, message):
    with pytest.raises(ValueError, match=message):
        list(read_pairs(write(tmp_path / name, content)))


def test_b32_bad_texts_and_labels(tmp_path):
    with pytest.raises(ValueError, match=r"a\.txt: a text file must hold text, got none"):
        list(read_texts(write(tmp_path / "a.txt", "")))
    with pytest.raises(ValueError, match=r"b\.tsv, line 2: a label must not be empty, got ' '"):
        list(read_labelled(write(tmp_path / "b.tsv", "music\tplay\n \tstop\n")))
    with pytest.raises(ValueError, match=r"c\.tsv, line 1: a line must have 2 columns, got 1"):
        list(read_labelled(write(tmp_path / "c.tsv", "music\n")))


def test_b32_damaged_gz(tmp_path):
    whole = gzip.compress(TSV.encode() * 1000)
    damaged = {
        "cut": whole[:-9],
        "sum": whole[:-8] + bytes(8),
        "body": whole[:10] + b"\xff" * 8 + whole[18:],
        "none": TSV.encode(),
    }
    for name, content in damaged.items():
        path = tmp_path / f"{name}.tsv.gz"
        path.write_bytes(content)
        with pytest.raises(ValueError, match=rf"{name}\.tsv\.gz: a \.gz file must be whole, got "):
            list(read_pairs(path))


def test_one_line(tmp_path):
    path = write(tmp_path / "a.tsv", "a\tb")
    assert list(read_pairs(path)) == [("a", "b")]
    with pytest.raises(
        ValueError, match=r"a\.tsv: data must have at least 3 different rows, got 1"
    ):
        load_splits(path, read_pairs)


def test_splits_of_a_folder(tmp_path):
    write(tmp_path / "train.tsv", "x\ta\ny\tb\n")
    write(tmp_path / "dev.csv", "x,c\n")
    write(tmp_path / "test.jsonl.gz", '{"text": "d", "label": "y"}')
    expected = {"train": [("a", "x"), ("b", "y")], "val": [("c", "x")], "test": [("d", "y")]}
    assert load_splits(tmp_path, read_labelled) == expected
    assert load_splits(str(tmp_path), read_labelled) == expected
    write(tmp_path / "dev.csv", "x,c\nz,c\n")
    with pytest.raises(ValueError, match=r"dev\.csv, line 2: .* of the 2 classes, got 'z'"):
        load_splits(tmp_path, read_labelled)
    (tmp_path / "test.jsonl.gz").unlink()
    with pytest.raises(ValueError, match=r"a file test with .*, got dev\.csv, train\.tsv in "):
        load_splits(tmp_path, read_labelled)
    with pytest.raises(ValueError, match="got .*nowhere, which is not there"):
        load_splits(tmp_path / "nowhere", read_texts)


def test_splits_of_a_file(tmp_path):
    rows = [(f"text {i // 2}", f"label {i % 2}") for i in range(400)]
    path = write(tmp_path / "a.tsv", "".join(f"{label}\t{text}\n" for text, label in rows))
    splits = load_splits(path, read_labelled)
    assert splits == load_splits(path, read_labelled, seed=0)
    assert splits != load_splits(path, read_labelled, seed=1)
    assert {name: len(part) for name, part in splits.items()} == {
        "train": 360, "val": 20, "test": 20,
    }  # fmt: skip
    assert sorted(sum(splits.values(), [])) == sorted(rows)
    texts = {name: {text for text, _ in part} for name, part in splits.items()}
    assert not texts["train"] & (texts["val"] | texts["test"]), "the same text is in one split only"
    plain = load_splits(write(tmp_path / "a.txt", "0123456789" * 10), read_texts)
    assert plain["train"] == ["0123456789" * 9] and plain["val"] == plain["test"] == ["0123456789"]


class Part(dict):
    column_names = property(list)


def test_hugging_face(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match="hf:some/name needs the package datasets: pip install"):
        load_splits("hf:some/name", read_texts)
    part = Part(label=[1, 0], text=["a", "b"])
    sets = {"labels": {"train": part, "validation": part, "test": part}, "short": {"train": part}}
    pair = Part(translation=[{"en": "one", "es": "uno"}])
    sets["pairs"] = {"train": pair, "validation": pair, "test": pair}
    fake = types.SimpleNamespace(load_dataset=sets.__getitem__)
    monkeypatch.setitem(sys.modules, "datasets", fake)
    assert load_splits("hf:labels", read_labelled)["val"] == [("a", 1), ("b", 0)]
    assert load_splits("hf:labels", read_texts)["test"] == ["a", "b"]
    assert load_splits("hf:labels", read_pairs)["test"] == [(1, "a"), (0, "b")]
    assert load_splits("hf:pairs", read_pairs)["train"] == [("one", "uno")]
    with pytest.raises(ValueError, match=r"hf:short must have a split val, got \['train'\]"):
        load_splits("hf:short", read_texts)
    with pytest.raises(ValueError, match=r"the columns \['text', 'label'\], got \['translation'\]"):
        load_splits("hf:pairs", read_labelled)


@pytest.mark.skipif(not SHARED.is_dir(), reason=f"needs the data in {SHARED}")
def test_real_data():
    text, label = next(read_labelled(SHARED / "clinc150" / "train.tsv"))
    assert label == "translate" and text.startswith("what expression")
    splits = load_splits(SHARED / "clinc150", read_labelled)
    assert len({label for _, label in splits["train"]}) == 150
    source, target = next(read_pairs(SHARED / "tatoeba-eng-spa" / "train.tsv.gz"))
    assert source == "Everybody believes it." and target == "Todos lo creen."
    play = load_splits(SHARED / "tinyshakespeare" / "input.txt", read_texts)
    assert len(play["train"][0]) == int(0.9 * len(play["train"][0] + play["val"][0]))
