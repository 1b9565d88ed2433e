"""Language models that write: `generate` and `stream`, on top of the decoding loop.

One forward serves training and decoding: the stack that trains is called with a cache here.
Letters: R rows, P prompt slots, S slots in all, V ids.
"""

from keras import ops

from kformer import masks
from kformer.cache import NOTHING, BlockCache
from kformer.generation import asking, drafting
from kformer.generation.functions import Functions
from kformer.models.inputs import align, checked_before, in_batches, to_rows, up_to_bucket


def compilations(model):
    """How often decoding was compiled: {"prefill": n, "decode": n}, with every way of guessing.
    On torch, where nothing is compiled, for how many shapes the operations were noted down."""
    every = [model.functions, *(writer.functions for writer in model.drafted.values())]
    counts = [functions.counts() for functions in every]
    return {name: sum(count[name] for count in counts) for name in ("prefill", "decode")}


class Untracked:
    """A dict that Keras does not look into: models in there are no part of the one outside."""

    def __init__(self):
        self.known = {}


class Generates:
    """What `CausalLM` and `Seq2SeqLM` share: text in, its continuation (or translation) out."""

    takes_branches = True  # see `steps.Writer`

    def generate(
        self, prompts, max_new_tokens=64, *, temperature=0.0, top_k=None, top_p=None, min_p=None,
        repetition_penalty=None, num_beams=1, length_penalty=0.6, num_return_sequences=1,
        min_new_tokens=0, no_repeat_ngram=0, stop=None, seed=None, cache_dtype=None, draft=None,
        guesses=4, return_scores=False, begins=None, batch_size=32, after=None,
    ):  # fmt: skip
        """Continuations of prompts, or translations of sources, in the kind that came in.

        Args:
            prompts: a string, a list of strings, lists of ids, or an array padded with pad_id.
            max_new_tokens: at most so many; `config.eos_id` or a `stop` ends a row before.
            temperature: 0 = always the likeliest token. This and the next four may be lists, with
                a number for each prompt.
            top_k, top_p, min_p: draw from the k likeliest; from the likeliest that together reach
                p; from those at least p times as likely as the likeliest.
            repetition_penalty: above 1, what has occurred becomes less likely.
            num_beams: how many continuations are followed at a time.
            length_penalty: α; scores of beams are divided by ((5 + n) / 6)^α, n new tokens.
            num_return_sequences: so many for each prompt; of beams the best ones.
            min_new_tokens: no stop before so many.
            no_repeat_ngram: no so many tokens in a row twice; 0 = they may.
            stop: ids or strings that end a row, one or a list.
            seed: of the draws.
            cache_dtype: "float32", "bfloat16" or "float16"; None = what the model computes in.
            draft: who guesses the next `guesses` tokens, for the model to read at once: a smaller
                model with the same vocabulary, or "lookup", which goes on as the text did where
                the same tokens stood before. The outcome is the same, draws included.
            return_scores: also the log-probabilities of the tokens, stops included, and a score
                for each continuation; beams are scored by what the penalties have left.
            begins: an id or a list of them that every translation begins with, after bos: what it
                is written in, for a model of many languages. It is not returned.
            batch_size: rows that are decoded together, shortest first.
            after: a `Conversation` that all the prompts go on from; its text is read once.
        """
        given = locals()
        options = {name: given[name] for name in asking.DEFAULTS}
        request, kept = self.asked(max_new_tokens, options, after)
        rows = self.prompt_rows(prompts, begins=kept is None)
        return self.answers(request, prompts, rows, batch_size, kept)

    def answers(self, request, prompts, rows, batch_size=1, kept=None):
        """What is written after these rows, in the kind of the prompts."""
        request.check_room(rows, 0 if kept is None else len(kept.ids))
        found = [None] * len(rows)
        for numbers, batch in in_batches(rows, batch_size):
            results = request.run(self.prepared(batch, request.begins), numbers, len(rows), kept)
            for number, result in zip(numbers, results, strict=False):
                found[number] = result
        return request.answer(prompts, found)

    def stream(self, prompt, max_new_tokens=64, *, after=None, **options):
        """The continuation of one prompt, piece by piece as it is made: texts if the prompt is
        one, else lists of ids. options: those of `generate`, beams, several sequences, scores and
        batch_size apart."""
        request, kept = self.asked(max_new_tokens, options, after)
        request.check_stream()
        prompts = prompt[None] if hasattr(prompt, "shape") else [prompt]
        rows = self.prompt_rows(prompts, begins=kept is None)
        request.check_room(rows, 0 if kept is None else len(kept.ids))
        decoding = request.begin(self.prepared(rows, request.begins), [0], 1, kept)
        return request.pieces(decoding, isinstance(prompt, str))

    def asked(self, max_new_tokens, options, after=None):
        """The request, checked, and what its prompts go on from, or None."""
        if after is None:
            return asking.Request(self, max_new_tokens, **options), None
        for name, value in after.settings.items():
            given = options.get(name, value)
            if given is not value and given != asking.DEFAULTS[name]:
                raise ValueError(f"{name} must be that of the conversation, {value}, got {given}")
        request = asking.Request(self, max_new_tokens, **{**options, **after.settings})
        return request, after.keep_all(self)

    @property
    def functions(self):
        """What is compiled for decoding."""
        if "decoding" not in self._functions:
            self._functions["decoding"] = Functions(self)
        return self._functions["decoding"]

    @property
    def drafted(self):
        """This model with "lookup" and with the last model that has guessed for it."""
        return self._functions.setdefault("drafted", Untracked()).known

    def functions_with(self, draft):
        """What is compiled for decoding with guesses of "lookup" or a smaller model."""
        if draft is None:
            return self.functions
        make = drafting.Lookup if isinstance(draft, str) else drafting.Pair
        known = self.drafted.get(make)
        if known is None or known.draft is not draft:
            known = self.drafted[make] = make(self, draft)
        return known.functions

    @property
    def writer(self):
        """The tokenizer of what is written."""
        return getattr(self, "target_tokenizer", self.tokenizer)

    def prompt_rows(self, prompts, begins=True):
        """Lists of ids: texts are encoded, as the beginning of one or not; padding is taken off
        arrays."""
        if isinstance(prompts, dict):
            raise ValueError(f"prompts must be texts or rows of ids, got a dict of {[*prompts]}")
        rows = to_rows(prompts, self.tokenizer, self.encode_prompts if begins else None)
        if hasattr(prompts, "shape") and self.config.pad_id is not None:
            return [[i for i in row if i != self.config.pad_id] for row in rows]
        return rows

    def prepared(self, rows, begins=()):
        """Prompts as arrays that end together, for `begin`."""
        longest = max(map(len, rows))
        length = 1 if longest == 1 else up_to_bucket(longest)
        ids, real = align(rows, length, self.config.pad_id, right=True)
        return {"ids": ids, "real": real}

    # What the decoding loop asks for: see `steps.Writer`.

    def begin(self, prompt, dtype, cross=None, memory_tokens=None):
        """The prompts go through the stack at once; only their last states get logits."""
        caches = [BlockCache(NOTHING, keys) for keys in cross or [None] * len(self.decoder.blocks)]
        inputs = {"ids": prompt["ids"], "padding_mask": prompt["real"]}
        with checked_before():
            hidden, caches = self.decoder(inputs, cache=caches, memory_tokens=memory_tokens)
        own = [cache.own.cast(dtype or self.compute_dtype) for cache in caches]
        return self.last_logits(hidden, 1)[:, 0], own, ()

    def advance(self, ids, start, tokens, memory, shared, last=1, at=None):
        cross, source_real = shared or ([None] * len(memory), None)
        caches = [BlockCache(*pair) for pair in zip(memory, cross, strict=True)]
        source = None if source_real is None else masks.describe(source_real)
        given = dict(cache=caches, start=start, slots=tokens, memory_tokens=source)
        with checked_before():
            hidden, caches = self.decoder(ids, **given)
        if at is not None:
            hidden = ops.take_along_axis(hidden, at[:, None, None], axis=1)
        return self.last_logits(hidden, last), [cache.own for cache in caches]

    def grow(self, memory, slots, last, width=1, ahead=0, shift=None):
        """Windowed blocks keep no more places than their window is wide."""
        windows = [block.window for block in self.decoder.blocks]
        sizes = [slots if w is None else min(slots, w * width + ahead) for w in windows]
        return [one.resize(size, last, shift) for one, size in zip(memory, sizes, strict=True)]

    def last_logits(self, hidden, number):
        return ops.cast(self.head_logits(hidden[:, -number:], None, False), "float32")
