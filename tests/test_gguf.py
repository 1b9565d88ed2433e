"""GGUF files: written here from the weights of a model, read by kformer and by transformers."""

import numpy as np
import peers
import pytest

import kformer
from kformer import backend
from kformer.interop.gguf_files import FAMILIES
from kformer.interop.header import CheckpointError
from kformer.weights import path_in, weight_shapes

LLAMA = kformer.Config(
    vocabulary_size=45, num_layers=2, hidden_dim=32, num_heads=4, num_key_value_heads=2,
    intermediate_dim=64, norm="rms", norm_epsilon=1e-3, position="rotary", rotary_base=500.0,
    gated=True, activation="silu", use_bias=False, tie_embeddings=False, pad_id=None, bos_id=1,
    eos_id=2,
)  # fmt: skip
GPT2 = kformer.Config(
    vocabulary_size=45, num_layers=2, hidden_dim=32, num_heads=4, position="learned", max_length=16,
    activation="gelu_tanh", pad_id=None,
)  # fmt: skip
CASES = {"llama": LLAMA, "gpt2": GPT2}


def interleaved(array, heads):
    """The order of rows of queries and keys in these files."""
    pairs = array.reshape(heads, 2, -1, array.shape[-1])
    return pairs.swapaxes(1, 2).reshape(array.shape)


def entries(kind, c):
    """What the dictionary of the file says."""
    out = {
        "block_count": c.num_layers, "embedding_length": c.hidden_dim,
        "feed_forward_length": c.inner_dim, "attention.head_count": c.num_heads,
        "context_length": c.max_length, "vocab_size": c.vocabulary_size,
    }  # fmt: skip
    if kind == "llama":
        out |= {"attention.head_count_kv": c.key_value_heads, "rope.freq_base": c.rotary_base}
        out |= {"attention.layer_norm_rms_epsilon": c.norm_epsilon}
        return out | {"rope.dimension_count": c.head_width}
    return out | {"attention.layer_norm_epsilon": c.norm_epsilon}


