"""Tiny checkpoints with random weights, made and run by `transformers` (on torch, whatever Keras'
backend is): what import and export are compared with. Nothing in them has its default."""

import contextlib
import functools
import warnings

import numpy as np
import torch
import transformers

transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

V = 37
ENCODER = dict(
    vocab_size=V, hidden_size=18, num_hidden_layers=2, num_attention_heads=3, intermediate_size=26,
    max_position_embeddings=40, layer_norm_eps=1e-3, pad_token_id=0,
)  # fmt: skip
DECODER = dict(
    vocab_size=V, hidden_size=24, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, intermediate_size=26, max_position_embeddings=64, rms_norm_eps=1e-3,
    tie_word_embeddings=False, bos_token_id=1, eos_token_id=None, pad_token_id=None,
    rope_parameters={"rope_type": "default", "rope_theta": 500.0},
)  # fmt: skip
SIDES = dict(
    vocab_size=V, d_model=18, encoder_layers=2, decoder_layers=3, encoder_attention_heads=3,
    decoder_attention_heads=3, encoder_ffn_dim=26, decoder_ffn_dim=26, max_position_embeddings=40,
    pad_token_id=0, eos_token_id=None, bos_token_id=None, forced_eos_token_id=None,
    decoder_start_token_id=2, scale_embedding=True,
)  # fmt: skip
T5 = dict(
    vocab_size=V, d_model=18, d_kv=5, d_ff=26, num_layers=3, num_decoder_layers=2, num_heads=3,
    relative_attention_num_buckets=10, relative_attention_max_distance=12, eos_token_id=None,
    layer_norm_epsilon=1e-3, decoder_start_token_id=0, initializer_factor=0.3,
)  # fmt: skip
# family: (class, fields of its configuration)
FAMILIES = {
    "bert": ("BertForMaskedLM", ENCODER | dict(hidden_act="gelu_new", type_vocab_size=3)),
    "roberta": ("RobertaForMaskedLM", ENCODER | dict(type_vocab_size=1, pad_token_id=0)),
    "distilbert": ("DistilBertForMaskedLM", dict(
        vocab_size=V, dim=18, n_layers=2, n_heads=3, hidden_dim=26, max_position_embeddings=40,
        activation="relu",
    )),
    "gpt2": ("GPT2LMHeadModel", dict(
        vocab_size=V, n_embd=18, n_layer=3, n_head=3, n_inner=26, n_positions=64,
        layer_norm_epsilon=1e-3, bos_token_id=1, eos_token_id=None,
    )),
    "llama": ("LlamaForCausalLM", DECODER | dict(attention_bias=True, mlp_bias=True, head_dim=10)),
    "mistral": ("MistralForCausalLM", DECODER | dict(sliding_window=4)),
    "qwen2": ("Qwen2ForCausalLM", DECODER | dict(
        use_sliding_window=True, sliding_window=3, max_window_layers=1, tie_word_embeddings=True,
    )),
    "qwen3": ("Qwen3ForCausalLM", DECODER | dict(head_dim=10)),
    "gemma": ("GemmaForCausalLM", DECODER | dict(head_dim=10, tie_word_embeddings=True)),
    "mixtral": ("MixtralForCausalLM", DECODER | dict(
        num_local_experts=3, num_experts_per_tok=2, intermediate_size=28,
    )),
    "t5": ("T5ForConditionalGeneration", T5),
    "t5-1.1": ("T5ForConditionalGeneration", T5 | dict(
        feed_forward_proj="gated-gelu", tie_word_embeddings=False,
    )),
    "bart": ("BartForConditionalGeneration", SIDES | dict(activation_function="silu")),
    "marian": ("MarianMTModel", SIDES | dict(decoder_vocab_size=V)),
    "m2m_100": ("M2M100ForConditionalGeneration", SIDES),
}  # fmt: skip
WITH_SOURCE = ("t5", "t5-1.1", "bart", "marian", "m2m_100")
ENCODERS = ("bert", "roberta", "distilbert")


def make(name, **fields):
    """A model of a class of transformers with random numbers in every weight."""
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**fields)).eval()
    for parameter in model.parameters():
        if parameter.requires_grad:  # sinusoids are among them, and are not learned
            parameter.data += 0.15 * torch.randn_like(parameter)
    for buffer_name, buffer in model.named_buffers():
        if buffer_name.endswith("final_logits_bias"):
            buffer.copy_(torch.randn_like(buffer))
    return model


@functools.cache
def peer(family):
    name, fields = FAMILIES[family]
    return make(name, **fields)


def load(folder, name):
    """What transformers reads from a folder; nothing may be missing, left over or misfit."""
    with quiet():
        model, found = getattr(transformers, name).from_pretrained(folder, output_loading_info=True)
    assert not any(found.values()), found
    return model.eval()


@contextlib.contextmanager
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def ids(rows=2, length=9, seed=0):
    return np.random.default_rng(seed).integers(3, V, (rows, length))


def run(model, source, mask=None, target=None):
    """(logits, hidden states of every layer: a list, or one for each side) as NumPy."""
    given = dict(input_ids=torch.tensor(source), output_hidden_states=True)
    if mask is not None:
        given["attention_mask"] = torch.tensor(mask.astype("int64"))
    if target is not None:
        given["decoder_input_ids"] = torch.tensor(target)
    with torch.no_grad(), quiet():
        out = model(**given)
    if target is not None:
        sides = out.encoder_hidden_states, out.decoder_hidden_states
        return out.logits.numpy(), [[h.numpy() for h in side] for side in sides]
    return out.logits.numpy(), [h.numpy() for h in out.hidden_states]


def generate(model, prompts, length, beams=1):
    """What the model writes, padding excepted, which kformer never writes."""
    given = dict(max_new_tokens=length, do_sample=False, num_beams=beams, length_penalty=0.0)
    if model.config.pad_token_id is not None:
        given["suppress_tokens"] = [model.config.pad_token_id]
    with torch.no_grad(), quiet():
        out = model.generate(torch.tensor(prompts), pad_token_id=0, **given).numpy()
    start = 1 if model.config.is_encoder_decoder else prompts.shape[1]
    return out[:, start:].tolist()
