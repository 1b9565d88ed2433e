"""Corpora that need no download: what Python and the Unicode CLDR bring along.

`documentation` is for language models, `docstrings_by_package` for classifiers and `written_out`
for translation. Which split a text belongs to follows from the text alone, never from its place
or from a seed: adding texts moves no other, and nothing crosses from training to test.
"""

import ast
import collections
import datetime
import decimal
import functools
import hashlib
import inspect
import random
import sysconfig
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from kformer.config import check_whole

SPLITS = ("train", "val", "test")
# Tests, demonstrations and foreign packages are no documentation; the topics are read apart.
SKIPPED = {
    "test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "turtledemo",
    "pydoc_data", "__pycache__",
}  # fmt: skip
# Python versions of modules in C, by the module that they document.
DOCUMENTED = {
    "_collections_abc": "collections",
    "_pydatetime": "datetime",
    "_pydecimal": "decimal",
    "_pyio": "io",
}

# In these no text means two values, whatever its language: tests/test_corpora.py looks at all.
LANGUAGES = (
    "en", "de", "fr", "es", "it", "pt", "cs", "da", "fi", "hu", "nb", "pl", "ro", "sv", "tr",
)  # fmt: skip
SHARES = {"date": 40, "time": 20, "money": 20, "quantity": 20}
SIZES = {"train": 30_000, "val": 500, "test": 500}
FIRST_DAY, LAST_DAY = datetime.date(1900, 1, 1), datetime.date(2099, 12, 31)
# Money of two decimals: with three, "1,234" would be two amounts in two languages.
CURRENCIES = (
    "AUD", "BRL", "CAD", "CHF", "CNY", "CZK", "DKK", "EUR", "GBP", "INR", "MXN", "NOK", "PLN",
    "RON", "SEK", "TRY", "USD", "ZAR",
)  # fmt: skip
# Units that babel can name in every language; it lacks days, months, years and miles in some.
UNITS = (
    "area-hectare", "area-square-kilometer", "area-square-meter", "digital-gigabyte",
    "digital-megabyte", "duration-hour", "duration-minute", "duration-second", "duration-week",
    "energy-kilowatt-hour", "length-centimeter", "length-kilometer", "length-meter",
    "length-millimeter", "mass-gram", "mass-kilogram", "mass-tonne", "power-kilowatt",
    "power-watt", "speed-kilometer-per-hour", "speed-meter-per-second", "temperature-celsius",
    "volume-cubic-meter", "volume-liter", "volume-milliliter",
)  # fmt: skip
PLAIN_SPACES = str.maketrans("\u00a0\u202f\u2009", "   ")
PATIENCE = 10_000


def documentation() -> dict[str, list[str]]:
    """The documentation of the standard library: docstrings, and the topics of `help()`.

    About 2 MB of English, with the documents 90/5/5 in train, val and test. What it says depends
    on the version of Python.
    """
    from pydoc_data.topics import topics

    texts = [text for _, _, text in docstrings()]
    texts += [clean(text) for _, text in sorted(topics.items())]
    splits = {split: [] for split in SPLITS}
    for text in dict.fromkeys(text for text in texts if len(text) >= 40):
        splits[split_of(text)].append(text)
    return splits


def docstrings_by_package(
    max_classes: int = 20, max_per_class: int = 200, min_length: int = 30
) -> dict[str, list[tuple[str, str]]]:
    """(docstring, package) of the standard library's functions, methods and classes.

    Split 80/10/10. A text that stands in two packages has no one answer, and is left out.

    Args:
        max_classes: so many packages, those with the most docstrings.
        max_per_class: at most so many docstrings each, so that no package is the safe guess.
        min_length: characters that a docstring must have at least.
    """
    check_whole(2, max_classes=max_classes)
    check_whole(1, max_per_class=max_per_class, min_length=min_length)
    labels = collections.defaultdict(set)
    for package, is_module, text in docstrings():
        if not is_module and len(text) >= min_length:
            labels[text].add(package)
    texts = collections.defaultdict(list)
    for text in sorted(labels, key=fingerprint):  # in this order any beginning is a fair sample
        if len(labels[text]) == 1:
            texts[min(labels[text])].append(text)
    largest = sorted(texts, key=lambda label: (-len(texts[label]), label))[:max_classes]
    kept = [(text, label) for label in largest for text in texts[label][:max_per_class]]
    splits = {split: [] for split in SPLITS}
    for text, label in sorted(kept, key=lambda item: fingerprint(item[0])):
        splits[split_of(text, train=80, val=10)].append((text, label))
    return splits


