"""Jinja for templates from elsewhere: they reach nothing but what they are given, and what they
make of it is bounded in size and time. Imported only where one is rendered: it needs jinja2."""

import contextlib
import datetime
import functools
import json
import threading
import time
from collections.abc import MappingView

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

SECONDS = 2.0
WORK = 2**22  # characters, items and steps, beside 64 for each character that is given
OLDEST = 3, 1, 6  # older ones have known ways out of the sandbox
# The filters there are: those that make texts, whatever they are given, and others.
TEXTUAL = {
    "capitalize", "e", "escape", "join", "lower", "replace", "safe", "string", "title", "tojson",
    "trim", "truncate", "upper",
}  # fmt: skip
OTHERS = {
    "abs", "count", "d", "default", "dictsort", "first", "float", "groupby", "int", "items", "last",
    "length", "list", "map", "max", "min", "reject", "rejectattr", "reverse", "select",
    "selectattr", "sort", "sum", "unique",
}  # fmt: skip
# What makes much out of little, and no chat template needs.
METHODS = {"center", "expandtabs", "format", "format_map", "ljust", "rjust", "translate", "zfill"}
GLOBALS = {"cycler", "joiner", "lipsum"}
COMPARING = {
    "!=", "<", "<=", "==", ">", ">=", "eq", "equalto", "ge", "greaterthan", "gt", "in", "le",
    "lessthan", "lt", "ne",
}  # fmt: skip
HOLDERS = list, tuple, dict, MappingView


class Limit(jinja2.TemplateError):
    """A template takes too long, or makes too much."""


class Meter(threading.local):
    """What is left of a rendering's time and work."""

    left, end = 0, 0.0

    def start(self, given):
        self.left, self.end = WORK + 64 * given, time.monotonic() + SECONDS

    def pay(self, amount):
        self.left -= 1 + amount
        if self.left < 0 or time.monotonic() > self.end:
            raise Limit("it makes too much, or takes too long")

    def paid(self, value):
        """The value, whose size is paid for."""
        self.pay(size(value))
        return value

    def weighed(self, value):
        """The value, paid for with all that is in it, which may be the same thing many times."""
        self.pay(size(value))
        if isinstance(value, HOLDERS):
            for item in value.items() if isinstance(value, dict) else value:
                self.weighed(item)
        return value

    def items(self, values):
        """The items of a loop, each of them paid for."""
        for value in values:
            self.pay(1)
            yield value


def size(value):
    return len(value) if isinstance(value, (str, range, *HOLDERS)) else 0


class Generation(jinja2.ext.Extension):
    """The block {% generation %}, in which templates put what a model is trained on: its text."""

    tags = {"generation"}

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(["name:endgeneration"], drop_needle=True)


class Namespace(jinja2.utils.Namespace):
    """Without names that could mean something to Python."""

    def __setitem__(self, name, value):
        if str(name).startswith("_"):
            raise SecurityError(f"a namespace takes no name such as {name!r}")
        super().__setitem__(name, value)

    def __repr__(self):
        return "<namespace>"


