"""What a user asks of `generate`: checked, turned into numbers for the loop, and answered."""

import numpy as np

from kformer.config import check_whole
from kformer.generation import beam, choosing, loop

DEFAULTS = dict(
    temperature=0.0, top_k=None, top_p=None, min_p=None, repetition_penalty=None,
    num_beams=1, length_penalty=0.6, num_return_sequences=1, min_new_tokens=0, no_repeat_ngram=0,
    stop=None, seed=None, cache_dtype=None, return_scores=False,
)  # fmt: skip
# (name, what stands for None, what must hold, and in words)
NUMBERS = [
    ("temperature", 0.0, lambda t: 0.0 <= t < np.inf, "in [0, inf)"),
    ("top_p", 1.0, lambda p: 0.0 < p <= 1.0, "in (0, 1]"),
    ("min_p", 0.0, lambda p: 0.0 <= p < 1.0, "in [0, 1)"),
    ("repetition_penalty", 1.0, lambda p: 0.0 < p < np.inf, "in (0, inf)"),
]
DTYPES = (None, "float32", "bfloat16", "float16")
STREAMED = 4  # tokens between two pieces of a stream


class Result:
    """One continuation, without its stop, and its score; log_probs has the stop's too."""

    def __init__(self, ids, log_probs, score):
        self.ids, self.log_probs, self.score = ids, log_probs, score


