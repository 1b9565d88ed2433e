"""Language models that write: `generate` and `stream`, on top of the decoding loop.

One forward serves training and decoding: the stack that trains is called with a cache here.
Letters: R rows, P prompt slots, S slots in all, V ids.
"""

from keras import ops

from kformer import masks
from kformer.cache import NOTHING, BlockCache
from kformer.generation import asking, loop
from kformer.models.base import checked_before
from kformer.models.inputs import align, in_batches, to_rows, up_to_bucket


def compilations(model):
    """How often decoding was compiled: {"prefill": n, "decode": n}. On torch, where nothing is
    compiled, for how many shapes the operations were noted down."""
    return model.functions.counts()


class Generates:
    """What `CausalLM` and `Seq2SeqLM` share: text in, its continuation (or translation) out."""

    def generate(
        self, prompts, max_new_tokens=64, *, temperature=0.0, top_k=None, top_p=None, min_p=None,
        repetition_penalty=None, num_beams=1, length_penalty=0.6, num_return_sequences=1,
        min_new_tokens=0, no_repeat_ngram=0, stop=None, seed=None, cache_dtype=None,
        return_scores=False, batch_size=32,
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
            return_scores: also the log-probabilities of the tokens, stops included, and a score
                for each continuation.
            batch_size: rows that are decoded together, shortest first.
        """
        given = locals()
        options = {name: given[name] for name in asking.DEFAULTS}
        request = asking.Request(self, max_new_tokens, **options)
        rows = self.prompt_rows(prompts)
        asking.check_room(self, rows, max_new_tokens)
        found = [None] * len(rows)
        for numbers, batch in in_batches(rows, batch_size):
            results = request.run(self.prepared(batch), numbers, len(rows))
            for number, result in zip(numbers, results, strict=False):
                found[number] = result
        return request.answer(prompts, found)

    def stream(self, prompt, max_new_tokens=64, **options):
        """The continuation of one prompt, piece by piece as it is made: texts if the prompt is
        one, else lists of ids. options: those of `generate`, beams and several sequences apart."""
        request = asking.Request(self, max_new_tokens, **options)
        request.check_stream()
        rows = self.prompt_rows(prompt[None] if hasattr(prompt, "shape") else [prompt])
        asking.check_room(self, rows, max_new_tokens)
        return request.pieces(self.prepared(rows), isinstance(prompt, str))

    @property
    def functions(self):
        """What is compiled for decoding."""
        if "decoding" not in self._functions:
            self._functions["decoding"] = loop.Functions(self)
        return self._functions["decoding"]

    @property
    def writer(self):
        """The tokenizer of what is written."""
        return getattr(self, "target_tokenizer", self.tokenizer)

    def prompt_rows(self, prompts):
        """Lists of ids: texts are encoded, padding is taken off arrays."""
        if isinstance(prompts, dict):
            raise ValueError(f"prompts must be texts or rows of ids, got a dict of {[*prompts]}")
        rows = to_rows(prompts, self.tokenizer, self.encode_prompts)
        if hasattr(prompts, "shape") and self.config.pad_id is not None:
            return [[i for i in row if i != self.config.pad_id] for row in rows]
        return rows

    def prepared(self, rows):
        """Prompts as arrays that end together, for `begin`."""
        longest = max(map(len, rows))
        length = 1 if longest == 1 else up_to_bucket(longest)
        ids, real = align(rows, length, self.config.pad_id, right=True)
        return {"ids": ids, "real": real}

    # What the decoding loop asks for: see `loop.Writer`.

    def begin(self, prompt, slots, dtype, cross=None, memory_tokens=None):
        """The prompts go through the stack at once; only their last states get logits."""
        caches = [BlockCache(NOTHING, keys) for keys in cross or [None] * len(self.decoder.blocks)]
        inputs = {"ids": prompt["ids"], "padding_mask": prompt["real"]}
        with checked_before():
            hidden, caches = self.decoder(inputs, cache=caches, memory_tokens=memory_tokens)
        filled, dtype = prompt["ids"].shape[1], dtype or self.compute_dtype
        own = [cache.own.cast(dtype) for cache in caches]
        return self.last_logits(hidden), self.grow(own, slots, filled), ()

    def advance(self, ids, start, tokens, memory, shared):
        cross, source_real = shared or ([None] * len(memory), None)
        caches = [BlockCache(*pair) for pair in zip(memory, cross, strict=True)]
        source = None if source_real is None else masks.describe(source_real)
        given = dict(cache=caches, start=start, slots=tokens, memory_tokens=source)
        with checked_before():
            hidden, caches = self.decoder(ids, **given)
        return self.last_logits(hidden), [cache.own for cache in caches]

    def grow(self, memory, slots, filled=None):
        """Windowed blocks keep no more slots than their window is wide."""
        sizes = [min(slots, block.window or slots) for block in self.decoder.blocks]
        return [one.resize(size, filled) for one, size in zip(memory, sizes, strict=True)]

    def last_logits(self, hidden):
        return ops.cast(self.head_logits(hidden[:, -1:], None, False)[:, 0], "float32")
