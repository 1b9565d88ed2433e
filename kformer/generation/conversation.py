"""A text that grows turn by turn; what a model has read of it is kept."""

from kformer.generation import asking, loop


class Conversation:
    """A text to which somebody and a model add in turns; what was read of it is kept.

        talk = kformer.Conversation(model)
        talk.generate("Once upon a time", 20)
        talk.generate(" And then", 20)                             # goes on from all before it
        model.generate([" He said", " She said"], 20, after=talk)  # each goes on from it

    Args:
        model: a language model without a source.
        cache_dtype, draft, guesses: as in `generate`, for all turns.
    Attributes:
        ids: all tokens so far, prompts and continuations, and the stop ids between them.

    What the model wrote with several beams is read once more, and so is what a window may have
    lost behind a stop string. After the model was trained or quantized, call `forget`.
    """

    def __init__(self, model, cache_dtype=None, draft=None, guesses=4):
        if model.has_source:
            rule = "a conversation needs a model that goes on from its prompt"
            raise ValueError(f"{rule}, got a {type(model).__name__}, which has a source")
        self.model, self.ids, self.kept = model, [], None
        self.settings = dict(cache_dtype=cache_dtype, draft=draft, guesses=guesses)
        asking.Request(model, 1, **self.settings)  # refuses what is wrong now

    def read(self, prompt):
        """Adds a prompt and writes nothing."""
        _, row = self.asked(prompt, 1)
        self.ids = self.ids + row

    def generate(self, prompt, max_new_tokens=64, **options):
        """What the model adds after the prompt, in its kind; options as in the model's."""
        request, row = self.asked(prompt, max_new_tokens, **options)
        if request.num_return_sequences > 1:
            rule = "a conversation goes on from one sequence"
            raise ValueError(f"{rule}, got num_return_sequences={request.num_return_sequences}")
        decoding = self.begin(request, row)
        groups = request.finish(decoding)
        self.remember(row, groups[0][0], decoding)
        return request.answer(prompt if isinstance(prompt, str) else row, groups)

    def stream(self, prompt, max_new_tokens=64, **options):
        """The same, piece by piece. The turn counts when all pieces were taken."""
        request, row = self.asked(prompt, max_new_tokens, **options)
        request.check_stream()
        return self.pieces(request, row, isinstance(prompt, str))

    def pieces(self, request, row, as_text):
        decoding = self.begin(request, row)
        yield from request.pieces(decoding, as_text)
        self.remember(row, request.results(decoding)[0][0], decoding)

    def asked(self, prompt, max_new_tokens, **options):
        """The request, checked, and the prompt's ids."""
        if wrong := sorted(set(options) & set(self.settings)):
            raise TypeError(f"{', '.join(wrong)} belong to the Conversation, not to one turn")
        request = asking.Request(self.model, max_new_tokens, **self.settings, **options)
        (row,) = self.model.prompt_rows(
            prompt[None] if hasattr(prompt, "shape") else [prompt], begins=not self.ids
        )
        request.check_room([row], len(self.ids))
        return request, row

    def begin(self, request, row):
        prompt = self.model.prepared([self.unread() + row])
        return request.begin(prompt, [0], 1, self.kept)

    def unread(self):
        """The ids that the model has not read, or not kept."""
        return self.ids[0 if self.kept is None else len(self.kept.ids) :]

    def remember(self, row, result, decoding):
        """The turn becomes part of the text: what was written, and the id that ended it."""
        ids = result.ids + ([] if result.stop is None else [result.stop])
        if result.text is not None:  # a stop string may have left the beginning of a token
            whole = self.model.writer.decode(result.ids)
            ids = ids + self.model.writer.encode(result.text[len(whole) :])
        self.ids = self.ids + row + ids
        self.kept = decoding.kept(decoding.first + len(result.ids)) or self.kept

    def forget(self):
        """Keys and values of weights that are no more; the text stays, and is read again."""
        self.kept = None

    def keep_all(self, model):
        """`loop.Kept` of the whole text, for prompts of `model` to go on from; None if empty."""
        if model is not self.model:
            raise ValueError(f"after must be a conversation of this model, got one of {self.model}")
        if unread := self.unread():
            functions = model.functions_with(self.settings["draft"])
            prompt, dtype = model.prepared([unread]), self.settings["cache_dtype"]
            self.kept = loop.keep(functions, prompt, dtype, self.kept)
        return self.kept
