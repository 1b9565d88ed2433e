"""Files → rows, one at a time: TSV, CSV, JSON lines and plain text, also as .gz.

A line that cannot be read stops everything with its file, its number and the reason, before any
training starts.
"""

import csv
import gzip
import itertools
import json
import zlib
from pathlib import Path

import numpy as np

SUFFIXES = (".tsv", ".csv", ".jsonl", ".txt")
SPLITS = {"train": ("train",), "val": ("val", "valid", "validation", "dev"), "test": ("test",)}


def read_pairs(path):
    """(source, target) of every row."""
    return (row for _, row in rows(path, ("source", "target")))


def read_labelled(path, class_names=None):
    """(text, label) of every row; without a header the label comes first.

    Args:
        class_names: the labels there may be; by default any.
    """
    for number, (label, text) in rows(path, ("label", "text")):
        if not label.strip():
            raise bad(path, number, f"a label must not be empty, got {label!r}")
        if class_names is not None and label not in class_names:
            rule = f"a label must be one of the {len(class_names)} classes"
            raise bad(path, number, f"{rule}, got {label!r}")
        yield text, label


def read_texts(path):
    """Documents: the texts of JSON lines, a column "text", or one plain text, block by block."""
    if suffix_of(path) == ".txt":
        return blocks(path)
    return (text for _, (text,) in rows(path, ("text",)))


def blocks(path, lines=2000):
    """A plain text in pieces of whole lines, so that it need not fit into memory."""
    numbered, empty = decoded(path, keep_ends=True), True
    while block := "".join(line for _, line in itertools.islice(numbered, lines)):
        empty = False
        yield block
    if empty:
        raise ValueError(f"{path}: a text file must hold text, got none")


def rows(path, columns):
    """(line number, strings of the named columns) of every row."""
    kind = suffix_of(path)
    if kind == ".txt":
        rule = f"{' and '.join(columns)} need a .tsv, .csv or .jsonl file"
        raise ValueError(f"{rule}, got {path}")
    found = {".jsonl": json_rows, ".csv": csv_rows, ".tsv": tsv_rows}[kind]
    empty = True
    for row in found(path, columns):
        empty = False
        yield row
    if empty:
        raise ValueError(f"{path}: a data file must have at least one row, got none")


def json_rows(path, columns):
    for number, line in decoded(path):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise bad(path, number, f"a line must be JSON, got {error}") from None
        if not isinstance(value, dict) or any(name not in value for name in columns):
            got = sorted(value) if isinstance(value, dict) else type(value).__name__
            raise bad(path, number, f"a line must have {' and '.join(columns)}, got {got}")
        yield number, tuple(json_cell(path, number, name, value[name]) for name in columns)


def json_cell(path, number, name, value):
    """A string, or a number as one; escapes can spell half a character, which no text has."""
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise bad(path, number, f"{name} must be a string, got {json.dumps(value)[:60]}")
    try:
        str(value).encode("utf-8")
    except UnicodeEncodeError:
        raise bad(path, number, f"{name} must be without lone surrogates, got one") from None
    return str(value)


def tsv_rows(path, columns):
    lines = ((number, line.split("\t")) for number, line in decoded(path) if line.strip())
    return table_rows(path, columns, lines)


def csv_rows(path, columns):
    texts = decoded(path, keep_ends=True)
    reader = csv.reader((line for _, line in texts), strict=True)

    def lines():
        try:
            for cells in reader:
                if cells:
                    yield reader.line_num, cells
        except csv.Error as error:
            raise bad(path, reader.line_num, f"a line must be CSV, got {error}") from None

    return table_rows(path, columns, lines())


def table_rows(path, columns, lines):
    """The first line is a header if it names the columns; else they stand in their order."""
    where = None
    for number, cells in lines:
        if where is None:
            names = [cell.strip().lower() for cell in cells]
            is_header = all(name in names for name in columns)
            where = [names.index(n) for n in columns] if is_header else range(len(columns))
            if is_header:
                continue
        if len(cells) <= max(where):
            got = f"{len(cells)} in {' '.join(cells)[:60]!r}"
            raise bad(path, number, f"a line must have {max(where) + 1} columns, got {got}")
        yield number, tuple(cells[i] for i in where)


def decoded(path, keep_ends=False):
    """(number, line) of a file in UTF-8, with either kind of line end."""
    opened = gzip.open if str(path).endswith(".gz") else open
    try:
        with opened(path, "rb") as file:
            for number, line in enumerate(file, 1):
                text = decode_line(path, number, line).replace("\r\n", "\n")
                yield number, text if keep_ends else text.rstrip("\n")
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: a .gz file must be whole, got {error}") from None


