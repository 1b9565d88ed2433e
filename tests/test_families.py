"""Import and export of every family: what transformers computes, kformer computes, and back."""

import json
import shutil

import numpy as np
import peers
import pytest

import kformer
from kformer import backend
from kformer.interop.checkpoint import Checkpoint
from kformer.interop.families import FAMILIES
from kformer.interop.header import CheckpointError

TOLERANCE = dict(atol=1e-5, rtol=1e-5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A function: family → a folder with its tiny checkpoint, made once."""
    base = tmp_path_factory.mktemp("families")

    def made(family):
        if not (base / family).exists():
            with peers.quiet():
                peers.peer(family).save_pretrained(base / family)
        return base / family

    return made


def numpy(x):
    return backend.to_numpy(x)


def with_padding():
    """Ids (2, 9) of which the second row has six real ones."""
    ids = peers.ids()
    mask = np.ones(ids.shape, bool)
    mask[1, 6:] = False
    return np.where(mask, ids, 0), mask


def compare(model, peer):
    """Logits and the hidden states of every layer, of all real tokens."""
    ids, mask = with_padding()
    if model.has_source:
        target = peers.ids(length=7, seed=1)
        logits, (encoder, decoder) = peers.run(peer, ids, mask, target)
        source = {"ids": ids, "padding_mask": mask}
        found, states = model({"source": source, "target": target}, return_hidden=True)
        np.testing.assert_allclose(numpy(found), logits, **TOLERANCE)
        pairs = [*zip(states["encoder"], encoder, strict=True)]
        for mine, theirs in pairs:
            np.testing.assert_allclose(numpy(mine)[mask], theirs[mask], **TOLERANCE)
        for mine, theirs in zip(states["decoder"], decoder, strict=True):
            np.testing.assert_allclose(numpy(mine), theirs, **TOLERANCE)
        return
    logits, states = peers.run(peer, ids, mask)
    found, mine = model({"ids": ids, "padding_mask": mask}, return_hidden=True)
    np.testing.assert_allclose(numpy(found)[mask], logits[mask], **TOLERANCE)
    for one, other in zip(mine, states, strict=True):
        np.testing.assert_allclose(numpy(one)[mask], other[mask], **TOLERANCE)


def test_every_family_is_here():
    assert {name.split("-")[0] for name in peers.FAMILIES} == set(FAMILIES)


@pytest.mark.parametrize("family", peers.FAMILIES)
def test_in_and_out(family, folder, tmp_path):
    """In: the same numbers. Out: a folder from which transformers has the same numbers again."""
    model, peer = kformer.from_hf(folder(family)), peers.peer(family)
    compare(model, peer)
    kformer.to_hf(model, tmp_path / "out")
    compare(model, peers.load(tmp_path / "out", type(peer).__name__))


@pytest.mark.parametrize("family", [f for f in peers.FAMILIES if f not in peers.ENCODERS])
def test_generates_the_same(family, folder):
    """32 greedy tokens, and 12 by four beams."""
    model, peer = kformer.from_hf(folder(family)), peers.peer(family)
    prompts = peers.ids(length=8)
    assert model.generate(prompts.tolist(), 32) == peers.generate(peer, prompts, 32)
    beams = model.generate(prompts.tolist(), 12, num_beams=4, length_penalty=0.0)
    assert beams == peers.generate(peer, prompts, 12, beams=4)


@pytest.mark.parametrize("family", ["gpt2", "mistral", "gemma"])
def test_packed(family, folder):
    """Two documents in one row give what each gives alone."""
    model, peer = kformer.from_hf(folder(family)), peers.peer(family)
    ids = peers.ids(rows=1, length=11)
    segments = np.array([[1] * 5 + [2] * 6])
    found = numpy(model({"ids": ids, "segments": segments}))
    for part in (slice(0, 5), slice(5, 11)):
        np.testing.assert_allclose(found[:, part], peers.run(peer, ids[:, part])[0], **TOLERANCE)


@pytest.mark.parametrize("family", ["bert", "qwen3", "t5"])
def test_out_after_training(family, folder, tmp_path):
    model = kformer.from_hf(folder(family))
    ids = peers.ids()
    inputs = {"source": ids, "target": ids} if model.has_source else ids
    model.compile()
    before = numpy(model(inputs))
    model.fit(inputs, ids, epochs=2, verbose=0)
    assert np.abs(numpy(model(inputs)) - before).max() > 1e-4
    kformer.to_hf(model, tmp_path / "out")
    compare(model, peers.load(tmp_path / "out", type(peers.peer(family)).__name__))


CLASSIFIERS = {
    "bert": "Bert",
    "roberta": "Roberta",
    "distilbert": "DistilBert",
    "gpt2": "GPT2",
    "llama": "Llama",
}


@pytest.mark.parametrize("kind", ["Sequence", "Token"])
@pytest.mark.parametrize("family", CLASSIFIERS)
def test_classifiers(family, kind, tmp_path):
    """Their heads in and out, with the names of the classes."""
    name = f"{CLASSIFIERS[family]}For{kind}Classification"
    names = ["bad", "fair", "good"]
    fields = peers.FAMILIES[family][1] | dict(id2label=dict(enumerate(names)), pad_token_id=0)
    peer = peers.make(name, **fields)
    with peers.quiet():
        peer.save_pretrained(tmp_path / "in")
    model = kformer.from_hf(tmp_path / "in")
    assert model.class_names == names
    ids, mask = with_padding()
    want = peers.run(peer, ids, mask)[0]
    found = numpy(model({"ids": ids, "padding_mask": mask}))
    where = mask if kind == "Token" else slice(None)
    np.testing.assert_allclose(found[where], want[where], **TOLERANCE)
    kformer.to_hf(model, tmp_path / "out")
    again = peers.load(tmp_path / "out", name)
    np.testing.assert_allclose(peers.run(again, ids, mask)[0], want, **TOLERANCE)
    assert list(again.config.id2label.values()) == names


def test_new_heads(folder):
    """Another task than the one of the checkpoint: its backbone, and a head of one's own."""
    backbone = kformer.from_hf(folder("bert"), task="encoder")
    ids = peers.ids()
    model = kformer.from_hf(folder("bert"), task="text_classifier", class_names=["no", "yes"])
    assert model.num_classes == 2 and model.class_names == ["no", "yes"]
    np.testing.assert_array_equal(numpy(model.backbone(ids)), numpy(backbone(ids)))
    with pytest.raises(CheckpointError, match="missing: .*classifier.weight"):
        kformer.from_hf(folder("bert"), task="text_classifier")
    with pytest.raises(ValueError, match="num_classes must be left out for task='encoder', got 3"):
        kformer.from_hf(folder("bert"), task="encoder", num_classes=3)
    kind = dict(task="text_classifier", num_classes=4)
    decoder = kformer.from_hf(folder("llama"), **kind)
    assert decoder.causal and decoder.pooling.mode == "last" and decoder(ids).shape == (2, 4)
    with pytest.raises(ValueError, match="task must be one of encoder, masked_lm.*got 'causal_lm'"):
        kformer.from_hf(folder("bert"), task="causal_lm")


def test_a_backbone_by_itself(folder, tmp_path):
    """Without the head, and from a file whose names have no prefix."""
    decoder = kformer.from_hf(folder("llama"), task="decoder")
    kformer.to_hf(decoder, tmp_path / "out")
    peer = peers.load(tmp_path / "out", "LlamaModel")
    ids = peers.ids()
    with peers.torch.no_grad():
        want = peer(peers.torch.tensor(ids)).last_hidden_state.numpy()
    np.testing.assert_allclose(numpy(decoder(ids)), want, **TOLERANCE)
    again = kformer.from_hf(tmp_path / "out")
    np.testing.assert_array_equal(numpy(again(ids)), numpy(decoder(ids)))


SCALINGS = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 3.0},
    "yarn": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8,
        "beta_fast": 4.0, "beta_slow": 0.5,
    },
    "llama3": {
        "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 0.5, "high_freq_factor": 2.0,
        "original_max_position_embeddings": 8,
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", SCALINGS)
def test_rotary_scalings(kind, tmp_path):
    """In and out, on a row that is longer than the original length."""
    scaling = SCALINGS[kind] | {"rope_theta": 500.0}
    fields = peers.DECODER | dict(rope_parameters=scaling, max_position_embeddings=16)
    peer = peers.make("LlamaForCausalLM", **fields)
    with peers.quiet():
        peer.save_pretrained(tmp_path / "in")
    model = kformer.from_hf(tmp_path / "in")
    ids = peers.ids(length=23)
    want = peers.run(peer, ids)[0]
    np.testing.assert_allclose(numpy(model(ids)), want, **TOLERANCE)
    kformer.to_hf(model, tmp_path / "out")
    again = peers.load(tmp_path / "out", "LlamaForCausalLM")
    np.testing.assert_allclose(peers.run(again, ids)[0], want, **TOLERANCE)


def test_vocabulary_after_import(folder, tmp_path):
    model = kformer.from_hf(folder("llama")).resize_vocabulary(50)
    kformer.to_hf(model, tmp_path / "out")
    peer = peers.load(tmp_path / "out", "LlamaForCausalLM")
    assert peer.config.vocab_size == 50
    compare(model, peer)


def test_in_low_precision(folder):
    model = kformer.from_hf(folder("gpt2"), dtype="bfloat16")
    assert {v.dtype for v in model.trainable_variables} == {"bfloat16"}
    exact = kformer.from_hf(folder("gpt2"))
    ids = peers.ids()
    difference = numpy(model(ids)).astype("float32") - numpy(exact(ids))
    assert np.abs(difference).max() < 0.2


REFUSED = {
    "alibi": (dict(position="alibi"), "position='alibi'"),
    "capped": (dict(norm="rms", logit_softcap=5.0), "logit_softcap=5.0"),
    "sandwich": (dict(norm_placement="sandwich", position="learned"), "norm_placement='sandwich'"),
    "offset": (dict(position="learned", position_offset=3, activation="gelu"), "position_offset=3"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_parts_without_a_counterpart_are_named(name, tmp_path):
    changes, part = REFUSED[name]
    size = dict(vocabulary_size=20, num_layers=1, hidden_dim=8, num_heads=2, max_length=16)
    model = kformer.CausalLM(kformer.Config(**size, **changes))
    with pytest.raises(ValueError, match=f"must be those of .*which has no .*{part}"):
        kformer.to_hf(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_classifiers_without_a_counterpart(folder, tmp_path):
    config = kformer.from_hf(folder("bert"), task="encoder").config
    with pytest.raises(ValueError, match="has no pooling='mean'"):
        kformer.to_hf(kformer.TextClassifier(config, 3), tmp_path / "out")
    config = config.replace(pooler=False)
    with pytest.raises(ValueError, match="has no pooler=False"):
        kformer.to_hf(kformer.TextClassifier(config, 3, pooling="first"), tmp_path / "out")


def test_ties_that_do_not_hold(folder, tmp_path):
    """What config.json ties must be one table, or equal ones; what it does not, must be there."""
    with pytest.raises(CheckpointError, match="lm_head.weight must be equal to model.embed_tokens"):
        kformer.from_hf(rewritten(folder("llama"), tmp_path / "a", tie_word_embeddings=True))
    with pytest.raises(CheckpointError, match="1 missing: 'lm_head.weight'"):
        kformer.from_hf(rewritten(folder("gemma"), tmp_path / "b", tie_word_embeddings=False))


def rewritten(folder, target, **changes):
    """A copy of a checkpoint with other values in config.json."""
    shutil.copytree(folder, target)
    path = target / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return target


def test_padding_that_ends_texts(folder, tmp_path):
    """Where both are one id, a language model has no padding, and a classifier pools by it."""
    same = rewritten(folder("llama"), tmp_path / "a", pad_token_id=2, eos_token_id=2)
    assert kformer.from_hf(same).config.pad_id is None
    classifier = kformer.from_hf(same, task="text_classifier", num_classes=2)
    assert classifier.config.pad_id == 2


def test_what_stops_a_load_stops_no_other(folder, monkeypatch):
    """Also Ctrl-C: Keras' list of what has no value yet is gone through to its end."""
    read = Checkpoint.read

    def stopped(self, name):
        if "layers.1" in name:
            raise KeyboardInterrupt
        return read(self, name)

    monkeypatch.setattr(Checkpoint, "read", stopped)
    with pytest.raises(KeyboardInterrupt):
        kformer.from_hf(folder("llama"))
    monkeypatch.undo()
    compare(kformer.from_hf(folder("llama")), peers.peer("llama"))


def test_keys_that_are_passed_over(folder, tmp_path):
    more = dict(is_llama_config=True, rope_interleaved=False, my_rope_parameters=1)
    odd = rewritten(folder("llama"), tmp_path / "a", **more)
    with pytest.raises(
        CheckpointError, match="known keys only, got .'my_rope_parameters'.; ignore"
    ):
        kformer.from_hf(odd)
    for ignore in ("my_rope_parameters", ["my_rope_parameters"]):
        assert kformer.from_hf(odd, ignore=ignore).config.rotary_base == 500.0


def test_over_an_earlier_export(folder, tmp_path):
    """A second export takes the place of the first, and of nothing else."""
    model = kformer.from_hf(folder("gpt2"))
    for _ in range(2):
        kformer.to_hf(model, tmp_path / "out")
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="must be new, empty or an earlier export, got notes.txt"):
        kformer.to_hf(model, tmp_path / "out")
    with pytest.raises(ValueError, match="num_classes must be a whole number above 1, got 0"):
        kformer.from_hf(folder("bert"), task="text_classifier", num_classes=0)
