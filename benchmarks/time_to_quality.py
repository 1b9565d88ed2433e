"""How long until a translator is as good as KerasHub's layers after one epoch?

    pip install -c constraints.txt ".[tensorflow,jax,torch,recipes,keras-nlp]"
    python benchmarks/time_to_quality.py --data ../shared/data/tatoeba-eng-spa --backend jax

First the peer: `TransformerEncoder` and `TransformerDecoder` of KerasHub on TensorFlow, 2 + 2
layers of width 256, everything padded to 40 tokens, batches of 64, Adam at 5e-4, one epoch, as in
Keras' own example. Then kformer: the same size, buckets by length, until its BLEU on the same
sentences, greedy on both sides, is at least the peer's; without dropout, which a single epoch
does not need, and with a learning rate that comes down. Each has a process of its own and the
machine to itself; the seconds are those of training alone, compilation included.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

LENGTH, BATCH, SIZE = 40, 64, 8000


def parse_arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", required=True, help="folder with train, val and test pairs")
    add("--backend", default="jax", help="of kformer (default: jax)")
    add("--sentences", type=int, default=400, help="of the test, sorted (default: 400)")
    add("--peer-steps", type=int, help="end the peer early, to try the script")
    add("--every", type=int, default=100, help="steps between two looks at BLEU (default: 100)")
    add("--steps", type=int, default=1200, help="of kformer, over which its learning rate comes "
        "down; it may stop earlier (default: 1200)")  # fmt: skip
    add("--out", default="out/time_to_quality.json", help="where the figures go")
    add("--target", type=float, help=argparse.SUPPRESS)  # for the process of kformer
    add("--child", choices=("peer", "kformer"), help=argparse.SUPPRESS)
    return parser.parse_args()


def load(args):
    """Pairs for training, and the sentences that are scored with all their references."""
    import kformer

    splits = kformer.data.load_splits(args.data, kformer.data.read_pairs)
    found = {}
    for source, target in splits["test"]:
        found.setdefault(source, []).append(target)
    sources = sorted(found)[: args.sentences]
    return splits["train"], sources, [found[source] for source in sources]


def bleu(written, references):
    from kformer.training.callbacks import translation_scores

    return translation_scores(written, references)[0].score


def peer(args):
    """KerasHub's layers: every sentence is 40 tokens long."""
    import keras
    import keras_hub
    import numpy as np

    import kformer

    train, sources, references = load(args)
    tokenizers = [kformer.Tokenizer.train([p[side] for p in train], SIZE) for side in (0, 1)]

    def padded(texts, side, length, bos=False):
        rows = tokenizers[side].encode(texts, bos=bos, eos=True)
        return keras.utils.pad_sequences(rows, length, padding="post", truncating="post")

    source = padded([p[0] for p in train], 0, LENGTH)
    target = padded([p[1] for p in train], 1, LENGTH + 1, bos=True)
    layers = keras_hub.layers
    ids = {name: keras.Input((LENGTH,), dtype="int32", name=name) for name in ("source", "target")}
    embed = dict(vocabulary_size=SIZE, sequence_length=LENGTH, embedding_dim=256, mask_zero=True)
    sizes = dict(intermediate_dim=1024, num_heads=8, dropout=0.1)
    memory = layers.TokenAndPositionEmbedding(**embed)(ids["source"])
    for _ in range(2):
        memory = layers.TransformerEncoder(**sizes)(memory)
    x = layers.TokenAndPositionEmbedding(**embed)(ids["target"])
    for _ in range(2):
        x = layers.TransformerDecoder(**sizes)(x, memory)
    model = keras.Model(ids, keras.layers.Dense(SIZE)(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0)
    model.compile(keras.optimizers.Adam(5e-4), loss)
    inputs, labels = {"source": source, "target": target[:, :-1]}, target[:, 1:]
    if args.peer_steps:
        rows = args.peer_steps * BATCH
        inputs, labels = {k: v[:rows] for k, v in inputs.items()}, labels[:rows]
    start = time.perf_counter()
    model.fit(inputs, labels, batch_size=BATCH, epochs=1, verbose=2)
    seconds = time.perf_counter() - start

    rows = padded(sources, 0, LENGTH)
    written = np.zeros((len(rows), LENGTH), "int32")
    written[:, 0] = tokenizers[1].bos_id
    for step in range(LENGTH - 1):
        logits = model.predict({"source": rows, "target": written}, batch_size=100, verbose=0)
        written[:, step + 1] = logits[:, step].argmax(axis=-1)
    texts = []
    for row in written[:, 1:].tolist():
        end = row.index(tokenizers[1].eos_id) if tokenizers[1].eos_id in row else len(row)
        texts.append(tokenizers[1].decode(row[:end]))
    return {"seconds": seconds, "bleu": bleu(texts, references), "steps": len(labels) // BATCH}


def kformer_side(args):
    """kformer: rows of a length together, the same size of model, until the peer's BLEU."""
    import keras

    import kformer

    train, sources, references = load(args)
    tokenizers = [kformer.Tokenizer.train([p[side] for p in train], SIZE) for side in (0, 1)]
    data = kformer.data.TranslationData(train, *tokenizers, batch_tokens=1024)
    config = kformer.Config(
        vocabulary_size=tokenizers[0].vocabulary_size,
        target_vocabulary_size=tokenizers[1].vocabulary_size,
        num_layers=2, hidden_dim=256, num_heads=8, intermediate_dim=1024, scale_embeddings=True,
        position="rotary", norm="rms", activation="gelu_tanh", pad_id=0, bos_id=1, eos_id=2,
    )  # fmt: skip
    model = kformer.Seq2SeqLM(config, *tokenizers)
    rate = kformer.schedules.WarmupCosine(2e-3, 100, args.steps, floor=0.02)
    model.compile(keras.optimizers.AdamW(rate, beta_2=0.98, weight_decay=0.01, clipnorm=1.0))
    curve, clock = [], {"training": 0.0, "since": time.perf_counter()}

    class Look(keras.callbacks.Callback):
        done = 0

        def on_train_batch_end(self, batch, logs=None):
            Look.done += 1
            if Look.done % args.every:
                return
            model = self.model  # the step has ended: JAX has been waited for
            clock["training"] += time.perf_counter() - clock["since"]
            score = bleu(model.generate(sources, LENGTH, batch_size=100), references)
            curve.append([Look.done, round(clock["training"], 1), score])
            print(f"step {Look.done}, {clock['training']:.0f} s: BLEU {score:.1f}", flush=True)
            model.stop_training = score >= args.target or Look.done >= args.steps
            clock["since"] = time.perf_counter()

    epochs = -(-args.steps // data.num_batches)
    model.fit(data, epochs=epochs, verbose=0, callbacks=[Look()])
    reached = [row for row in curve if row[2] >= args.target]
    seconds = reached[0][1] if reached else None
    return {"seconds": seconds, "bleu": curve[-1][2], "steps": curve[-1][0], "curve": curve}


def run_child(args, name, backend, *flags):
    """The result of one side, from a process of its own."""
    command = [sys.executable, __file__, *sys.argv[1:], "--child", name, *flags]
    environment = {**os.environ, "KERAS_BACKEND": backend}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        for line in process.stdout:
            print(f"  {name}: {line}", end="", flush=True)
            last = line
    if process.returncode:
        sys.exit(f"{name} ended with {process.returncode}")
    return json.loads(last)


def main():
    args = parse_arguments()
    if args.child:
        print(json.dumps({"peer": peer, "kformer": kformer_side}[args.child](args)))
        return
    theirs = run_child(args, "peer", "tensorflow")
    mine = run_child(args, "kformer", args.backend, "--target", str(theirs["bleu"]))
    result = {"kerashub": theirs, "kformer": mine, "backend": args.backend}
    if mine["seconds"]:
        result["ratio"] = theirs["seconds"] / mine["seconds"]
    Path(args.out).parent.mkdir(parents=True, exist_ok=True)
    Path(args.out).write_text(json.dumps(result, indent=2))
    print("\n| | seconds of training | BLEU |\n|---|---|---|")
    print(f"| KerasHub layers, TensorFlow | {theirs['seconds']:.0f} | {theirs['bleu']:.1f} |")
    reached = f"{mine['seconds']:.0f}" if mine["seconds"] else "not reached"
    print(f"| kformer, {args.backend} | {reached} | {mine['bleu']:.1f} |")
    if "ratio" in result:
        print(f"\nkformer is there {result['ratio']:.1f} times as fast.")


if __name__ == "__main__":
    main()