@functools.cache
def docstrings() -> tuple[tuple[str, bool, str], ...]:
    """(package, is it the docstring of a module?, text) of the standard library, in file order.

    The files are read, not imported: some modules open a browser or a window when imported.
    """
    root, found = Path(sysconfig.get_path("stdlib")), []
    for path in source_files(root):
        name = path.relative_to(root).parts[0].removesuffix(".py")
        for node in documented_nodes(path):
            if text := ast.get_docstring(node, clean=False):
                is_module = isinstance(node, ast.Module)
                found.append((DOCUMENTED.get(name, name), is_module, clean(text)))
    if not found:
        raise ValueError(f"the standard library must be there as source files, got none in {root}")
    return tuple(found)


def source_files(folder: Path) -> Iterator[Path]:
    """The Python files below a folder, in sorted order."""
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            if path.name not in SKIPPED:
                yield from source_files(path)
        elif path.suffix == ".py":
            yield path


def documented_nodes(path: Path) -> list[ast.AST]:
    """What can have a docstring in a file; nothing if the file is for another Python."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about escapes in other people's strings
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            return []
    return [node for node in ast.walk(tree) if isinstance(node, kinds)]


def clean(text: str) -> str:
    """Without indentation, and without lone surrogates, which no tokenizer takes."""
    return inspect.cleandoc(text).encode("utf-8", "replace").decode("utf-8")


def fingerprint(text: str) -> int:
    """A number that looks random and is the same in every process, unlike `hash`."""
    return int.from_bytes(hashlib.sha256(text.encode("utf-8")).digest()[:8], "big")


def split_of(text: str, train: int = 90, val: int = 5) -> str:
    """The split of a text, by percentages; the rest of 100 is test."""
    place = fingerprint(text) % 100
    return "train" if place < train else "val" if place < train + val else "test"


def written_out(
    sizes: Mapping[str, int] | None = None,
    languages: Sequence[str] = LANGUAGES[:6],
    seed: int = 0,
    kinds: Sequence[str] = tuple(SHARES),
) -> dict[str, list[tuple[str, str]]]:
    """Translation pairs: dates, times, money and quantities as each language writes them.

        "<de> Tuesday, March 4, 2025" → "Dienstag, 4. März 2025"

    The source begins with a tag that names the target's language, so that one model serves all
    directions, and it determines the target. A value (a date, an amount) is in one split, in
    all languages: a date of the test set occurs in no training pair. 90 % of the values are for
    training, 5 % each for val and test.

    Args:
        sizes: how many distinct pairs for "train", "val" and "test", by default 30,000, 500 and
            500; a split left out is not made.
        languages: two or more of `LANGUAGES`; every pair of different ones occurs.
        seed: another seed draws other pairs, from the same values for each split.
        kinds: some of "date", "time", "money" and "quantity"; all are 40/20/20/20 %.
    """
    sizes = SIZES if sizes is None else sizes
    check_written_out(sizes, languages, kinds)
    try:
        from babel import Locale
    except ImportError:
        raise ValueError("written_out needs the package babel: pip install babel") from None
    locales = {language: Locale.parse(language) for language in languages}
    return {split: draw_pairs(split, size, locales, kinds, seed) for split, size in sizes.items()}


def draw_pairs(split, size, locales, kinds, seed):
    """So many distinct pairs of a split, each split with its own random numbers."""
    generator, pairs, repeats = random.Random(f"{seed} {split}"), {}, 0
    shares = [SHARES[kind] for kind in kinds]
    while len(pairs) < size:
        (kind,) = generator.choices(kinds, shares)
        value = draw_value(kind, generator)
        if split_of(identity(value)) != split:
            continue
        source, target = generator.sample(tuple(locales), 2)
        pair = f"<{target}> {write(value, locales[source])}", write(value, locales[target])
        repeats = repeats + 1 if pair in pairs else 0
        if repeats > PATIENCE:
            got = f"{split}={size}, where {len(pairs)} were found"
            raise ValueError(f"sizes must be no more than there are pairs, got {got}")
        pairs[pair] = None
    return list(pairs)


def draw_value(kind, generator):
    """A value as (form, part, ...): one value has one such tuple, and the form one style."""
    if kind == "date":
        return generator.choice(("full", "long")), draw_day(generator)
    if kind == "time" and generator.random() < 0.5:
        clock = datetime.time(generator.randrange(24), generator.randrange(60))
        return "moment", draw_day(generator), clock
    if kind == "time":
        return "duration", *(generator.randint(1, most) for most in (23, 59, 59))
    # First how many digits, then which: else almost all numbers would be large.
    limit = 10 ** generator.randint(3, 7)
    hundredths = generator.randrange(limit // 10, limit)
    if kind == "money":
        return "money", generator.choice(CURRENCIES), decimal.Decimal(hundredths).scaleb(-2)
    hundredths -= hundredths % generator.choice((1, 10, 100))
    return "quantity", generator.choice(UNITS), decimal.Decimal(hundredths) / 100  # 5, not 5.00


def draw_day(generator):
    first, last = FIRST_DAY.toordinal(), LAST_DAY.toordinal()
    return datetime.date.fromordinal(generator.randint(first, last))


def identity(value):
    """What decides the split: the day where there is one, in whatever form, else the value."""
    days = (part for part in value if isinstance(part, datetime.date))
    return str(next(days, value))


def write(value, locale):
    """The value in the words of a language.

    What a form says in one language, a weekday say, it says in all. Months are words and years
    have four digits, because 03/04/25 is several dates.
    """
    from babel import dates, lists, numbers, units

    form, *parts = value
    if form in ("full", "long"):
        text = dates.format_date(parts[0], form, locale)
    elif form == "moment":
        pattern = dates.get_datetime_format("long", locale=locale).replace("'", "")
        day = dates.format_date(parts[0], "long", locale)
        text = pattern.format(dates.format_time(parts[1], "short", locale=locale), day)
    elif form == "duration":
        names = ("duration-hour", "duration-minute", "duration-second")
        counted = zip(parts, names, strict=True)
        items = [units.format_unit(number, name, locale=locale) for number, name in counted]
        text = lists.format_list(items, locale=locale)
    elif form == "money":
        currency, amount = parts
        text = numbers.format_currency(amount, currency, locale=locale, format_type="name")
    else:
        unit, number = parts
        text = units.format_unit(number, unit, locale=locale)
    return text.translate(PLAIN_SPACES)


def check_written_out(sizes, languages, kinds):
    if not isinstance(sizes, Mapping):
        raise ValueError(f"sizes must be a dict of numbers by split, got {sizes!r}")
    check_names("sizes", list(sizes), SPLITS, 1)
    check_names("languages", languages, LANGUAGES, 2)
    check_names("kinds", kinds, tuple(SHARES), 1)
    for split, size in sizes.items():
        check_whole(1, **{f"sizes[{split!r}]": size})


def check_names(field, names, known, least):
    if isinstance(names, str) or len(set(names)) != len(names) or len(names) < least:
        raise ValueError(f"{field} must be {least} or more different names, got {names!r}")
    for name in names:
        if name not in known:
            raise ValueError(f"{field} must be some of {', '.join(known)}, got {name!r}")