class Sandbox(ImmutableSandboxedEnvironment):
    """Everything that makes a value pays for it; see `metered` about the rest."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self):
        extensions = [Generation, jinja2.ext.loopcontrols]
        given = dict(trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=extensions)
        super().__init__(**given)
        self.meter = Meter()
        known = {**self.filters, "tojson": to_json, "join": self.join, "replace": self.replace}
        self.filters = {name: self.paying(name, known[name]) for name in TEXTUAL | OTHERS}
        steps = dict(paid=self.meter.paid, weighed=self.meter.weighed, steps=self.meter.items)
        self.filters.update(steps)
        self.tests.update((name, self.paying(name, self.tests[name])) for name in COMPARING)
        for name in GLOBALS:
            del self.globals[name]
        own = dict(raise_exception=refuse, strftime_now=now, namespace=namespace, dict=dictionary)
        self.globals.update(own)

    def paying(self, name, function):
        @functools.wraps(function)  # with Jinja's notes about its first argument
        def paid(*args, **kwargs):
            if name in TEXTUAL | COMPARING:
                self.meter.weighed([arg for arg in args if isinstance(arg, HOLDERS)])
            return self.meter.paid(function(*args, **kwargs))

        return paid

    def concat(self, parts):
        parts = list(parts)
        self.meter.pay(sum(map(len, parts)))
        return "".join(parts)

    def is_safe_attribute(self, obj, attr, value):
        growing = isinstance(obj, str) and attr in METHODS
        return not growing and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value):
        return None  # which is refused like the others of METHODS

    def call(self, context, function, /, *args, **kwargs):
        owner, name = getattr(function, "__self__", None), getattr(function, "__name__", None)
        if isinstance(owner, str) and name == "join":
            function, args = self.join, (*args, owner)
        elif isinstance(owner, str) and name == "replace":
            function, args = self.replace, (owner, *args)
        elif isinstance(owner, list | tuple):  # to find or count something in there
            self.meter.weighed([owner, *args])
        self.meter.pay(0)
        return self.meter.paid(super().call(context, function, *args, **kwargs))

    def call_binop(self, context, operator, left, right):
        if operator == "+":
            self.meter.pay(size(left) + size(right))
        elif operator == "*":
            self.meter.pay(times(left, right))
        elif operator == "**" or isinstance(left, str):
            raise SecurityError(f"a chat template has no use for {operator}")
        return super().call_binop(context, operator, left, right)

    def join(self, values, d="", attribute=None):
        values = [v if attribute is None else self.getitem(v, attribute) for v in values]
        texts = [str(value) for value in self.meter.weighed(values)]
        self.meter.pay(sum(map(len, texts)) + len(texts) * len(str(d)))
        return str(d).join(texts)

    def replace(self, text, old, new, count=-1):
        text, old, new = str(text), str(old), str(new)
        self.meter.pay((len(text) + 1) * len(new) // max(1, len(old)))
        return text.replace(old, new, -1 if count is None else count)


def times(left, right):
    """The size of a product; whole numbers that are no longer small have none."""
    if isinstance(left, int) and isinstance(right, int):
        return 0 if max(left.bit_length(), right.bit_length()) < 2**10 else WORK**2
    left, right = (right, left) if isinstance(left, int) else (left, right)
    return size(left) * max(0, right) if isinstance(right, int) else 0


def to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    """Jinja's own would write "<" as it is written in HTML."""
    indent = min(indent, 16) if isinstance(indent, int) else None
    given = dict(ensure_ascii=ensure_ascii, separators=separators, sort_keys=sort_keys)
    return json.dumps(value, indent=indent, **given)


def refuse(message):
    raise jinja2.TemplateError(message)


def now(form):
    return datetime.datetime.now().strftime(form[:64])


def namespace(*args, **values):
    made = Namespace()
    for name, value in dict(*args, **values).items():
        made[name] = value
    return made


def dictionary(*args, **values):
    return dict(*args, **values)


def metered(tree):
    """Loops pay for their items. What Python does without asking the sandbox, such as "~", slices,
    lists, comparisons and writing, pays for what it is given."""
    kinds = nodes.For, nodes.Concat, nodes.Output, nodes.Getitem, nodes.List, nodes.Tuple
    for node in [*tree.find_all((*kinds, nodes.Pair, nodes.Compare, nodes.Operand))]:
        if isinstance(node, nodes.For):
            node.iter = applied("steps", node.iter)
        elif isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
            node.node = applied("paid", node.node)
        for field in ("nodes", "items", "key", "value", "expr"):
            if hasattr(node, field) and getattr(node, "ctx", "load") == "load":
                setattr(node, field, weighed(getattr(node, field)))
    return tree


def weighed(node):
    """Nodes that pay, but for the text of the template, and what pays by itself."""
    if isinstance(node, list):
        return [weighed(one) for one in node]
    free = isinstance(node, nodes.TemplateData | nodes.Pair)
    return node if free else applied("weighed", node)


def applied(name, node):
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def compiled(source):
    """render(**variables) → text, for a template from elsewhere; a ValueError for what fails."""
    if tuple(int(part) for part in jinja2.__version__.split(".")[:3]) < OLDEST:
        rule = f"chat templates need jinja2 {'.'.join(map(str, OLDEST))} or newer"
        raise ValueError(f"{rule}, got {jinja2.__version__}: pip install -U jinja2")
    sandbox = Sandbox()
    with errors():
        code = sandbox.compile(metered(sandbox.parse(source)))
        template = sandbox.template_class.from_code(sandbox, code, sandbox.globals)

    def render(given=0, **variables):
        with errors():
            sandbox.meter.start(given)
            return sandbox.concat(template.generate(**variables))

    return render


@contextlib.contextmanager
def errors():
    """Whatever Jinja raises, or Python in what it has compiled, as one ValueError."""
    try:
        yield
    except Exception as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"the chat template failed: {first[:300]}") from None
