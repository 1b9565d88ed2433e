"""GGUF files of the Llama and GPT-2 families, by the `gguf` package's reader.

A GGUF file is weights, perhaps in a few bits each, under names of its own, and a dictionary. Both
are turned into what a folder of the hub would say, and then loaded as that is.
"""

import dataclasses
import json
from pathlib import Path

import numpy as np

from kformer.interop.checkpoint import Checkpoint
from kformer.interop.families.decoders import GPT2, LLAMA, SIDE_BY_SIDE
from kformer.interop.header import CheckpointError, Tensor, brief, refusing
from kformer.interop.loading import MODELS, Head, Plan, made_with, without_pad
from kformer.text import Tokenizer

BLOCK = {
    "block_{i}/self_attention/output": "blk.{i}.attn_output",
    "block_{i}/self_attention_norm/before": "blk.{i}.attn_norm",
    "block_{i}/feed_forward/up": "blk.{i}.ffn_up",
    "block_{i}/feed_forward/down": "blk.{i}.ffn_down",
    "block_{i}/feed_forward_norm/before": "blk.{i}.ffn_norm",
}
ENDS = {"embedding/table": "token_embd", "final_norm": "output_norm"}
TABLE = dict(
    base="",
    heads={"causal_lm": {"head": "output"}},
    same=(("token_embd.weight", "output.weight"),),
    ignored=(),
)
FAMILIES = {
    "llama": dataclasses.replace(
        LLAMA,
        parts=ENDS | BLOCK | {
            "block_{i}/self_attention/query": "blk.{i}.attn_q",
            "block_{i}/self_attention/key": "blk.{i}.attn_k",
            "block_{i}/self_attention/value": "blk.{i}.attn_v",
            "block_{i}/feed_forward/gate": "blk.{i}.ffn_gate",
        },
        **TABLE,
    ),
    "gpt2": dataclasses.replace(
        GPT2,
        parts=ENDS | BLOCK | {
            "positions/table": "position_embd", SIDE_BY_SIDE: "blk.{i}.attn_qkv",
        },
        transposed=True,
        **TABLE,
    ),
}  # fmt: skip
# key of config.json → key of the file behind "llama." or "gpt2."
KEYS = {
    "llama": {
        "num_hidden_layers": "block_count",
        "hidden_size": "embedding_length",
        "intermediate_size": "feed_forward_length",
        "num_attention_heads": "attention.head_count",
        "num_key_value_heads": "attention.head_count_kv",
        "head_dim": "attention.key_length",
        "max_position_embeddings": "context_length",
        "rms_norm_eps": "attention.layer_norm_rms_epsilon",
        "rope_theta": "rope.freq_base",
    },
    "gpt2": {
        "n_layer": "block_count",
        "n_embd": "embedding_length",
        "n_inner": "feed_forward_length",
        "n_head": "attention.head_count",
        "n_positions": "context_length",
        "layer_norm_epsilon": "attention.layer_norm_epsilon",
    },
}
# Names of the ways to cut a text before byte pairs are joined, and their regular expressions.
CUTS = {
    "gpt-2": None,
    "llama-bpe": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
SPELLING = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
CONTROL, SPOKEN_FOR = 3, 4  # kinds of tokens: special, and added by whoever trained


def from_gguf(path, dtype=None, allow_nonfinite=False):
    """A `CausalLM` from a GGUF file of the Llama or GPT-2 family, in full precision.

    It needs the extra `gguf`. The tokenizer comes with it where byte pairs express it (gpt-2, Llama
    3, Qwen 2; sentencepiece's by its scores); else `model.tokenizer` is None.

    Args:
        path: the file.
        dtype: dtype policy of the model; None = Keras' default.
        allow_nonfinite: take NaN and infinity among the weights.
    """
    with refusing():
        file = GgufFile(path, allow_nonfinite)
        family = FAMILIES[file.kind]
        config = without_pad(family.read_config(file.config(), "causal_lm"), "causal_lm")
        plan = Plan(family, config, "causal_lm", file, Head({}))
        tokenizer = file.tokenizer(config)
        if tokenizer is not None and config.pad_id is None:
            config = config.replace(pad_id=tokenizer.pad_id)
    make = MODELS["causal_lm"]
    return made_with(plan.values(), lambda: make(config, tokenizer=tokenizer, dtype=dtype))


class GgufFile(Checkpoint):
    """The tensors and the dictionary of a file."""

    def __init__(self, path, allow_nonfinite=False):
        self.path = Path(path)
        self.reader = open_reader(self.path)
        tensors = {}
        for tensor in self.reader.tensors:
            shape = tuple(int(size) for size in reversed(tensor.shape))
            tensors[tensor.name] = Tensor(tensor.name, "F32", shape, self.path, 0, 0)
        super().__init__(tensors, allow_nonfinite)
        self.by_name = {tensor.name: tensor for tensor in self.reader.tensors}
        self.kind = self.said("general.architecture", str)
        if self.kind not in FAMILIES:
            rule = f"general.architecture of {self.path} must be one of {', '.join(FAMILIES)}"
            raise CheckpointError(f"{rule}, got {brief(self.kind)}")

    def said(self, key, kind=object, missing=None):
        """What the dictionary says, as a Python value."""
        field = self.reader.get_field(key)
        value = missing if field is None else failing(self.path, field.contents)
        if field is not None and not isinstance(value, kind):
            raise CheckpointError(
                f"{key} of {self.path} must be a {kind.__name__}, got {brief(value)}"
            )
        return value

    def config(self):
        """What config.json would say."""
        table = self.tensors.get("token_embd.weight")
        if table is None:
            raise CheckpointError(
                f"{self.path} must have token_embd.weight, got {brief([*self.tensors])}"
            )
        hf = {"vocab_size": table.shape[0]}
        for key, theirs in KEYS[self.kind].items():
            value = self.said(f"{self.kind}.{theirs}")
            if value is not None:
                hf[key] = value
        for key in ("bos", "eos", "padding"):
            name = "pad_token_id" if key == "padding" else f"{key}_token_id"
            hf[name] = self.said(f"tokenizer.ggml.{key}_token_id", int)
        own = "output.weight" in self.tensors
        hf["tie_word_embeddings"] = not own or np.array_equal(
            self.read("output.weight"), self.read("token_embd.weight")
        )
        if self.kind == "llama":
            hf |= self.rotary(hf)
            if "blk.0.attn_q.bias" in self.tensors:
                raise CheckpointError(f"{self.path} must have no bias in attention, got one")
        return hf

    def rotary(self, hf):
        kind = self.said("llama.rope.scaling.type", str, "none")
        factor = self.said("llama.rope.scaling.factor", float)
        if "rope_freqs.weight" in self.tensors or kind not in ("none", "linear"):
            rule = f"rotary positions of {self.path} must be plain or scaled linearly"
            raise CheckpointError(f"{rule}, got {kind!r} and {'rope_freqs.weight'!r}")
        width = hf["hidden_size"] // hf["num_attention_heads"]
        turning = self.said("llama.rope.dimension_count", int, hf.get("head_dim", width))
        if turning != hf.get("head_dim", width):
            rule = f"llama.rope.dimension_count of {self.path} must be the width of a head"
            raise CheckpointError(f"{rule}, got {turning}")
        if kind == "none" or factor is None:
            return {}
        return {"rope_scaling": {"type": "linear", "factor": factor}}

    def read(self, name):
        """One tensor in float32; rows of queries and keys in the order of the Llama family."""
        from gguf.quants import dequantize

        tensor = self.by_name[name]
        array = failing(self.path, lambda: dequantize(tensor.data, tensor.tensor_type))
        array = np.asarray(array, np.float32).reshape(self.tensors[name].shape)
        if not self.allow_nonfinite and not np.isfinite(array).all():
            rule = f"tensor {brief(name)} must hold finite numbers"
            raise CheckpointError(f"{rule}, got others in {self.path}")
        for ending, key in (("attn_q.weight", "head_count"), ("attn_k.weight", "head_count_kv")):
            if self.kind == "llama" and name.endswith(ending):
                heads = self.said(f"llama.attention.{key}", int) or self.said(
                    "llama.attention.head_count", int
                )
                # there the two numbers that turn together are neighbours, here half a head apart
                pairs = array.reshape(heads, -1, 2, array.shape[-1])
                array = pairs.swapaxes(1, 2).reshape(array.shape)
        return array

    def tokenizer(self, config):
        """The `kformer.Tokenizer` that the dictionary describes, or None."""
        kind, tokens = (
            self.said("tokenizer.ggml.model", str),
            self.said("tokenizer.ggml.tokens", list),
        )
        cut = self.said("tokenizer.ggml.pre", str, "gpt-2")
        if not tokens or len(set(tokens)) != len(tokens):
            return None
        if kind == "gpt2" and cut in CUTS:
            content = byte_pairs(tokens, self.said("tokenizer.ggml.merges", list), CUTS[cut])
        elif kind == "llama":
            content = sentence_pieces(tokens, self.said("tokenizer.ggml.scores", list))
        else:
            return None
        kinds = self.said("tokenizer.ggml.token_type", list) or []
        content["added_tokens"] = [
            added(i, tokens[i], k == CONTROL)
            for i, k in enumerate(kinds)
            if k in (CONTROL, SPOKEN_FOR)
        ]
        begins = kind == "llama" or cut == "llama-bpe"
        if not self.said("tokenizer.ggml.add_bos_token", bool, begins):
            content["post_processor"] = SPELLING | {"use_regex": True}  # which adds nothing
        special = {name: getattr(config, f"{name}_id") for name in ("pad", "bos", "eos")}
        special = {name: number for name, number in special.items() if number is not None}
        template = self.said("tokenizer.chat_template", str)
        return Tokenizer(json.dumps(content), special, config.vocabulary_size, template)


def added(number, token, special):
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": token, "special": special, **flags}


def byte_pairs(tokens, merges, cut):
    """tokenizer.json of byte-level pairs; cut: the expression that cuts texts, None = GPT-2's."""
    before = SPELLING | {"use_regex": cut is None}
    if cut is not None:
        split = {
            "type": "Split",
            "pattern": {"Regex": cut},
            "behavior": "Isolated",
            "invert": False,
        }
        before = {"type": "Sequence", "pretokenizers": [split, before]}
    model = {"type": "BPE", "vocab": {t: i for i, t in enumerate(tokens)}, "merges": merges or []}
    return {"model": model, "pre_tokenizer": before, "decoder": SPELLING | {"use_regex": True}}


def sentence_pieces(tokens, scores):
    """tokenizer.json of sentencepiece's pairs: two pieces join if the vocabulary has the whole, the
    whole with the best score first; unknown characters become bytes."""
    ids = {token: i for i, token in enumerate(tokens)}
    found = []
    for whole, score in zip(tokens, scores or [], strict=True):
        for at in range(1, len(whole)):
            left, right = whole[:at], whole[at:]
            if left in ids and right in ids:
                found.append((-score, ids[left], ids[right], [left, right]))
    merges = [pair for *_, pair in sorted(found, key=lambda item: item[:3])]
    space = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    decoders = [
        {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ]
    model = {"type": "BPE", "vocab": ids, "merges": merges, "byte_fallback": True, "fuse_unk": True}
    model["unk_token"] = "<unk>" if "<unk>" in ids else None
    return {
        "model": model,
        "normalizer": {
            "type": "Sequence",
            "normalizers": [{"type": "Prepend", "prepend": "\u2581"}, space],
        },
        "decoder": {"type": "Sequence", "decoders": decoders},
    }


def open_reader(path):
    if not path.is_file():
        raise CheckpointError(f"a GGUF file must be a file, got {brief(str(path))}")
    try:
        from gguf import GGUFReader
    except ImportError:
        rule = "to read GGUF files takes the package gguf"
        raise CheckpointError(f"{rule}: pip install 'kformer[gguf]'") from None
    return failing(path, lambda: GGUFReader(path))


def failing(path, action):
    """What the reader of somebody else makes of a broken file, as one error."""
    try:
        return action()
    except (MemoryError, CheckpointError):
        raise
    except Exception as error:
        text = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"{path} must be a whole GGUF file, got: {text[:200]}") from None