def written(path, kind, model, changes=None, quantized=(), more=lambda writer: None):
    """A file with the weights of a model."""
    import gguf

    c, family = model.config, FAMILIES[kind]
    writer = gguf.GGUFWriter(path, kind)
    for key, value in (entries(kind, c) | (changes or {})).items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(f"{kind}.{key}", value)
    weights = {path_in(model, v.path): backend.to_numpy(v) for v in model.trainable_variables}
    for link in family.links(c, weight_shapes(c, "causal_lm"), "causal_lm", ""):
        (name,) = link.tensors
        array = family.to_tensor(link, 0, [weights[path] for path in link.weights])
        for part, heads in (("attn_q.", c.num_heads), ("attn_k.", c.key_value_heads)):
            array = interleaved(array, heads) if part in name else array
        array, raw = np.ascontiguousarray(array, "float32"), None
        if any(part in name for part in quantized):
            raw = gguf.GGMLQuantizationType.Q8_0
            array = gguf.quants.quantize(array, raw)
        writer.add_tensor(name, array, raw_dtype=raw)
    more(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(params=CASES)
def kind(request):
    return request.param


def make(kind):
    model = kformer.CausalLM(CASES[kind])
    rng = np.random.default_rng(0)
    for v in model.trainable_variables:
        v.assign(backend.to_numpy(v) + 0.1 * rng.normal(size=v.shape).astype("float32"))
    return model


def test_same_numbers(kind, tmp_path):
    model = make(kind)
    again = kformer.from_gguf(written(tmp_path / "a.gguf", kind, model))
    assert again.config.num_key_value_heads in (None, 2) and again.tokenizer is None
    for mine, theirs in zip(again.weights, model.weights, strict=True):
        np.testing.assert_array_equal(backend.to_numpy(mine), backend.to_numpy(theirs))
    ids = np.arange(3, 12)[None]
    found, want = backend.to_numpy(again(ids)), backend.to_numpy(model(ids))
    np.testing.assert_allclose(found, want, atol=1e-6, rtol=1e-6)
    kformer.to_hf(model, tmp_path / "hf")
    with peers.quiet():
        config = peers.transformers.AutoConfig.from_pretrained(tmp_path / "hf")
        kind = peers.transformers.AutoModelForCausalLM
        peer = kind.from_pretrained(tmp_path, gguf_file="a.gguf", config=config)
    np.testing.assert_allclose(found, peers.run(peer, ids)[0], atol=1e-5, rtol=1e-5)


def test_eight_bits(tmp_path):
    """Dequantised to within half a step of each block's scale."""
    model = make("llama")
    path = written(tmp_path / "a.gguf", "llama", model, quantized=("ffn_up", "attn_q"))
    again = kformer.from_gguf(path)
    for mine, theirs in zip(again.weights, model.weights, strict=True):
        mine, theirs = backend.to_numpy(mine), backend.to_numpy(theirs)
        step = np.abs(theirs).max() / 127
        assert np.abs(mine - theirs).max() <= 0.6 * step
    changed = [
        mine.path for mine, theirs in zip(again.weights, model.weights, strict=True)
        if (backend.to_numpy(mine) != backend.to_numpy(theirs)).any()
    ]  # fmt: skip
    assert changed and all("/up/" in path or "/query/" in path for path in changed)


def test_what_cannot_be_is_refused(tmp_path):
    model = make("llama")
    path = written(tmp_path / "a.gguf", "llama", model, {"block_count": 3})
    with pytest.raises(CheckpointError, match="9 missing: 'blk.2.attn_q.weight'"):
        kformer.from_gguf(path)
    path = written(tmp_path / "b.gguf", "llama", model, {"rope.dimension_count": 4})
    with pytest.raises(
        CheckpointError, match="dimension_count.*must be the width of a head, got 4"
    ):
        kformer.from_gguf(path)
    for size in (3, 100, path.stat().st_size - 64):
        (tmp_path / "cut.gguf").write_bytes(path.read_bytes()[:size])
        with pytest.raises(CheckpointError, match="cut.gguf must be a whole GGUF file"):
            kformer.from_gguf(tmp_path / "cut.gguf")
    with pytest.raises(CheckpointError, match="a GGUF file must be a file, got"):
        kformer.from_gguf(tmp_path / "nothing.gguf")


TEXTS = ["to be or not to be", "that is the question", "whether 'tis nobler in the mind"] * 9
NASTY = ["to be, or 12 345?", "  two  spaces \n", "héllo ✓ 日本", "<s>the</s>", ""]


def with_tokens(tmp_path, tokens, *, model, merges=None, scores=None):
    """A Llama with these tokens, of which the first three are special."""
    c = LLAMA.replace(vocabulary_size=len(tokens), num_layers=1)

    def more(writer):
        writer.add_tokenizer_model(model)
        writer.add_token_list(tokens)
        writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        if merges is not None:
            writer.add_token_merges(merges)
        if scores is not None:
            writer.add_token_scores(scores)

    return kformer.from_gguf(written(tmp_path / "a.gguf", "llama", kformer.CausalLM(c), more=more))


def test_byte_pairs(tmp_path):
    import json

    trained = kformer.Tokenizer.train(TEXTS, 290)
    content = json.loads(trained.to_json())["model"]
    merges = [m if isinstance(m, str) else " ".join(m) for m in content["merges"]]
    tokens = trained.tokens(range(trained.vocabulary_size))
    model = with_tokens(tmp_path, tokens, model="gpt2", merges=merges)
    for text in TEXTS[:3] + NASTY:
        ids = model.tokenizer.encode(text)
        assert ids == trained.encode(text) and model.tokenizer.decode(ids) == text
    assert (model.tokenizer.bos_id, model.tokenizer.eos_id) == (1, 2)
    assert isinstance(model.generate("to be", 5), str)
    assert model.encode_prompts(["to be"]) == [trained.encode("to be")]  # no bos unless it is said


def test_sentence_pieces(tmp_path):
    """Pairs are joined by their scores; what no piece spells becomes bytes."""
    from tokenizers import Tokenizer, decoders, models, normalizers, trainers

    special = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    native = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    steps = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    native.normalizer = normalizers.Sequence(steps)
    native.decoder = decoders.ByteFallback()
    native.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=320, special_tokens=special))
    tokens = [native.id_to_token(i) for i in range(native.get_vocab_size())]
    scores = [float(-i) for i in range(len(tokens))]
    model = with_tokens(tmp_path, tokens, model="llama", scores=scores)
    native.encode_special_tokens = True
    for text in TEXTS[:3] + NASTY[:3]:
        ids = model.tokenizer.encode(text)
        assert ids == native.encode(text).ids, text
        assert model.tokenizer.decode(ids) == text
    assert model.encode_prompts(["to be"])[0][0] == 1
