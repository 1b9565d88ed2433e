"""Language models that write: `generate`, on top of the decoding loop.

One forward serves training and decoding: the stack that trains is called with a cache here.
Letters: B rows, P prompt slots, S slots in all, V ids.
"""

from typing import Any, NamedTuple

import numpy as np
from keras import ops

from kformer import backend, cache, masks
from kformer.config import check_whole
from kformer.generation import search
from kformer.models.inputs import align, in_batches, to_rows, up_to_bucket


class State(NamedTuple):
    """Where decoding stands: what `advance` needs to go on."""

    caches: Any  # a BlockCache per block
    real: Any  # (B, S), False = padding in front of the prompt
    next: int  # slot of the next token
    source_real: Any = None  # (B, source tokens)


def next_log_probs(model, ids, caches, real, start, source_real, parents=None):
    """log p of the token after `ids` (B, T), which go to the slots from `start` on, and the new
    caches. parents: (B,), the row of the caches that each row continues."""
    if parents is not None:
        caches = [one.take(parents) for one in caches]
    source = None if source_real is None else masks.describe(source_real)
    slots = masks.describe(real)
    given = dict(cache=caches, start=start, slots=slots, memory_tokens=source)
    hidden, caches = model.decoder(ids, **given)
    logits = ops.cast(model.head_logits(hidden[:, -1:], None, False)[:, 0], "float32")
    log_probs = ops.log_softmax(logits, axis=-1)
    if model.config.pad_id is not None:  # padding is nothing that could be written
        is_pad = ops.arange(logits.shape[-1]) == model.config.pad_id
        log_probs = ops.where(is_pad, -float("inf"), log_probs)
    return log_probs, caches


def encode_source(model, ids, real):
    """The encoder's output as keys and values of every block of the decoder: made once."""
    memory = model.backbone.encoder({"ids": ids, "padding_mask": real})
    return [block.cross_attention.keys_values(memory) for block in model.decoder.blocks]


class Generates:
    """What `CausalLM` and `Seq2SeqLM` share: text in, its continuation (or translation) out."""

    def generate(
        self,
        prompts,
        max_new_tokens=64,
        *,
        temperature=0.0,
        top_k=None,
        top_p=None,
        num_beams=1,
        length_penalty=0.6,
        seed=None,
        batch_size=32,
    ):
        """Continuations of prompts, or translations of sources, in the kind that came in.

        Args:
            prompts: a string, a list of strings, lists of ids, or an array padded with pad_id.
            max_new_tokens: at most so many; `config.eos_id` ends a row before.
            temperature: 0 = always the likeliest token.
            top_k, top_p: draw from the k likeliest, or from those that together reach p.
            num_beams: how many continuations are followed at a time.
            length_penalty: α; scores are divided by ((5 + n) / 6)^α.
            seed: of the draws.
            batch_size: rows that are decoded together, shortest first.
        """
        check_numbers(max_new_tokens, temperature, top_k, top_p, num_beams, length_penalty)
        rows = self.prompt_rows(prompts)
        check_room(self, rows, max_new_tokens)
        stops = [] if self.config.eos_id is None else [self.config.eos_id]
        random, out = np.random.default_rng(seed), [None] * len(rows)
        for numbers, batch in in_batches(rows, batch_size):
            if num_beams > 1:
                found = search.beam(self, batch, max_new_tokens, stops, num_beams, length_penalty)
            else:
                draws = temperature, top_k, top_p, random
                found = search.sample(self, batch, max_new_tokens, stops, *draws)
            for number, best in zip(numbers, found, strict=False):
                out[number] = best[0].ids
        return self.as_given(prompts, out)

    @property
    def writer(self):
        """The tokenizer of what is written."""
        return getattr(self, "target_tokenizer", self.tokenizer)

    def prompt_rows(self, prompts):
        """Lists of ids: texts are encoded, padding is taken off arrays."""
        rows = to_rows(prompts, self.tokenizer, self.encode_prompts)
        if hasattr(prompts, "shape") and self.config.pad_id is not None:
            return [[i for i in row if i != self.config.pad_id] for row in rows]
        return rows

    def as_given(self, prompts, rows):
        """Ids in the kind that came in: a text, texts, lists or an array."""
        if isinstance(prompts, str):
            return self.writer.decode(rows)[0]
        if hasattr(prompts, "shape"):
            return align(rows, max(map(len, rows), default=0), self.config.pad_id)[0]
        if len(prompts) and isinstance(prompts[0], str):
            return self.writer.decode(rows)
        return rows

    # What the decoding loop asks for.

    def begin_with(self, rows, room, cross=None, source_real=None):
        """The prompts go through the stack at once, into an empty cache with room for more."""
        length = up_to_bucket(max(map(len, rows)))
        slots = up_to_bucket(length + room)
        ids, real = align(rows, length, self.config.pad_id, right=True)
        real = np.concatenate([real, np.ones((len(rows), slots - length), bool)], axis=1)
        heads = self.config.key_value_heads, self.config.head_width
        empty = [
            cache.BlockCache(cache.empty(len(rows), slots, *heads, dtype=self.compute_dtype), keys)
            for keys in cross or [None] * len(self.decoder.blocks)
        ]
        state = State(empty, real, 0, source_real)
        return self.take_step(state, ids, None)

    def advance(self, state, ids, parents=None):
        return self.take_step(state, np.asarray(ids, "int32")[:, None], parents)

    def take_step(self, state, ids, parents):
        """Beams that change places are of one row: only their own caches move with them."""
        start = np.asarray(state.next, "int32")
        parents = None if parents is None else np.asarray(parents, "int32")
        given = ids, state.caches, state.real, start, state.source_real, parents
        log_probs, caches = self.run_compiled(next_log_probs, *given)
        state = state._replace(caches=caches, next=state.next + ids.shape[1])
        return backend.to_numpy(log_probs), state


def check_numbers(max_new_tokens, temperature, top_k, top_p, num_beams, length_penalty):
    def need(holds, rule, got):
        if not holds:
            raise ValueError(f"{rule}, got {got!r}")

    given = dict(max_new_tokens=max_new_tokens, num_beams=num_beams, top_k=top_k)
    check_whole(1, **{name: value for name, value in given.items() if value is not None})
    need(0.0 <= temperature < np.inf, "temperature must be in [0, inf)", temperature)
    need(top_p is None or 0.0 < top_p <= 1.0, "top_p must be in (0, 1]", top_p)
    need(0.0 <= length_penalty < np.inf, "length_penalty must be in [0, inf)", length_penalty)
    need(num_beams == 1 or not temperature, "beams need temperature=0", temperature)


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
