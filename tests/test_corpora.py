"""Corpora that need no download: nothing crosses between splits, and answers are exact."""

import collections
import datetime
import decimal
import hashlib
import itertools
import os
import re
import subprocess
import sys

import babel
import pytest

from kformer.text import corpora
from kformer.text.corpora import docstrings_by_package, documentation, written_out

SMALL = {"train": 3000, "val": 200, "test": 200}
AMOUNTS = ["0.01", "0.10", "1.00", "1.01", "2.00", "5.00", "12.34", "1000.00", "1234.56"]
NUMBERS = ["1", "1.1", "1.5", "1.25", "2", "5", "21", "22", "100", "123.4", "999.99", "1000"]
NUMBERS += ["1001", "1234", "1234.5", "1234.56", "12345", "99999.99"]


@pytest.fixture(scope="module")
def pairs():
    return written_out(SMALL)


def texts_of(split):
    return {item[0] if isinstance(item, tuple) else item for item in split}


def assert_apart(splits):
    """No text twice, in one split or in two."""
    assert list(splits) == ["train", "val", "test"]
    for name, items in splits.items():
        assert len(texts_of(items)) == len(items), name
    for one, other in itertools.combinations(splits.values(), 2):
        assert not texts_of(one) & texts_of(other)


def test_documentation():
    splits = documentation()
    assert_apart(splits)
    texts = [text for items in splits.values() for text in items]
    size = sum(len(text) for text in texts)
    assert size >= 1_500_000
    assert min(len(text) for text in texts) >= 40
    for name in ("val", "test"):
        assert 0.04 < len(splits[name]) / len(texts) < 0.06
    assert any("assert_stmt" in text for text in texts), "the topics of help()"
    assert not any(text.startswith((" ", "\n")) or text.endswith("\n") for text in texts)
    "".join(texts).encode("utf-8")  # no lone surrogate


def digest(corpus):
    return hashlib.sha256(repr(corpus).encode("utf-8")).hexdigest()


def test_the_library_is_read_not_imported():
    """A new process, with strings hashed anew, finds the same and has not loaded what it read."""
    code = (
        "import hashlib, importlib.util, sys\n"
        "spec = importlib.util.spec_from_file_location('corpora', sys.argv[1])\n"
        "module = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n"
        "found = repr(module.documentation()).encode('utf-8')\n"
        "loaded = [m for m in ('antigravity', 'this', 'tkinter', 'babel') if m in sys.modules]\n"
        "print(hashlib.sha256(found).hexdigest(), loaded)"
    )
    command = [sys.executable, "-W", "error", "-c", code, corpora.__file__]
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.stdout.strip() == f"{digest(documentation())} []", done.stderr


