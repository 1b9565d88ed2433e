"""What the tests of generation share: small models that write, and decoding without a cache."""

import functools
import itertools

import numpy as np
from support import CONFIGS, config, make_model, run

import kformer

EOS = 3
WRITERS = [
    ("CausalLM", "sinusoidal"), ("CausalLM", "gpt2"), ("CausalLM", "llama"), ("CausalLM", "qwen"),
    ("CausalLM", "alibi"), ("CausalLM", "sandwich"), ("CausalLM", "experts"),
    ("Seq2SeqLM", "t5"), ("Seq2SeqLM", "marian"),
]  # fmt: skip
PROMPTS = [[5, 6, 7], [4, 9, 8, 11, 12], [13], [14, 15]]


def make_writer(kind, name):
    settings = CONFIGS[name]
    bos = 1 if settings.bos_id is None else settings.bos_id
    return make_model(kind, settings.replace(bos_id=bos, eos_id=EOS))


writer = functools.cache(make_writer)  # what is compiled for one test serves the next


def next_logits(model, prompt, out):
    """Logits (steps, V) of the tokens after the prompt by one forward pass, without a cache."""
    if model.has_source:
        target = np.array([[model.config.bos_id, *out]])
        logits = run(model, {"source": np.array([prompt]), "target": target})[0]
    else:
        logits = run(model, np.array([[*prompt, *out]]))[0, len(prompt) - 1 :]
    return logits.astype("float64")


def uncached(model, prompt, out):
    """log p (steps, V) of the tokens after the prompt, without a cache."""
    logits = next_logits(model, prompt, out)
    logits -= logits.max(axis=-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def without_cache(model, prompt, limit, change=lambda logits, out: None, banned=0):
    """Greedy decoding by a whole forward pass for every token."""
    out, log_probs = [], []
    for _ in range(limit):
        logits, normal = (f(model, prompt, out)[-1] for f in (next_logits, uncached))
        if banned is not None:
            logits[model.config.pad_id] = -np.inf
        change(logits, out)
        chosen = int(logits.argmax())
        log_probs.append(normal[chosen])
        if chosen == EOS:
            break
        out.append(chosen)
    return out, log_probs


def talker():
    """A model that knows the alphabet: after id n comes id n + 1, and after "z" comes "é–"."""
    text = "abcdefghijklmnopqrstuvwxyz é–"
    tokenizer = kformer.Tokenizer.train([text], 300, "byte")
    settings = config(vocabulary_size=tokenizer.vocabulary_size, num_layers=1, position="none")
    model = make_model("CausalLM", settings.replace(tie_embeddings=False), tokenizer=tokenizer)
    size, width = tokenizer.vocabulary_size, settings.hidden_dim
    assert width == 16
    for weight in model.weights:
        weight.assign(np.zeros(weight.shape))
    random = np.random.default_rng(0)
    table = random.normal(size=(size, width))
    names = {weight.path: weight for weight in model.weights}
    names["decoder/embedding/table/embeddings"].assign(table)
    names["decoder/final_norm/gamma"].assign(np.ones(width))
    normal = table - table.mean(axis=1, keepdims=True)
    normal /= np.sqrt((normal**2).mean(axis=1, keepdims=True) + 1e-5)
    follows = np.eye(size)[(np.arange(size) + 1) % size]
    for a, b in itertools.pairwise(tokenizer.encode("zé–")):
        follows[:, b] = 0.0
        follows[a] = np.eye(size)[b]
    names["causal_lm/head/kernel"].assign(30.0 * normal.T @ follows / width)
    return model