def decode_line(path, number, line):
    try:
        return line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        got = f"byte {line[error.start]:#x} at column {error.start}"
        raise bad(path, number, f"text must be UTF-8, got {got}") from None


def bad(path, number, reason):
    return ValueError(f"{path}, line {number}: {reason}")


def suffix_of(path):
    path = Path(path)
    suffix = Path(path.stem).suffix if path.suffix == ".gz" else path.suffix
    if suffix not in SUFFIXES:
        raise ValueError(f"a data file must end in {' '.join(SUFFIXES)} (or .gz), got {path.name}")
    return suffix


def load_splits(path, read, seed=0):
    """{"train": rows, "val": rows, "test": rows} of a folder, a file, or "hf:NAME".

    A folder has files named train, val and test. A single file is split: a plain text by place,
    90/10, as its parts belong together; anything else 90/5/5 by a fixed shuffle.

    Args:
        path: where the data are.
        read: `read_texts`, `read_labelled` or `read_pairs`.
    """
    if str(path).startswith("hf:"):
        return from_hugging_face(str(path)[3:], read)
    path = Path(path)
    if not path.exists():
        raise ValueError(f"data must be a file or a folder, got {path}, which is not there")
    if path.is_dir():
        return folder_splits(path, read)
    if read is read_texts and suffix_of(path) == ".txt":
        text = "".join(read(path))
        cut = int(len(text) * 0.9)
        return {"train": [text[:cut]], "val": [text[cut:]], "test": [text[cut:]]}
    return shuffled_splits(list(read(path)), path, seed)


def folder_splits(folder, read):
    """A class that training never shows cannot be learned: it is refused where it stands."""
    found = {name: find_split(folder, name) for name in SPLITS}
    out = {"train": list(read(found["train"]))}
    known = {}
    if read is read_labelled:
        known = {"class_names": {label for _, label in out["train"]}}
    return {**out, **{name: list(read(found[name], **known)) for name in ("val", "test")}}


def shuffled_splits(items, what, seed=0):
    """90 % train, 5 % val, 5 % test; items with the same first part stay together."""
    groups = {}
    for item in items:
        groups.setdefault(item[0] if isinstance(item, tuple) else item, []).append(item)
    if len(groups) < 3:
        raise ValueError(f"{what}: data must have at least 3 different rows, got {len(groups)}")
    order = np.random.default_rng(seed).permutation(len(groups))
    keys, share = list(groups), max(len(groups) // 20, 1)
    parts = {"test": order[:share], "val": order[share : 2 * share], "train": order[2 * share :]}
    return {name: [item for i in parts[name] for item in groups[keys[i]]] for name in SPLITS}


def find_split(folder, name):
    for stem in SPLITS[name]:
        for suffix in SUFFIXES:
            for ending in ("", ".gz"):
                if (found := folder / f"{stem}{suffix}{ending}").is_file():
                    return found
    got = ", ".join(sorted(p.name for p in folder.iterdir())[:10]) or "nothing"
    rule = f"a data folder must have a file {name} with {' '.join(SUFFIXES)} (or .gz)"
    raise ValueError(f"{rule}, got {got} in {folder}")


def from_hugging_face(name, read):
    """Splits of a data set that the `datasets` package finds, by its columns."""
    try:
        import datasets
    except ImportError:
        raise ValueError(f"hf:{name} needs the package datasets: pip install datasets") from None
    found, out = datasets.load_dataset(name), {}
    for split, spellings in SPLITS.items():
        key = next((s for s in spellings if s in found), None)
        if key is None:
            raise ValueError(f"hf:{name} must have a split {split}, got {sorted(found)}")
        out[split] = hugging_face_rows(name, found[key], read)
    return out


def hugging_face_rows(name, part, read):
    names = part.column_names
    if read is read_pairs and "translation" in names:
        return [tuple(pair.values()) for pair in part["translation"]]
    used = {read_texts: ("text",), read_labelled: ("text", "label")}.get(read, tuple(names[:2]))
    if missing := [column for column in used if column not in names]:
        raise ValueError(f"hf:{name} must have the columns {missing}, got {names}")
    rows = zip(*(part[column] for column in used), strict=True)
    return [row[0] if len(row) == 1 else row for row in rows]