def test_source_files(tmp_path):
    """In order, without tests and foreign packages; a file that does not parse says nothing."""
    for name in ("b.py", "a/z.py", "a/test/t.py", "site-packages/p.py", "c.txt", "a/a.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f'"""{name}"""\n')
    found = [path.relative_to(tmp_path).as_posix() for path in corpora.source_files(tmp_path)]
    assert found == ["a/a.py", "a/z.py", "b.py"]
    (tmp_path / "b.py").write_text("print 'Python 2'")
    assert corpora.documented_nodes(tmp_path / "b.py") == []
    (tmp_path / "b.py").write_text("'''\\d'''\nasync def f(): pass\nclass C:\n    x = 1")
    assert len(corpora.documented_nodes(tmp_path / "b.py")) == 3


def test_no_source_files(tmp_path, monkeypatch):
    monkeypatch.setattr(corpora.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(ValueError, match=f"as source files, got none in {tmp_path}"):
        corpora.docstrings.__wrapped__()


def test_docstrings_by_package():
    splits = docstrings_by_package()
    assert_apart(splits)
    assert splits == docstrings_by_package()
    counts = {name: collections.Counter(label for _, label in splits[name]) for name in splits}
    total = sum(counts.values(), collections.Counter())
    assert len(total) == 20 and {"asyncio", "email", "unittest", "decimal"} <= set(total)
    assert max(total.values()) <= 200 and min(total.values()) >= 40
    assert set(counts["test"]) == set(total), "every class is tested"
    assert 0.75 < sum(counts["train"].values()) / sum(total.values()) < 0.85
    labels = [label for _, label in splits["train"][:200]]
    assert len(set(labels)) > 10, "classes are mixed"
    assert all(len(text) >= 30 for items in splits.values() for text, _ in items)


def test_docstrings_arguments():
    few = docstrings_by_package(max_classes=2, max_per_class=30, min_length=200)
    items = [item for split in few.values() for item in split]
    assert len(items) == 60 and len({label for _, label in items}) == 2
    assert all(len(text) >= 200 for text, _ in items)
    with pytest.raises(ValueError, match="max_classes must be a whole number of at least 2, got 1"):
        docstrings_by_package(max_classes=1)
    with pytest.raises(ValueError, match="max_per_class must be .* of at least 1, got 0"):
        docstrings_by_package(max_per_class=0)
    with pytest.raises(ValueError, match="min_length must be .* of at least 1, got 1.5"):
        docstrings_by_package(min_length=1.5)


def test_a_text_of_two_packages_has_no_label(monkeypatch):
    shared, own = "Return the larger of the two values.", "Return the smaller of the two values."
    found = [("a", False, shared), ("b", False, shared), ("b", False, own), ("c", True, own + "!")]
    monkeypatch.setattr(corpora, "docstrings", lambda: found)
    assert [item for split in docstrings_by_package().values() for item in split] == [(own, "b")]


def test_splits_never_move():
    """Fixed for good: another process, machine or year gives the same."""
    assert corpora.fingerprint("kformer") == 14345041677439421390
    found = collections.Counter(corpora.split_of(str(i)) for i in range(20_000))
    assert abs(found["val"] - 1000) < 150 and abs(found["test"] - 1000) < 150


def test_pairs(pairs):
    assert {name: len(items) for name, items in pairs.items()} == SMALL
    assert_apart(pairs)
    everything = sum(pairs.values(), [])
    assert len(dict(everything)) == len(everything), "the source determines the target"
    tags = collections.Counter(re.match(r"<(..)> \S", source)[1] for source, _ in everything)
    assert sorted(tags) == ["de", "en", "es", "fr", "it", "pt"]
    letters = {c for pair in everything for text in pair for c in text}
    assert {c for c in letters if c.isspace()} == {" "}


def test_pairs_are_the_same_again(pairs):
    assert written_out(SMALL) == pairs
    assert written_out({"test": 50})["test"] == pairs["test"][:50], "splits are drawn apart"
    other = written_out({"test": 200}, seed=1)["test"]
    assert other != pairs["test"]
    assert not texts_of(other) & texts_of(pairs["train"])


def test_values_are_in_one_split():
    """With two languages and both directions, no side of a pair is seen in another split."""
    splits = written_out({"train": 6000, "val": 400, "test": 400}, languages=("en", "de"))
    sides = {
        name: {side.removeprefix("<en> ").removeprefix("<de> ") for pair in items for side in pair}
        for name, items in splits.items()
    }
    for one, other in itertools.combinations(sides.values(), 2):
        assert not one & other


def test_a_day_is_in_one_split_in_every_form():
    day = datetime.date(2025, 3, 4)
    forms = [("full", day), ("long", day), ("moment", day, datetime.time(8, 5))]
    assert {corpora.identity(form) for form in forms} == {"2025-03-04"}
    assert corpora.identity(("duration", 1, 2, 3)) != corpora.identity(("duration", 1, 2, 4))


@pytest.mark.parametrize("value, english, german, french", [
    (("full", datetime.date(2025, 3, 4)),
     "Tuesday, March 4, 2025", "Dienstag, 4. März 2025", "mardi 4 mars 2025"),
    (("long", datetime.date(1900, 12, 31)),
     "December 31, 1900", "31. Dezember 1900", "31 décembre 1900"),
    (("duration", 1, 2, 3), "1 hour, 2 minutes, and 3 seconds",
     "1 Stunde, 2 Minuten und 3 Sekunden", "1 heure, 2 minutes et 3 secondes"),
    (("money", "EUR", decimal.Decimal("1234.50")),
     "1,234.50 euros", "1.234,50 Euro", "1 234,50 euros"),
    (("quantity", "length-kilometer", decimal.Decimal("1.5")),
     "1.5 kilometers", "1,5 Kilometer", "1,5 kilomètre"),
])  # fmt: skip
def test_writing(value, english, german, french):
    found = [corpora.write(value, babel.Locale(name)) for name in ("en", "de", "fr")]
    assert found == [english, german, french]


def test_writing_a_moment():
    value = ("moment", datetime.date(2025, 3, 4), datetime.time(15, 5))
    english, german = (corpora.write(value, babel.Locale(name)) for name in ("en", "de"))
    assert re.fullmatch(r"March 4, 2025(,| at) 3:05 PM", english)
    assert re.fullmatch(r"4\. März 2025(,| um) 15:05", german)


def all_kinds_of_values():
    for ordinal in range(corpora.FIRST_DAY.toordinal(), corpora.LAST_DAY.toordinal(), 97):
        day = datetime.date.fromordinal(ordinal)
        yield from [("full", day), ("long", day)]
    for minute in range(0, 1440, 5):
        yield "moment", corpora.LAST_DAY, datetime.time(*divmod(minute, 60))
    for parts in itertools.product((1, 2, 5, 22), repeat=3):
        yield "duration", *parts
    for currency, amount in itertools.product(corpora.CURRENCIES, AMOUNTS):
        yield "money", currency, decimal.Decimal(amount)
    for unit, number in itertools.product(corpora.UNITS, NUMBERS):
        yield "quantity", unit, decimal.Decimal(number)


def test_no_text_means_two_values():
    """Not even in two languages, so that a source needs no tag of its own language."""
    meaning = {}
    values = list(all_kinds_of_values())
    for language in corpora.LANGUAGES:
        locale = babel.Locale.parse(language)
        for value in values:
            text = corpora.write(value, locale)
            assert meaning.setdefault(text, value) == value, text
            unnamed = value[0] in ("money", "quantity") and value[1] in text
            assert not unnamed, f"babel has no name in {language}: {text}"


@pytest.mark.parametrize("kind", corpora.SHARES)
def test_one_kind(kind, pairs):
    """A test set of one kind stays clear of training on all kinds."""
    found = written_out({"test": 100}, kinds=[kind])
    assert list(found) == ["test"] and len(found["test"]) == 100
    assert not texts_of(found["test"]) & texts_of(pairs["train"])
    dates = [re.search(r"\b(19|20)\d\d\b", target) for _, target in found["test"]]
    assert all(dates) == (kind == "date")


def test_numbers_have_one_form():
    """5 and 5.00 would be one text and two values."""
    generator = corpora.random.Random(0)
    drawn = [corpora.draw_value("quantity", generator)[2] for _ in range(500)]
    assert all(str(n) == str(n.normalize().__format__("f")) for n in drawn)
    assert min(drawn) >= 1 and max(drawn) < 100_000
    amounts = [corpora.draw_value("money", generator)[2] for _ in range(500)]
    assert {amount.as_tuple().exponent for amount in amounts} == {-2}


def test_more_than_there_is(monkeypatch):
    monkeypatch.setattr(corpora, "PATIENCE", 50)
    monkeypatch.setattr(corpora, "draw_value", lambda kind, generator: ("duration", 1, 2, 3))
    split = corpora.split_of(corpora.identity(("duration", 1, 2, 3)))
    with pytest.raises(ValueError, match=f"got {split}=9, where 2 were found"):
        written_out({split: 9}, languages=("en", "de"))


@pytest.mark.parametrize("given, message", [
    (dict(sizes=9), "sizes must be a dict of numbers by split, got 9"),
    (dict(sizes={}), r"sizes must be 1 or more different names, got \[\]"),
    (dict(sizes={"dev": 9}), "sizes must be some of train, val, test, got 'dev'"),
    (dict(sizes={"test": 0}), r"sizes\['test'\] must be a whole number of at least 1, got 0"),
    (dict(sizes={"test": True}), "a whole number of at least 1, got True"),
    (dict(languages=("de",)), r"languages must be 2 or more different names, got \('de',\)"),
    (dict(languages=("de", "de")), r"2 or more different names, got \('de', 'de'\)"),
    (dict(languages="de"), "2 or more different names, got 'de'"),
    (dict(languages=("de", "xx")), "languages must be some of en, de, .*, got 'xx'"),
    (dict(kinds=()), r"kinds must be 1 or more different names, got \(\)"),
    (dict(kinds=("poem",)), "kinds must be some of date, time, money, quantity, got 'poem'"),
])  # fmt: skip
def test_wrong_arguments(given, message):
    with pytest.raises(ValueError, match=message):
        written_out(**given)


def test_without_babel(monkeypatch):
    monkeypatch.setitem(sys.modules, "babel", None)
    with pytest.raises(ValueError, match="^written_out needs the package babel: pip install babel"):
        written_out()
