"""A language model: texts in, more text out.

    python recipes/language_model.py
    python recipes/language_model.py --data input.txt --kind char --preset nanogpt-cpu --no-pack
    python recipes/language_model.py --data input.txt --from PATH --lora 8

Without --data it learns from the documentation of Python's standard library, about 2 MB that come
with every Python.

torch, one core, means of seeds 0, 1, 2, 2026-11-18, on Tiny Shakespeare, 2000 steps of 12 x 64
characters: the second command with --batch-size 12 --steps 2000 ends at a validation loss of 1.78
nats; this recipe's own parts and Muon, at the same size and budget, at 1.58:

    --num-layers 4 --hidden-dim 128 --num-heads 4 --intermediate-dim 341 --length 64
    --optimizer muon --learning-rate 0.01
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import math

import keras

import kformer
from kformer import runs
from kformer.text import corpora

MODEL = dict(num_layers=4, hidden_dim=192, num_heads=6, position="rotary", norm="rms", gated=True,
             activation="silu", intermediate_dim=512, use_bias=False, max_length=128)  # fmt: skip


def parse_arguments():
    parser = runs.parser(__doc__, MODEL, epochs=4, learning_rate=2e-3)
    add = parser.add_argument
    add("--from", dest="source", metavar="PATH", help="go on from a language model of Hugging "
        "Face and its tokenizer, a folder or an id; sizes are then its own")  # fmt: skip
    add("--lora", type=int, help="train adapters of this rank only, beside frozen weights")
    add("--kind", choices=("bpe", "char", "byte"), default="bpe", help="of the tokens")
    add("--vocabulary-size", type=int, default=2000, help="of a BPE, at most")
    add("--length", type=int, help="tokens in a row; the model's max_length by default")
    add("--batch-size", type=int, default=16, help="rows in a batch")
    add("--no-pack", action="store_true", help="one stream of text instead of packed documents")
    add("--optimizer", choices=("adamw", "muon"), default="adamw", help="what moves the weights")
    add("--weight-decay", type=float, default=0.1, help="of matrices")
    add("--prompt", help="what the samples start with; by default the start of a validation text")
    known, _ = parser.parse_known_args()
    if known.source:  # what has learned already needs less
        parser.set_defaults(epochs=1, learning_rate=1e-3 if known.lora else 1e-4)
    args = parser.parse_args()
    if args.lora is not None and not args.source:
        raise ValueError(f"--lora needs a model that has learned: --from PATH, got {args.lora}")
    return args


def make_model(run, args, texts):
    """From nothing, with a tokenizer for these texts, or from a checkpoint."""
    if args.source:
        model = kformer.from_hf(args.source, task="causal_lm")
        if args.lora is not None:
            kformer.enable_lora(model, args.lora)
        return model
    tokenizer = run.tokenizer(
        lambda: kformer.Tokenizer.train(texts, args.vocabulary_size, args.kind)
    )
    config = run.config(vocabulary_size=tokenizer.vocabulary_size, pad_id=tokenizer.pad_id,
                        bos_id=tokenizer.bos_id, eos_id=tokenizer.eos_id)  # fmt: skip
    return kformer.CausalLM(config, tokenizer=tokenizer)


def make_optimizer(run, args, steps):
    """Half a cosine down to a tenth of the peak; matrices decay, biases and gains do not."""
    warmup = run.warmup(steps, 0.05)
    rate = kformer.schedules.WarmupCosine(args.learning_rate, warmup, steps, floor=0.1)
    given = dict(learning_rate=rate, weight_decay=args.weight_decay, clipnorm=1.0)
    if args.optimizer == "muon":
        given.update(adam_weight_decay=args.weight_decay, exclude_layers=["embedding", "head"])
        optimizer = keras.optimizers.Muon(**given)
    else:
        optimizer = keras.optimizers.AdamW(beta_2=0.99, **given)
    optimizer.exclude_from_weight_decay(var_names=["bias", "gamma", "beta", "scale"])
    return optimizer


def evaluate(model, data, texts):
    """Loss per token, and per character, so that tokenizers can be compared."""
    # Keras' "loss" is the mean over batches; the perplexity is exact over all tokens.
    loss = math.log(model.evaluate(data, verbose=0, return_dict=True)["perplexity"])
    labels = sum(int((data[i][1] >= 0).sum()) for i in range(data.num_batches))
    nats = loss * labels / sum(map(len, texts))
    return {"validation_loss": loss, "perplexity": math.exp(loss),
            "nats_per_character": nats, "bits_per_character": nats / math.log(2)}  # fmt: skip


def write_samples(model, prompt, seed, length):
    """One continuation at each of two temperatures, no longer than what it has seen."""
    ids = model.tokenizer.encode(prompt)
    prompt, out = model.tokenizer.decode(ids[: length // 2]), []
    length -= len(ids[: length // 2]) + 1
    for temperature in (0.5, 1.0):
        text = model.generate(prompt, length, temperature=temperature, seed=seed)
        out += [f"--- temperature {temperature}", prompt + text, ""]
    return out


@runs.command
def main():
    args = parse_arguments()
    run = runs.Run("language_model", args)
    if args.data:
        splits = kformer.data.load_splits(args.data, kformer.data.read_texts)
    else:
        splits = corpora.documentation()
    train, validation = splits["train"], splits["val"]
    model = make_model(run, args, train)
    tokenizer, length = model.tokenizer, args.length or model.config.max_length
    make = dict(length=length, batch_size=args.batch_size, pack=not args.no_pack, seed=args.seed)
    data = kformer.data.LanguageModelData(train, tokenizer, **make)
    held_out = kformer.data.LanguageModelData(validation, tokenizer, shuffle=False, **make)
    print(f"{len(train):,} texts; {runs.described(data)}")

    model.compile(make_optimizer(run, args, run.total_steps(data)))
    run.fit(model, data, validation_data=held_out)

    metrics = evaluate(model, held_out, validation)
    samples = write_samples(model, args.prompt or validation[0][:20], args.seed, length)
    run.finish(model, metrics, samples)


if __name__ == "__main__":
    main()
