"""Adapters in files of their own: PEFT's names and shapes, and what is refused."""

import json

import pytest
from support import config, exact, make_model, randomize
from test_adapting import lm, out, stir

import kformer
from kformer.adapters import files
from kformer.adapters.lora import adapted
from kformer.interop.checkpoint import Checkpoint
from kformer.interop.header import CheckpointError

A = "base_model.model.decoder.block_0.self_attention.query.lora_A.weight"


@pytest.mark.parametrize("quantized", [None, "int4"])
def test_there_and_back(quantized, tmp_path):
    """Into a plain model, and into one with adapters of its own; names and shapes are PEFT's."""
    model = lm(quantized=quantized)
    kformer.save_adapters(model, tmp_path / "adapters")
    settings = json.loads((tmp_path / "adapters/adapter_config.json").read_text())
    assert (settings["peft_type"], settings["task_type"]) == ("LORA", "CAUSAL_LM")
    assert (settings["r"], settings["lora_alpha"], settings["modules_to_save"]) == (2, 3, None)
    assert settings["target_modules"][0] == "decoder.block_0.self_attention.query"
    tensors = Checkpoint.open(tmp_path / "adapters", file=files.WEIGHTS).tensors
    assert len(tensors) == 2 * 2 * 2 and tensors[A].shape == (2, 16)
    assert tensors[A.replace("lora_A", "lora_B")].shape == (16, 2)
    other = lm(adapters=False, quantized=quantized)
    assert kformer.load_adapters(other, tmp_path / "adapters") is other
    exact(out(other), out(model))
    kformer.save_adapters(other, tmp_path / "adapters")  # over the earlier one
    stir(model, seed=5)
    assert (out(other) != out(model)).any()
    kformer.load_adapters(model, tmp_path / "adapters")
    exact(out(other), out(model))


def test_heads_are_kept_with_them(tmp_path):
    model = make_model("TextClassifier", config(), num_classes=3)
    kformer.enable_lora(model, 2)
    stir(model)
    randomize(model.classifier, seed=8)
    kformer.save_adapters(model, tmp_path / "adapters")
    settings = json.loads((tmp_path / "adapters/adapter_config.json").read_text())
    assert settings["modules_to_save"] == ["text_classifier.classifier"]
    other = make_model("TextClassifier", config(), num_classes=3)
    kformer.load_adapters(other, tmp_path / "adapters")
    exact(out(other), out(model))
    paths = [[w.path for w in m.trainable_weights] for m in (other, model)]
    assert paths[0] == paths[1]


def test_names_of_hugging_face(tmp_path):
    """A family's names are written, and whatever ends like one of `target_modules` is read."""
    model = lm(attention_sinks=False, position_layout="half")
    kformer.save_adapters(model, tmp_path / "adapters")
    tensors = Checkpoint.open(tmp_path / "adapters", file=files.WEIGHTS).tensors
    name = "base_model.model.model.layers.{}.self_attn.{}_proj.lora_{}.weight"
    assert set(tensors) == {name.format(i, p, m) for i in (0, 1) for p in "qv" for m in "AB"}
    change(tmp_path, target_modules=["q_proj", "v_proj"])
    other = lm(adapters=False, attention_sinks=False, position_layout="half")
    kformer.load_adapters(other, tmp_path / "adapters")
    exact(out(other), out(model))


def change(folder, **changes):
    path = folder / "adapters/adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_another_base_is_refused_with_the_whole_list(tmp_path):
    kformer.save_adapters(lm(), tmp_path / "adapters")
    wide = lm(adapters=False, hidden_dim=24)
    with pytest.raises(CheckpointError, match=r"8 of another shape: .*query.lora_A.* \[2, 16\]"):
        kformer.load_adapters(wide, tmp_path / "adapters")
    assert not adapted(wide)
    shallow = lm(adapters=False, num_layers=1)
    with pytest.raises(CheckpointError, match="4 unexpected: .*block_1.*query.lora_A"):
        kformer.load_adapters(shallow, tmp_path / "adapters")
    change(tmp_path, target_modules=["query", "value", "key"])
    with pytest.raises(CheckpointError, match="4 missing: .*block_0.*key.lora_A"):
        kformer.load_adapters(lm(adapters=False), tmp_path / "adapters")
    change(tmp_path, target_modules=["query"])
    message = (
        "rank 2 on decoder.*query, .* need a model with the same or none, got rank 2 on .*value"
    )
    with pytest.raises(CheckpointError, match=message):
        kformer.load_adapters(lm(), tmp_path / "adapters")


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(peft_type="IA3"), "peft_type of adapter_config.json must be 'LORA', got 'IA3'"),
        (dict(use_dora=True), "use_dora of adapter_config.json must be False, got True"),
        (dict(rank_pattern={"a": 1}), "rank_pattern of .* must be {}, got {'a': 1}"),
        (dict(r=0), "r of adapter_config.json must be above 0, got 0"),
        (dict(r=2.5), "r of .* must be a whole number up to 65536, got 2.5"),
        (dict(lora_alpha="1"), "lora_alpha of .* must be above 0, got '1'"),
        (
            dict(target_modules="(a+)+b"),
            r"target_modules .* a list of names .*, got '\(a\+\)\+b'",
        ),
        (dict(target_modules=["nothing"]), r"must name some of .*, got \['nothing'\]"),
        (dict(modules_to_save=[3]), r"modules_to_save of .* a list of names .*, got \[3\]"),
        (dict(modules_to_save=["lost"]), r"modules_to_save of .* layers of the model, got lost"),
        (dict(auto_map={}), "must not choose code, got 'auto_map'"),
    ],
)
def test_settings_that_are_refused(changes, message, tmp_path):
    kformer.save_adapters(lm(), tmp_path / "adapters")
    change(tmp_path, **changes)
    model = lm(adapters=False)
    with pytest.raises(CheckpointError, match=message):
        kformer.load_adapters(model, tmp_path / "adapters")
    assert not adapted(model)


def test_files_that_are_refused(tmp_path):
    with pytest.raises(ValueError, match="save_adapters needs adapters, got causal_lm without any"):
        kformer.save_adapters(lm(adapters=False), tmp_path / "adapters")
    assert not (tmp_path / "adapters").exists()
    kformer.save_adapters(lm(), tmp_path / "adapters")
    weights = tmp_path / "adapters/adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])
    with pytest.raises(CheckpointError):
        kformer.load_adapters(lm(adapters=False), tmp_path / "adapters")
    weights.unlink()
    with pytest.raises(CheckpointError, match="must hold adapter_model.safetensors, got"):
        kformer.load_adapters(lm(adapters=False), tmp_path / "adapters")
