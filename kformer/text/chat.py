"""Messages → ids, by the chat template that comes with a tokenizer.

The template writes special tokens, what is said spells none: a mark is put into whatever would be
one, the tokenizer takes text apart there, and the mark is left out again.
"""

import functools
import json
from itertools import pairwise

from kformer.text.native import native_errors

ROLES = ("system", "developer", "user", "assistant", "tool")
KEYS = {"role", "content"}


class Chat:
    """What the chat template of a tokenizer makes of messages."""

    def __init__(self, tokenizer):
        if getattr(tokenizer, "chat_template", None) is None:
            raise ValueError("chat needs a tokenizer with a chat_template, got none")
        try:
            from kformer.text import sandbox
        except ImportError:
            raise ValueError("chat needs the package jinja2: pip install 'kformer[chat]'") from None
        self.tokenizer = tokenizer
        self.template = sandbox.compiled(tokenizer.chat_template)
        tokens = tokenizer.native.get_added_tokens_decoder()
        special = {token.content for token in tokens.values() if token.special}
        self.special = (special | {self.token(i) for i in tokenizer.reserved}) - {None}
        # Others may mean something to the model, too, if the template has them.
        used = (t.content for t in tokens.values() if t.content in tokenizer.chat_template)
        self.controls = self.special | {text for text in used if not text.isspace()}
        self.native, self.mark = self.reader()
        names = ("pad", "bos", "eos", "unk", "mask")
        texts = {f"{name}_token": self.token(getattr(tokenizer, f"{name}_id")) for name in names}
        self.variables = {name: text for name, text in texts.items() if text is not None}

    def token(self, number):
        return None if number is None else self.tokenizer.native.id_to_token(number)

    def reader(self):
        """A tokenizer that finds special tokens, as they are spelled to the letter, and the mark,
        which has an id that no other token has."""
        from tokenizers import AddedToken, Tokenizer

        content = json.loads(self.tokenizer.to_json())
        for token in content["added_tokens"]:
            token["normalized"] &= token["content"] not in self.controls
        native, mark = Tokenizer.from_str(json.dumps(content)), None
        for number in range(0xF0000, 0xFFFFD):  # of private use
            mark = chr(number) + chr(number + 1)
            native.add_special_tokens([AddedToken(mark, normalized=False, special=True)])
            self.special, self.controls = self.special | {mark}, self.controls | {mark}
            if self.token(native.token_to_id(mark)) is None:
                break
        return native, mark

    def ids(self, messages, add_generation_prompt=True):
        """The ids of a conversation; with the beginning of the answer if it is asked for."""
        check_messages(messages)
        given = [{**message, "content": self.marked(**message)} for message in messages]
        text = self.template(
            given=sum(len(message["content"]) for message in given),
            messages=given,
            tools=None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **self.variables,
        )
        with native_errors():
            found = self.native.encode(text, add_special_tokens=False)
            pairs = zip(found.ids, found.offsets, strict=True)
            return [i for number, place in pairs for i in self.read(number, text[slice(*place)])]

    def marked(self, role, content):
        """With a mark behind the first character of whatever would be a token. What the model has
        said itself may hold tokens that are not special."""
        controls = self.special if role == "assistant" else self.controls
        content = "".join(c for c in content if c not in controls)
        firsts, lengths = {c[0] for c in controls}, {len(c) for c in controls}
        found = [
            place + 1
            for place, first in enumerate(content)
            if first in firsts and any(content[place : place + n] in controls for n in lengths)
        ]
        return self.mark.join(content[a:b] for a, b in pairwise([0, *found, len(content)]))

    def read(self, number, text):
        """The ids of a token; of a special one only if the text spells it."""
        token = self.native.id_to_token(number)
        if token == self.mark:
            return []
        if number in self.tokenizer.reserved and token not in text:
            return self.tokenizer.letters(number)
        return [number]

    @functools.cached_property
    def stops(self):
        """The special id with which the template ends an answer, if it shows one."""
        said = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "x"}]
        try:
            before, after = self.ids(said[:1]), self.ids(said, add_generation_prompt=False)
        except ValueError:  # of the template, which may want more of a conversation
            return []
        answer = after[len(before) :] if after[: len(before)] == before else []
        return [i for i in answer if i in self.tokenizer.reserved][:1]


def check_messages(messages):
    if not isinstance(messages, list | tuple) or not messages:
        raise ValueError(f"messages must be a list of at least one dict, got {messages!r:.100}")
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or set(message) != KEYS:
            got = sorted(message) if isinstance(message, dict) else type(message).__name__
            raise ValueError(f"a message must have role and content, got {got} as message {number}")
        if message["role"] not in ROLES:
            got = f"{message['role']!r:.100} as message {number}"
            raise ValueError(f"role must be one of {', '.join(ROLES)}, got {got}")
        check_content(message["content"], number)


def check_content(content, number):
    if not isinstance(content, str):
        got = f"{type(content).__name__} as message {number}"
        raise ValueError(f"content must be a string, got {got}")
    if any("\ud800" <= c <= "\udfff" for c in content):
        rule = "content must be Unicode without lone surrogates"
        raise ValueError(f"{rule}, got one in message {number}")
