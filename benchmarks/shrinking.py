"""What is lost and won by fewer bits and by adapters: quality, size on disk, speed.

    KERAS_BACKEND=jax python benchmarks/shrinking.py --weights ../shared/weights/stories260k

A Llama of 260 K parameters that was trained on stories. Perplexity on a story of its own, and on
documentation that it has never seen, before and after adapters were trained on other documentation;
bytes of the .keras file, and of the adapters alone; tokens per second of `generate` as a share of
the full model's, each in turn, medians.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np

import kformer
from kformer.text import corpora

LENGTH = 128


def encoder(pieces):
    """text → ids, always the longest piece that fits: the checkpoint comes without a tokenizer."""
    numbers = {piece: number for number, piece in enumerate(pieces) if number > 2}
    longest = max(map(len, numbers))

    def encode(text):
        ids, at = [], 0
        while at < len(text):
            ends = range(min(len(text), at + longest), at, -1)
            end = next((end for end in ends if text[at:end] in numbers), None)
            if end is None:  # a character without a piece
                at += 1
                continue
            ids.append(numbers[text[at:end]])
            at = end
        return ids

    return encode


def rows_of(texts, encode, number):
    """(number, LENGTH + 1) ids, each row begun like a story."""
    ids = [i for text in texts for i in encode(" " + text)][: number * LENGTH]
    rows = np.array(ids[: len(ids) // LENGTH * LENGTH]).reshape(-1, LENGTH)
    return np.concatenate([np.ones_like(rows[:, :1]), rows], axis=1)


def tuned(model, rows, epochs):
    model.compile(keras.optimizers.AdamW(3e-3))
    model.fit(rows[:, :-1], rows[:, 1:], batch_size=16, epochs=epochs, verbose=0)
    return model


def variants(weights, rows, epochs):
    """(name, model), each from the same weights."""

    def adapted(*bits):
        model = kformer.from_hf(weights)
        for mode in bits:
            model.quantize(mode)
        return tuned(kformer.enable_lora(model, 8, target="kernel"), rows, epochs)

    for name, mode in (("full", None), ("int8", "int8"), ("int4", "int4")):
        model = kformer.from_hf(weights)
        if mode:
            model.quantize(mode)
        yield name, model
    yield "LoRA, r = 8", adapted()
    yield "QLoRA, int8", adapted("int8")
    yield "QLoRA, int4", adapted("int4")
    yield "LoRA, merged", kformer.merge_lora(adapted())


def sizes(model, folder):
    """Bytes of the model without its optimizer, and of its adapters."""
    bare = type(model).from_config(model.get_config())
    for mine, theirs in zip(bare.weights, model.weights, strict=True):
        mine.assign(theirs)
    bare.save(folder / "model.keras")
    whole = (folder / "model.keras").stat().st_size
    if not any("lora" in weight.path for weight in model.trainable_weights):
        return whole, 0
    kformer.save_adapters(model, folder / "adapters")
    return whole, (folder / "adapters/adapter_model.safetensors").stat().st_size


def speeds(models, rounds, tokens=128):
    """{name: median tokens per second}, every model once in each round."""
    seconds = {name: [] for name in models}
    for number in range(rounds + 1):  # the first compiles
        for name, model in models.items():
            start = time.perf_counter()
            model.generate([[1]], tokens, min_new_tokens=tokens)
            if number:
                seconds[name].append(time.perf_counter() - start)
    return {name: tokens / statistics.median(taken) for name, taken in seconds.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--weights", default="../shared/weights/stories260k")
    parser.add_argument("--rows", type=int, default=640, help="of 128 tokens to train on")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=9, help="of generate")
    args = parser.parse_args()
    keras.utils.set_random_seed(0)
    golden = json.loads((Path(args.weights) / "golden.json").read_text())
    texts, encode = corpora.documentation(), encoder(golden["pieces"])
    train, test = rows_of(texts["train"], encode, args.rows), rows_of(texts["test"], encode, 64)
    story = [golden["prompt_ids"] + golden["greedy_ids"]]
    models = dict(variants(args.weights, train, args.epochs))
    rates = speeds(models, args.rounds)
    print(f"{keras.backend.backend()}, {rates['full']:.0f} tokens per second in full\n")
    print("| | a story | documentation | .keras, KB | adapters, KB | speed |")
    print("|---|---|---|---|---|---|")
    for name, model in models.items():
        with tempfile.TemporaryDirectory() as folder:
            whole, own = sizes(model, Path(folder))
        quality = [model.score(ids).perplexity for ids in (story, test)]
        cells = [name, *(f"{number:.2f}" for number in quality), f"{whole / 1000:.0f}"]
        cells += [f"{own / 1000:.0f}" if own else "", f"{rates[name] / rates['full']:.2f}"]
        print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
