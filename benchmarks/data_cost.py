"""What the data pipeline costs beside a training step.

    KERAS_BACKEND=jax python benchmarks/data_cost.py

For each kind of data: the time to make a batch by itself (median), the time of a training step on
batches that are already there (median), and the share of the first in the second. Batches are
also made ahead in a thread, so that what `fit` feels of it is less.
"""

import argparse
import os
import statistics
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras

import kformer
from kformer.text import corpora


def cases(seed):
    texts = corpora.documentation()["train"]
    pairs = corpora.written_out({"train": 20000}, seed=seed)["train"]
    rows = corpora.docstrings_by_package()["train"]
    documents = kformer.Tokenizer.train(texts, 4000, mask=True)
    both = kformer.Tokenizer.train([text for pair in pairs for text in pair], 1000)
    size = dict(num_layers=2, hidden_dim=128, num_heads=4)

    def config(tokenizer):
        return kformer.Config(vocabulary_size=tokenizer.vocabulary_size, **size)

    labels = kformer.data.ClassificationData(*zip(*rows, strict=True), documents, max_length=128)
    yield "classification", labels, kformer.TextClassifier(config(documents), 20)
    hidden = kformer.data.MaskedLMData(texts, documents, max_length=128)
    yield "masked LM", hidden, kformer.MaskedLM(config(documents))
    packed = kformer.data.LanguageModelData(texts, documents)
    yield "language model, packed", packed, kformer.CausalLM(config(documents))
    translations = kformer.data.TranslationData(pairs, both)
    yield "translation", translations, kformer.Seq2SeqLM(config(both).replace(bos_id=1, eos_id=2))


def median(function, number):
    times = []
    for index in range(number):
        start = time.perf_counter()
        function(index)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=20, help="measured of each (default: 20)")
    parser.add_argument("--seed", type=int, default=0, help="of corpus and order (default: 0)")
    args = parser.parse_args()
    print(f"{keras.backend.backend()}\n")
    print("| data | shapes | filled | batch, ms | step, ms | share |\n|---|---|---|---|---|---|")
    for name, data, model in cases(args.seed):
        model.compile()
        plan = data.planned(0)
        number = min(args.steps, len(plan))
        batch = median(lambda i, data=data, plan=plan: data.make(plan, 0, i), number)
        made = [data.make(plan, 0, i) for i in range(number)]
        for _ in range(2):  # the first pass compiles
            step = median(lambda i, model=model, made=made: model.train_on_batch(*made[i]), number)
        share = f"{batch / step:.1%}"
        filled = f"{data.fill_rate():.1%}"
        cells = name, len(data.shapes()), filled, f"{1e3 * batch:.2f}", f"{1e3 * step:.1f}", share
        print("| " + " | ".join(map(str, cells)) + " |", flush=True)


if __name__ == "__main__":
    main()