class Request:
    """The arguments of `generate`, checked.

    Args:
        model: a language model: a `loop.Writer` with `config`, `functions` and tokenizers.
        max_new_tokens, options: see `generate`.
    """

    def __init__(self, model, max_new_tokens, **options):
        if unknown := sorted(set(options) - set(DEFAULTS)):
            raise TypeError(f"generate takes {', '.join(DEFAULTS)}, got {', '.join(unknown)}")
        vars(self).update(DEFAULTS, **options)
        self.model, self.limit, self.size = model, max_new_tokens, model.config.target_size
        self.check()
        self.stop_ids, self.stop_texts = split_stops(self.stop, self.size)
        if model.config.eos_id is not None:
            self.stop_ids = [model.config.eos_id, *self.stop_ids]
        if self.stop_texts and model.writer is None:
            raise ValueError("a stop string needs a model with a tokenizer, got tokenizer=None")
        self.kind = choosing.Kind(
            draws=bool(np.any(np.asarray(self.temperature) > 0)),
            penalizes=self.repetition_penalty is not None,
            ngram=self.no_repeat_ngram,
            scores=self.return_scores,
        )

    def check(self):
        whole = dict(num_beams=self.num_beams, num_return_sequences=self.num_return_sequences)
        check_whole(1, max_new_tokens=self.limit, **whole)
        check_whole(0, min_new_tokens=self.min_new_tokens, no_repeat_ngram=self.no_repeat_ngram)
        for name, otherwise, holds, rule in NUMBERS:
            for value in np.ravel(self.number(name, otherwise)).tolist():
                need(holds(value), f"{name} must be {rule}", value)
        for value in np.ravel([] if self.top_k is None else self.top_k).tolist():
            rule = f"top_k must be a whole number from 1 to the {self.size} ids there are"
            need(value == int(value) and 1 <= value <= self.size, rule, value)
        alpha = self.length_penalty
        need(0.0 <= alpha < np.inf, "length_penalty must be in [0, inf)", alpha)
        greedy = not np.any(np.asarray(self.temperature) > 0)
        need(self.num_beams == 1 or greedy, "beams need temperature=0", self.temperature)
        need(self.num_beams <= self.size, f"num_beams must be at most {self.size}", self.num_beams)
        if self.num_beams > 1:
            most = f"num_return_sequences must be at most num_beams={self.num_beams}"
            need(self.num_return_sequences <= self.num_beams, most, self.num_return_sequences)
        need(self.cache_dtype in DTYPES, f"cache_dtype must be one of {DTYPES}", self.cache_dtype)
        if self.min_new_tokens > self.limit:
            rule = f"min_new_tokens must be at most max_new_tokens={self.limit}"
            raise ValueError(f"{rule}, got {self.min_new_tokens}")

    def check_stream(self):
        rule = "stream needs num_beams=1, num_return_sequences=1 and no scores"
        plain = self.num_beams == self.num_return_sequences == 1 and not self.return_scores
        need(plain, rule, (self.num_beams, self.num_return_sequences, self.return_scores))

    def number(self, name, otherwise):
        value = getattr(self, name)
        return np.asarray(otherwise if value is None else value, "float32")

    def rules(self, numbers, total, repeats):
        """The numbers for the rows with these numbers among `total` prompts."""

        def by_row(name, values, dtype="float32"):
            if values.ndim and values.shape != (total,):
                rule = f"{name} must be a number, or one for each of the {total} prompts"
                raise ValueError(f"{rule}, got shape {values.shape}")
            rows = np.broadcast_to(values, (total,))[numbers]
            return np.repeat(rows, repeats).astype(dtype)

        given = {name: by_row(name, self.number(name, other)) for name, other, *_ in NUMBERS}
        top_k = by_row("top_k", self.number("top_k", self.size), "int32")
        stops = np.full(1 << max(0, len(self.stop_ids) - 1).bit_length(), -1, "int32")
        stops[: len(self.stop_ids)] = self.stop_ids
        pad = self.model.config.pad_id
        return choosing.Rules(
            given["temperature"], top_k, given["top_p"], given["min_p"],
            given["repetition_penalty"], np.asarray(self.min_new_tokens, "int32"), stops,
            np.asarray(-1 if pad is None else pad, "int32"),
        )  # fmt: skip

    def uniform(self, numbers, repeats):
        """(R, limit) in [0, 1), a stream of its own for every prompt and repeat. They are below 1
        by more than a rounding of float32, so that a running sum never passes its end."""
        if not self.kind.draws:
            return np.zeros((len(numbers) * repeats, self.limit), "float32")
        seed = np.random.SeedSequence().entropy if self.seed is None else self.seed
        streams = [(seed, int(n), r) for n in numbers for r in range(repeats)]
        draws = [np.random.default_rng(stream).random(self.limit) for stream in streams]
        return (np.floor(np.array(draws) * 2**23) / 2**23).astype("float32")

    def begin(self, prompt, numbers, total):
        rows = len(prompt["ids"])
        numbers = [*numbers, *[numbers[0]] * (rows - len(numbers))]  # copies that fill the batch
        repeats = self.num_beams if self.num_beams > 1 else self.num_return_sequences
        rules, uniform = self.rules(numbers, total, repeats), self.uniform(numbers, repeats)
        given = self.model.functions, prompt, rules, self.kind, self.limit, uniform
        if self.num_beams > 1:
            return beam.Search(*given, repeats, self.cache_dtype, self.length_penalty)
        return loop.Decoding(*given, repeats, self.cache_dtype)

    def run(self, prompt, numbers, total):
        """For every prompt its results, best first."""
        decoding = self.begin(prompt, numbers, total)
        while decoding.advance():
            if self.stop_texts:
                decoding.stop(self.ended(decoding.texts()))
        groups = decoding.results()
        return [[self.result(*one) for one in group] for group in groups]

    def result(self, ids, log_probs, score=None):
        """What comes before the stop, be it an id or a text."""
        ids, number = loop.cut(ids, self.stop_ids)
        log_probs = log_probs[:number]
        if self.stop_texts:
            ids, number = self.cut_text(ids, number)
            log_probs = log_probs[:number]
        return Result(ids, log_probs, float(np.sum(log_probs)) if score is None else float(score))

    def ended(self, texts):
        """Which rows of ids spell a stop string."""
        written = self.model.writer.decode([loop.cut(ids, self.stop_ids)[0] for ids in texts])
        return np.array([any(stop in text for stop in self.stop_texts) for text in written])

    def cut_text(self, ids, number):
        """The fewest ids that spell all before the first stop string, and how many were chosen
        until it was complete."""
        decode = self.model.writer.decode
        text = decode(ids)
        ends = [text.find(stop) for stop in self.stop_texts if stop in text]
        if not ends:
            return ids, number
        complete = next(n for n in range(len(ids) + 1) if self.ended([ids[:n]])[0])
        kept = next(n for n in range(complete, -1, -1) if len(decode(ids[:n])) <= min(ends))
        return ids[:kept], complete

    def pieces(self, prompt, as_text):
        """The new part of a continuation after every few tokens."""
        decoding, shown, going = self.begin(prompt, [0], 1), 0, True
        while going:
            going = decoding.advance(STREAMED)
            ids = loop.cut(decoding.texts()[0], self.stop_ids)[0]
            if self.stop_texts and self.ended([ids])[0]:
                ids, going = self.cut_text(ids, len(ids))[0], False
            whole = self.model.writer.decode(ids) if as_text else ids
            end = len(whole) if not going else safe_end(whole, self.stop_texts)
            if end > shown:
                yield whole[shown:end]
                shown = end

    def answer(self, prompts, found):
        """Results in the kind that came in: a text, texts, lists or an array."""
        many, single = self.num_return_sequences > 1, isinstance(prompts, str)
        groups = [group[: self.num_return_sequences] for group in found]
        as_texts = single or (len(prompts) and isinstance(prompts[0], str))
        if as_texts:
            ids = [self.model.writer.decode([one.ids for one in group]) for group in groups]
        else:
            ids = [[one.ids for one in group] for group in groups]
        log_probs = [[one.log_probs.tolist() for one in group] for group in groups]
        scores = [[one.score for one in group] for group in groups]
        out = [each if many else [one[0] for one in each] for each in (ids, log_probs, scores)]
        if single:
            out = [each[0] for each in out]
        elif hasattr(prompts, "shape"):
            pad = self.model.config.pad_id or 0
            out = filled(out[0], pad, "int32"), filled(out[1], 0.0, "float32"), np.array(out[2])
        return tuple(out) if self.return_scores else out[0]


