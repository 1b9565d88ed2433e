"""What a `tokenizer.json` must be before the `tokenizers` library takes it, and what is read off it
then. The library trusts its files; whatever it raises, panics included, is one ValueError."""

import contextlib

from kformer import files
from kformer.config import check_whole


@contextlib.contextmanager
def native_errors():
    """Whatever the native library raises, panics included, as one ValueError."""
    try:
        yield
    except (ValueError, MemoryError):
        raise
    except BaseException as error:
        is_panic = type(error).__name__ == "PanicException"  # which is no Exception
        if not is_panic and not isinstance(error, Exception):
            raise
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"the tokenizer failed on this: {first[:300]}") from None


def read_content(json_text):
    """The file, parsed and checked."""
    content = files.parse_json(json_text, "a tokenizer file")
    if not isinstance(content, dict):
        got = type(content).__name__
        raise ValueError(f"a tokenizer file must hold one JSON object, got {got}")
    check_limits(content)
    return content


def check_limits(content):
    """Refuses lengths that cannot be, which make the native library panic."""
    cut, padding = content.get("truncation"), content.get("padding")
    if isinstance(cut, dict):
        length, stride = cut.get("max_length"), cut.get("stride", 0)
        if not (isinstance(length, int) and isinstance(stride, int) and 0 <= stride < length):
            rule = "truncation in a tokenizer file must have a stride below its max_length"
            raise ValueError(f"{rule}, got stride={stride!r}, max_length={length!r}")
    if isinstance(padding, dict) and padding.get("strategy") == {"Fixed": 0}:
        raise ValueError("padding in a tokenizer file must be to at least 1 token, got 0")


def load_native(json_text):
    """The library's tokenizer, to which a text that spells a special token is plain text. It
    neither cuts nor pads: batches are made elsewhere."""
    import tokenizers

    with native_errors():
        native = tokenizers.Tokenizer.from_str(json_text)
        native.no_truncation()
        native.no_padding()
        native.encode_special_tokens = True
        native.encode_batch_fast(["Probe 1: ^ \u00e9\n"])
    return native


def checked_size(native, added, size):
    """How many ids there are: those of the file must be 0, 1, 2, ... each once; or with a given
    size below it, each once. What stands for the unknown must be among the tokens."""
    ids = sorted(native.get_vocab(with_added_tokens=True).values())
    if not ids:
        raise ValueError("a tokenizer file must have tokens, got none")
    wrong = next((place for place, i in enumerate(ids) if i != place), None)
    if size is not None:
        check_whole(ids[-1] + 1, vocabulary_size=size)
        wrong = next((place for place in range(1, len(ids)) if ids[place - 1] == ids[place]), None)
    if wrong is not None or len(ids) != native.get_vocab_size():
        rule = f"ids in a tokenizer file must be 0 to {len(ids) - 1}, each once"
        got = "a token twice" if wrong is None else f"{ids[wrong]} in place of {wrong}"
        raise ValueError(f"{rule}, got {got}")
    for token in added:  # the native library would give it another id, and only log it
        if (found := native.token_to_id(token["content"])) != token["id"]:
            rule = f"the added token {token['content']!r} must have the id {found}"
            raise ValueError(f"{rule}, got {token['id']!r}")
    unk = getattr(native.model, "unk_token", None)
    if unk is not None and native.token_to_id(unk) is None:
        raise ValueError(f"unk_token must be in the vocabulary, got {unk!r}")
    return len(ids) if size is None else int(size)


def read_template(native, size):
    """(ids before, ids after) that the file puts around a text; None if it says nothing."""
    from tokenizers import Tokenizer, models

    if native.post_processor is None:
        return None
    text = 2**32 - 1  # an id that no template has
    with native_errors():
        probe = Tokenizer(models.WordLevel({"x": text}, unk_token="x"))
        probe.post_processor = native.post_processor
        ids = probe.encode("x").ids
    others = [i for i in ids if i != text]
    if len(others) + 1 != len(ids) or not all(i < size for i in others):
        rule = f"post_processor must put ids below {size} around a text"
        raise ValueError(f"{rule}, got {str(ids).replace(str(text), 'text')[:100]}")
    place = ids.index(text)
    return ids[:place], ids[place + 1 :]


def make_special(native, ids):
    """Tokens with these ids are special from now on, whatever the file says."""
    from tokenizers import AddedToken

    known = native.get_added_tokens_decoder()
    for number in ids:
        text = native.id_to_token(number)
        if text and not (number in known and known[number].special):
            native.add_special_tokens([AddedToken(text, normalized=False, special=True)])


def reserved_ids(native, content, named):
    """Ids that no text may become: special ones, but what stands for the unknown."""
    known = native.get_added_tokens_decoder()
    unk = getattr(native.model, "unk_token", None)
    unk = content["model"].get("unk_id") if unk is None else native.token_to_id(unk)
    special = {number for number, token in known.items() if token.special}
    return frozenset(special | named) - {unk}
