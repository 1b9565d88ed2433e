"""What a user asks of `generate`: checked, turned into numbers for the loop, and answered."""

import numpy as np

from kformer.config import check_whole
from kformer.generation import beam, choosing, drafting, loop

DEFAULTS = dict(
    temperature=0.0, top_k=None, top_p=None, min_p=None, repetition_penalty=None,
    num_beams=1, length_penalty=0.6, num_return_sequences=1, min_new_tokens=0, no_repeat_ngram=0,
    stop=None, seed=None, cache_dtype=None, draft=None, guesses=4, return_scores=False,
    begins=None,
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
    """One continuation, without its stop, and its score; log_probs has the stop's too.

    text: what comes before a stop string, which may end in the middle of a token; else None.
    stop: the id that ended it, or None.
    """

    def __init__(self, ids, log_probs, score, text=None, stop=None):
        self.ids, self.log_probs, self.score, self.text = ids, log_probs, score, text
        self.stop = stop


class Request:
    """The arguments of `generate`, checked.

    Args:
        model: a language model: a `steps.Writer` with `config`, `functions` and tokenizers.
        max_new_tokens, options: see `generate`.
    """

    def __init__(self, model, max_new_tokens, **options):
        if unknown := sorted(set(options) - set(DEFAULTS)):
            raise TypeError(f"generate takes {', '.join(DEFAULTS)}, got {', '.join(unknown)}")
        vars(self).update(DEFAULTS, **options)
        self.model, self.limit, self.size = model, max_new_tokens, model.config.target_size
        self.check()
        self.begins = [] if self.begins is None else np.ravel(self.begins).tolist()
        self.stop_ids, self.stop_texts = split_stops(self.stop, self.size)
        if model.config.eos_id is not None:
            self.stop_ids = [model.config.eos_id, *self.stop_ids]
        if self.stop_texts and model.writer is None:
            raise ValueError("a stop string needs a model with a tokenizer, got tokenizer=None")
        self.kind = choosing.Kind(
            draws=self.draws(),
            penalizes=self.repetition_penalty is not None,
            ngram=self.no_repeat_ngram,
            scores=self.return_scores and self.num_beams == 1,  # beams have theirs anyway
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
        greedy = self.num_beams == 1 or not self.draws()
        need(greedy, "beams need temperature=0", self.temperature)
        need(self.num_beams <= self.size, f"num_beams must be at most {self.size}", self.num_beams)
        if self.num_beams > 1:
            branches = getattr(self.model, "takes_branches", False)
            need(branches, "beams need a writer that takes branches, one beam", self.num_beams)
            most = f"num_return_sequences must be at most num_beams={self.num_beams}"
            need(self.num_return_sequences <= self.num_beams, most, self.num_return_sequences)
        need(self.cache_dtype in DTYPES, f"cache_dtype must be one of {DTYPES}", self.cache_dtype)
        if self.draft is not None:
            self.check_draft()
        if self.begins is not None:
            need(self.model.has_source, "begins needs an encoder-decoder", self.begins)
            rule = f"begins must be an id in [0, {self.size}), or a list of them"
            ids = [self.begins] if np.ndim(self.begins) == 0 else self.begins
            need(len(ids) and all(is_id(one, self.size) for one in ids), rule, self.begins)
        if self.min_new_tokens > self.limit:
            rule = f"min_new_tokens must be at most max_new_tokens={self.limit}"
            raise ValueError(f"{rule}, got {self.min_new_tokens}")

    def check_draft(self):
        check_whole(1, guesses=self.guesses)
        scaling = (self.model.config.rotary_scaling or {}).get("type")
        need(scaling != "dynamic", "draft needs rotary scaling that knows no length", scaling)
        need(self.num_beams == 1, "draft needs num_beams=1", self.num_beams)
        if isinstance(self.draft, str):
            return need(self.draft == "lookup", 'draft must be "lookup" or a model', self.draft)
        kind = f"draft must be a model that writes as a {type(self.model).__name__} does"
        writes = hasattr(self.draft, "advance")
        need(writes and self.draft.has_source == self.model.has_source, kind, self.draft)
        mine, theirs = (
            (model.config.vocabulary_size, model.config.target_size)
            for model in (self.model, self.draft)
        )
        need(mine == theirs, f"draft must have the vocabulary of the model, {mine[-1]} ids", theirs)

    def check_room(self, rows, before=0):
        """Prompts must have a token, of the vocabulary, and fit into a table of positions.

        before: so many tokens that they go on from.
        """
        model, size = self.model, self.model.config.vocabulary_size
        tables = [m.config for m in (model, self.draft) if hasattr(m, "config")]
        tables = [c.max_length for c in tables if c.position == "learned"]
        for number, row in enumerate(rows):
            if not row:
                rule = "a prompt must have at least one token"
                raise ValueError(f"{rule}, got none as prompt {number}")
            if min(row) < 0 or max(row) >= size:
                wrong = next(i for i in row if not 0 <= i < size)
                raise ValueError(f"ids must be in [0, {size}), got {wrong} in prompt {number}")
            longest = before + len(row) + self.limit
            if model.has_source:
                longest = max(len(row), self.limit + 1 + len(self.begins))
            if tables and longest > min(tables):
                rule = f"prompt and new tokens must fit into max_length={min(tables)}"
                raise ValueError(
                    f"{rule} with learned positions, got {longest} for prompt {number}"
                )

    def check_stream(self):
        rule = "stream needs num_beams=1, num_return_sequences=1 and no scores"
        plain = self.num_beams == self.num_return_sequences == 1 and not self.return_scores
        need(plain, rule, (self.num_beams, self.num_return_sequences, self.return_scores))

    def draws(self):
        return bool(np.any(self.number("temperature", 0.0) > 0))

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
        places = max(4, 1 << max(0, len(self.stop_ids) - 1).bit_length())  # few sizes to compile
        stops = np.full(places, -1, "int32")
        stops[: len(self.stop_ids)] = self.stop_ids
        pad = self.model.config.pad_id
        banned = -1 if pad is None or pad in self.stop_ids else pad
        single = (np.asarray(n, "int32") for n in (self.min_new_tokens, banned, pad or 0))
        least, banned, filler = single
        return choosing.Rules(
            given["temperature"], top_k, given["top_p"], given["min_p"],
            given["repetition_penalty"], least, stops, banned, filler,
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

    def begin(self, prompt, numbers, total, kept=None):
        rows = len(prompt["ids"])
        numbers = [*numbers, *[numbers[0]] * (rows - len(numbers))]  # copies that fill the batch
        repeats = self.num_beams if self.num_beams > 1 else self.num_return_sequences
        rules, uniform = self.rules(numbers, total, repeats), self.uniform(numbers, repeats)
        given = prompt, rules, self.kind, self.limit, uniform, repeats, self.cache_dtype, kept
        if self.num_beams > 1:
            return beam.Search(self.length_penalty, self.model.functions, *given)
        if self.draft is not None:
            functions = self.model.functions_with(self.draft)
            return drafting.Speculation(self.guesses, functions, *given)
        return loop.Decoding(self.model.functions, *given)

    def run(self, prompt, numbers, total, kept=None):
        """For every prompt its results, best first."""
        return self.finish(self.begin(prompt, numbers, total, kept))

    def finish(self, decoding):
        # A beam that has spelled a stop string must leave before it is followed any further.
        number = 1 if self.stop_texts and self.num_beams > 1 else None
        while decoding.is_going:
            if self.stop_texts:
                decoding.stop(self.ended(decoding.texts()))
            decoding.advance(number)
        return self.results(decoding)

    def results(self, decoding):
        return [[self.result(*one) for one in group] for group in decoding.results()]

    def result(self, ids, log_probs, score=None):
        """What comes before the stop, be it an id or a text."""
        made, (ids, number) = ids, loop.cut(ids, self.stop_ids)
        stop = int(made[number - 1]) if number > len(ids) else None
        ids, text, complete = self.before_text(ids)
        log_probs = log_probs[: number if complete is None else complete]
        score = float(np.sum(log_probs)) if score is None else float(score)
        return Result(ids, log_probs, score, text, stop if complete is None else None)

    def ended(self, rows):
        """Which rows of ids spell a stop string."""
        rows = [loop.cut(ids, self.stop_ids)[0] for ids in rows]
        return np.array([self.before_text(ids)[1] is not None for ids in rows])

    def before_text(self, ids):
        """Up to the first stop string: the ids that lie wholly before it, the text, and how many
        ids there were when it was complete. Without one: (ids, None, None)."""
        decode, least = self.model.writer and self.model.writer.decode, self.min_new_tokens

        def found(number):
            """The place of a stop string that ends behind the first `least` ids."""
            text, early = decode(ids[:number]), len(decode(ids[:least]))
            starts = [(stop, max(0, early - len(stop) + 1)) for stop in self.stop_texts]
            places = [text.find(stop, start) for stop, start in starts]
            return min((place for place in places if place >= 0), default=None), text

        if not self.stop_texts or found(len(ids))[0] is None:
            return ids, None, None
        complete = next(n for n in range(len(ids) + 1) if found(n)[0] is not None)
        place, text = found(complete)
        kept = next(n for n in range(complete, -1, -1) if len(decode(ids[:n])) <= place)
        return ids[:kept], text[:place], complete

    def pieces(self, decoding, as_text):
        """The new part of a continuation: the first token, and what every few more bring."""
        shown, going = 0, True
        needs_text = as_text or self.stop_texts
        while going:
            going = decoding.is_going
            ids, text, complete = self.before_text(loop.cut(decoding.texts()[0], self.stop_ids)[0])
            going = going and complete is None
            if text is None and needs_text:
                text = self.model.writer.decode(ids)
            end = safe_end(text, self.stop_texts) if going and needs_text else None
            if as_text:
                whole = text[:end]
            elif end is not None:  # ids whose text may be a stop string's wait
                decode = self.model.writer.decode
                fits = (n for n in range(len(ids), -1, -1) if len(decode(ids[:n])) <= end)
                whole = ids[: next(fits)]
            else:
                whole = ids
            if len(whole) > shown:
                yield whole[shown:]
                shown = len(whole)
            if going:
                decoding.advance(STREAMED)

    def answer(self, prompts, found):
        """Results in the kind that came in: a text, texts, lists or an array."""
        many, by_text = self.num_return_sequences > 1, isinstance(prompts, str)
        groups = [group[: self.num_return_sequences] for group in found]
        as_texts = by_text or (len(prompts) and isinstance(prompts[0], str))
        single = by_text or isinstance(prompts[0], int)  # one row of ids
        if as_texts:
            decode = self.model.writer.decode
            ids = [
                [decode(one.ids) if one.text is None else one.text for one in group]
                for group in groups
            ]
        else:
            ids = [[one.ids for one in group] for group in groups]
        log_probs = [[one.log_probs.tolist() for one in group] for group in groups]
        scores = [[one.score for one in group] for group in groups]
        out = [each if many else [one[0] for one in each] for each in (ids, log_probs, scores)]
        if single:
            out = [each[0] for each in out]
        elif hasattr(prompts, "shape") and not as_texts:
            pad = self.model.config.pad_id or 0
            out = filled(out[0], pad, "int32"), filled(out[1], 0.0, "float32"), np.array(out[2])
        return tuple(out) if self.return_scores else out[0]


def need(holds, rule, got):
    if not holds:
        raise ValueError(f"{rule}, got {got!r}")


def is_id(value, size):
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    return whole and 0 <= value < size


def split_stops(stop, size):
    """Ids and strings."""
    given = [] if stop is None else [stop] if isinstance(stop, str | int | np.integer) else stop
    texts = [one for one in given if isinstance(one, str)]
    ids = [one for one in given if not isinstance(one, str)]
    for one in ids:
        need(is_id(one, size), f"stop must be strings, or ids in [0, {size})", one)
    need(all(texts), "a stop string must have at least one character", "")
    return [int(one) for one in ids], texts


def safe_end(text, stops):
    """So much of a text may be shown: not the beginning of a character, nor of a stop string."""
    text = text.rstrip("\ufffd")
    begun = [n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])]
    return len(text) - max(begun, default=0)


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
