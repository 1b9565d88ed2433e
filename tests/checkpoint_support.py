"""A good checkpoint, and the ways to spoil it; `load` is every check there is."""

import contextlib
import io
import json
import os
import signal
import zipfile
from unittest import mock

import numpy as np

import kformer
from kformer.interop import checkpoint, loading

W, B, H = "model.layers.0.mlp.down_proj.weight", "model.norm.weight", "lm_head.weight"
SHAPES = {
    "model.embed_tokens.weight": (11, 8),
    "model.layers.0.input_layernorm.weight": (8,),
    "model.layers.0.self_attn.q_proj.weight": (8, 8),
    "model.layers.0.self_attn.k_proj.weight": (4, 8),
    "model.layers.0.self_attn.v_proj.weight": (4, 8),
    "model.layers.0.self_attn.o_proj.weight": (8, 8),
    "model.layers.0.post_attention_layernorm.weight": (8,),
    "model.layers.0.mlp.gate_proj.weight": (12, 8),
    "model.layers.0.mlp.up_proj.weight": (12, 8),
    W: (8, 12),
    B: (8,),
    H: (11, 8),
}
DTYPES = {"model.embed_tokens.weight": "F16", H: "BF16"}  # F32 is the rest
CONFIG = dict(
    model_type="llama", architectures=["LlamaForCausalLM"], vocab_size=11, hidden_size=8,
    intermediate_size=12, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
    head_dim=2, max_position_embeddings=32, rms_norm_eps=1e-5, rope_theta=10000.0,
    rope_scaling=None, hidden_act="silu", tie_word_embeddings=False, attention_bias=False,
    mlp_bias=False, bos_token_id=1, eos_token_id=2, pad_token_id=None, torch_dtype="float32",
)  # fmt: skip
SECONDS = 2.0  # of the processor that any checkpoint may take to be refused
ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@contextlib.contextmanager
def patience():
    """Ends what hangs."""

    def late(number, frame):
        raise AssertionError(f"still not refused after {10 * SECONDS} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, 10 * SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Numbers(dict):
    """Path of a weight → array, in place of a model."""


def load(source, **kwargs):
    """Every check of `kformer.from_hf`, and all numbers it reads; but no model is made of them."""

    def read(values, make):
        return Numbers({path: value() for path, value in values.items()})

    with mock.patch.object(loading, "made_with", read):
        return kformer.from_hf(source, **kwargs)


def arrays(seed=0):
    """name → array of the numbers that a file holds (BF16 as the upper half of float32)."""
    random = np.random.default_rng(seed)
    made = {name: random.normal(size=shape).astype("<f4") for name, shape in SHAPES.items()}
    for name, dtype in DTYPES.items():
        half = (made[name].view("<u4") >> 16).astype("<u2")
        made[name] = half if dtype == "BF16" else made[name].astype("<f2")
    return made


def header_of(made):
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, array in made.items():
        start, end = end, end + array.nbytes
        dtype = {"<f4": "F32", "<f2": "F16", "<u2": "BF16"}[array.dtype.str]
        header[name] = {"dtype": dtype, "shape": [*array.shape], "data_offsets": [start, end]}
    return header


def packed(header, data=b"", length=None):
    """The bytes of a safetensors file; `header` may be bytes of any kind."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(raw) if length is None else length).to_bytes(8, "little") + raw + data


def file_of(made, change=lambda header: None):
    header = header_of(made)
    change(header)
    return packed(header, b"".join(array.tobytes() for array in made.values()))


def good(folder):
    """A whole checkpoint in one file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "model.safetensors").write_bytes(file_of(arrays()))
    return folder


def sharded(folder):
    """The same in two files and an index, which is returned."""
    made, names = arrays(), list(SHAPES)
    parts = {ONE: names[:5], TWO: names[5:]}
    for shard, held in parts.items():
        (folder / shard).write_bytes(file_of({name: made[name] for name in held}))
    (folder / "model.safetensors").unlink()
    index = {"metadata": {"total_size": 1}, "weight_map": {}}
    index["weight_map"] = {name: shard for shard, held in parts.items() for name in held}
    (folder / checkpoint.INDEX).write_text(json.dumps(index))
    return index


def zipped(**members):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return out.getvalue()


def saved(value):
    out = io.BytesIO()
    np.savez(out, array=np.array([value]))
    return out.getvalue()


# What makes a case.


def weights(content):
    return file("model.safetensors", content)


def as_bytes(content):
    """Of a text, of bytes, or of what makes one of them when it is needed."""
    content = content() if callable(content) else content
    return content.encode() if isinstance(content, str) else content


def file(name, content):
    """Other bytes under the name of a file."""
    return lambda folder: (folder / name).write_bytes(as_bytes(content))


def header(change):
    """A header with a change: a function of it, or what stands in place of one entry."""

    def make(folder):
        entry = (lambda h: h[W].update(change)) if isinstance(change, dict) else change
        (folder / "model.safetensors").write_bytes(file_of(arrays(), entry))

    return make


def raw(begin, end=b"}", length=None):
    """A header of these bytes around those of the good one."""
    inner = json.dumps(header_of(arrays())).encode()[1:-1]
    data = b"".join(array.tobytes() for array in arrays().values())
    return weights(packed(begin + inner + end, data, length))


def numbers(name, value):
    """One number of a tensor is another."""

    def make(folder):
        made = arrays()
        made[name].reshape(-1)[3] = value
        (folder / "model.safetensors").write_bytes(file_of(made))

    return make


def tensors(change):
    """Other tensors than the model needs."""

    def make(folder):
        made = arrays()
        change(made)
        (folder / "model.safetensors").write_bytes(file_of(made))

    return make


def index(change):
    """An index that a function of folder and index changed."""

    def make(folder):
        found = sharded(folder)
        change(folder, found)
        (folder / checkpoint.INDEX).write_text(json.dumps(found))

    return make


def index_text(content):
    """Other bytes in place of an index."""

    def make(folder):
        sharded(folder)
        (folder / checkpoint.INDEX).write_bytes(as_bytes(content))

    return make


def shard(name):
    """An index that names its second shard so, where one lies that could be read."""

    def change(folder, found):
        for tensor, where in found["weight_map"].items():
            found["weight_map"][tensor] = name if where == TWO else where
        try:
            place = folder / name
            place.parent.mkdir(exist_ok=True)
            os.replace(folder / TWO, place)
        except (OSError, ValueError):
            pass  # a name that no file can have

    return index(change)


def config(**changes):
    return file("config.json", json.dumps({**CONFIG, **changes}))


def instead(name, how):
    """Something that is no file under the name of one."""

    def make(folder):
        if name not in ("config.json", "model.safetensors"):
            sharded(folder)
        (folder / name).unlink()
        how(folder / name)

    return make


def link(name, target, move=True):
    """A link under the name of a file, to where this file lies now."""

    def make(folder):
        if name not in ("config.json", "model.safetensors"):
            sharded(folder)
        place = folder / target
        place.parent.mkdir(exist_ok=True)
        if move:
            os.replace(folder / name, place)
        else:
            (folder / name).unlink()
        (folder / name).symlink_to(place)

    return make
