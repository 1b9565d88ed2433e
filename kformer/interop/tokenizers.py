"""Tokenizers of Hugging Face checkpoints: `tokenizer.json` and what stands beside it."""

import json
from pathlib import Path

from kformer import files
from kformer.interop.checkpoint import contained
from kformer.interop.header import CheckpointError, brief, refusing
from kformer.text.tokenizer import MAX_BYTES, NAMES, Tokenizer

TOKENS, SETTINGS, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
MAX_SETTINGS = 2**24  # some list thousands of unused tokens
# Encoders call what stands around a text [CLS] and [SEP].
KEYS = {name: (f"{name}_token",) for name in NAMES}
KEYS |= {"bos": ("bos_token", "cls_token"), "eos": ("eos_token", "sep_token")}
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def read_tokenizer(folder, vocabulary_size=None, *, pad_id=None, bos_id=None, eos_id=None):
    """The `kformer.Tokenizer` of a checkpoint's folder, or None where there is no tokenizer.json.

    Args:
        folder: with tokenizer.json, and perhaps tokenizer_config.json and chat_template.jinja.
        vocabulary_size: how many ids the model has; it may be more than the file has.
        pad_id, bos_id, eos_id: special ids that the model's own files name; None = the tokenizer's.
    """
    folder = Path(folder)
    if not (folder / TOKENS).exists():
        return None
    with refusing():
        text, content = read_object(folder, TOKENS, MAX_BYTES)
        settings = {}
        if (folder / SETTINGS).exists():
            _, settings = read_object(folder, SETTINGS, MAX_SETTINGS)
        known = dict(pad=pad_id, bos=bos_id, eos=eos_id)
        known = {name: number for name, number in known.items() if number is not None}
        special = {**named_tokens(settings), **known}
        text = json.dumps(content) if add_tokens(content, settings) else text
        template = read_chat_template(folder, settings)
        return Tokenizer(text, special, vocabulary_size, template)


def read_object(folder, name, limit):
    """The text of a file, and what it holds."""
    text = files.read_text(contained(folder, name), limit, name)
    content = files.parse_json(text, name)
    if not isinstance(content, dict):
        got = type(content).__name__
        raise CheckpointError(f"{name} must hold one JSON object, got {got}")
    return text, content


def named_tokens(settings):
    """{"bos": "<s>", "pad": None, ...}; nothing where the settings name no token at all."""
    texts = {
        name: [token_text(settings[key], key) for key in keys if key in settings]
        for name, keys in KEYS.items()
    }
    if not any(texts.values()):
        return {}
    found = {name: next(filter(None, values), None) for name, values in texts.items()}
    if found["pad"] in (found["bos"], found["eos"]):
        found["pad"] = None  # batches need one; to take it for padding would hide where texts end
    return found


def token_text(value, key):
    """A token stands there as a string, or as a dict with its content."""
    text = value.get("content") if isinstance(value, dict) else value
    if text is not None and not isinstance(text, str):
        raise CheckpointError(f"{key} of a tokenizer must be a token or null, got {brief(value)}")
    return text


def add_tokens(content, settings):
    """Tokens that only the settings know, or know to be special, go into the file's content. True
    if there were such."""
    added = content.get("added_tokens")
    whole = isinstance(added, list) and all(isinstance(token, dict) for token in added)
    if not whole or not all(isinstance(token.get("content"), str) for token in added):
        return False  # nothing to add to, or refused later
    listed = listed_tokens(settings)
    there = {token_text(token, "added_tokens") for token in added}
    new = [token for token in listed if token["content"] not in there]
    added += new
    special = {token["content"] for token in listed if token["special"]}
    for key in ("additional_special_tokens", "extra_special_tokens"):
        values = settings.get(key) or []
        values = [*values.values()] if isinstance(values, dict) else values
        if not isinstance(values, list):
            raise CheckpointError(f"{key} in {SETTINGS} must list tokens, got {brief(values)}")
        special |= {token_text(value, key) for value in values}
    plain = [t for t in added if t.get("content") in special and t.get("special") is not True]
    for token in plain:
        token["special"] = True
    return bool(new or plain)


def listed_tokens(settings):
    """The added tokens as the settings list them, as entries of a tokenizer.json."""
    decoder, out = settings.get("added_tokens_decoder", {}), []
    if not isinstance(decoder, dict) or not all(isinstance(t, dict) for t in decoder.values()):
        rule = f"added_tokens_decoder in {SETTINGS} must hold tokens by id"
        raise CheckpointError(f"{rule}, got {brief(decoder)}")
    for number, token in decoder.items():
        flags = {flag: bool(token.get(flag)) for flag in FLAGS}
        out.append({"id": int(number), "content": token_text(token, number), **flags})
    return sorted(out, key=lambda token: token["id"])


def read_chat_template(folder, settings):
    """The file's text, or what the settings have: a text, or several by name."""
    if (folder / TEMPLATE).exists():
        return files.read_text(contained(folder, TEMPLATE), 2**20, TEMPLATE)
    found = settings.get("chat_template")
    if not isinstance(found, list):
        return found
    pairs = [one if isinstance(one, dict) else {} for one in found]
    return next((one.get("template") for one in pairs if one.get("name") == "default"), None)


def tokenizer_texts(tokenizer):
    """{file name: text} of what `transformers.AutoTokenizer` loads, and `read_tokenizer`."""
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for name in NAMES:
        number = getattr(tokenizer, f"{name}_id")
        token = None if number is None else tokenizer.native.id_to_token(number)
        settings[f"{name}_token"] = token
    if tokenizer.template == ([tokenizer.bos_id], [tokenizer.eos_id]):
        settings.update(cls_token=settings["bos_token"], sep_token=settings["eos_token"])
    texts = {TOKENS: tokenizer.to_json(), SETTINGS: json.dumps(settings, indent=2) + "\n"}
    if tokenizer.chat_template is not None:
        texts[TEMPLATE] = tokenizer.chat_template
    return texts