def need(holds, rule, got):
    if not holds:
        raise ValueError(f"{rule}, got {got!r}")


def split_stops(stop, size):
    """Ids and strings."""
    given = [] if stop is None else [stop] if isinstance(stop, str | int | np.integer) else stop
    texts = [one for one in given if isinstance(one, str)]
    ids = [one for one in given if not isinstance(one, str)]
    for one in ids:
        fits = isinstance(one, int | np.integer) and not isinstance(one, bool) and 0 <= one < size
        need(fits, f"stop must be strings, or ids in [0, {size})", one)
    need(all(texts), "a stop string must have at least one character", "")
    return [int(one) for one in ids], texts


def safe_end(whole, stops):
    """So much may be shown: not the beginning of a character, nor of a stop string."""
    if not isinstance(whole, str):
        return len(whole)
    whole = whole.rstrip("\ufffd")
    for stop in stops:
        for length in range(len(stop) - 1, 0, -1):
            if whole.endswith(stop[:length]):
                return len(whole) - length
    return len(whole)


def filled(rows, value, dtype):
    """Nested lists as an array, filled up on the right."""
    nested = [row for group in rows for row in group] if any_nested(rows) else rows
    longest = max(map(len, nested), default=0)
    out = np.full((len(nested), longest), value, dtype)
    for place, row in enumerate(nested):
        out[place, : len(row)] = row
    return out.reshape(len(rows), -1, longest) if any_nested(rows) else out


def any_nested(rows):
    return bool(rows and rows[0] and isinstance(rows[0][0], list))


def check_room(model, rows, new):
    """Prompts must have a token, of the vocabulary, and fit into a table of positions."""
    config, size = model.config, model.config.vocabulary_size
    for number, row in enumerate(rows):
        if not row:
            raise ValueError(f"a prompt must have at least one token, got none as prompt {number}")
        if min(row) < 0 or max(row) >= size:
            wrong = next(i for i in row if not 0 <= i < size)
            raise ValueError(f"ids must be in [0, {size}), got {wrong} in prompt {number}")
        longest = max(len(row), new + 1) if model.has_source else len(row) + new
        if config.position == "learned" and longest > config.max_length:
            rule = f"prompt and new tokens must fit into max_length={config.max_length}"
            raise ValueError(f"{rule} with learned positions, got {longest} for prompt {number}")
