"""How fast is `generate`, beside KerasHub, Hugging Face and CTranslate2?

    pip install -c constraints.txt ".[tensorflow,jax,torch,keras-nlp]" transformers ctranslate2
    python benchmarks/generate.py

For each backend every library has a process of its own, which has got everything ready and waits;
they are asked in turn, one at a time, `--rounds` times, and the medians are compared. Shapes,
precision (float32) and number of tokens are the same on all sides, and all of them choose the
likeliest token:

    greedy        GPT-2 shape: vocabulary 8000, 4 layers, width 256, 4 heads, inner width 1024;
                  prompts of 32 tokens, 224 new ones, 1 and 16 prompts
    first token   the same model, prompt of 512 tokens, compiled before
    beam 4        BART shape: 2 + 2 layers, width 256, 8 heads, inner width 1024; 16 sources of 17
                  tokens, 32 new ones, length penalty 0 on all sides

Then kformer alone: the time for a token by what the cache holds, and what 50 unlike calls compile.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np

SIZE, LAYERS, WIDTH, HEADS, INNER = 8000, 4, 256, 4, 1024
PROMPT, NEW, LONG = 32, 224, 512
SOURCE, TARGET, BEAMS, ROWS = 17, 32, 4, 16
CASES = {
    "greedy, 1 prompt": ("kformer", "kerashub", "transformers"),
    "greedy, 16 prompts": ("kformer", "kerashub", "transformers"),
    "first token of 512": ("kformer", "transformers"),
    "beam 4, 16 sources": ("kformer", "transformers", "ctranslate2"),
}
SHAPES = {  # of what is made: nobody stops early
    "greedy, 1 prompt": (1, NEW),
    "greedy, 16 prompts": (16, NEW),
    "first token of 512": (1, 1),
    "beam 4, 16 sources": (ROWS, TARGET),
}
MARK = "@@ "  # before what a process has to say; libraries print, too


def prompts(rows, length, seed=0):
    return np.random.default_rng(seed).integers(10, SIZE, (rows, length)).astype("int32")


# Every side: a function that gives {case: function to time}, whose result has the shape of what
# was made.


def kformer_side():
    import kformer

    config = kformer.Config.preset(
        "gpt2", vocabulary_size=SIZE, num_layers=LAYERS, hidden_dim=WIDTH, num_heads=HEADS,
        intermediate_dim=INNER, max_length=1024, eos_id=None, bos_id=None, pad_id=None, dropout=0.0,
    )  # fmt: skip
    model = kformer.CausalLM(config)
    config = kformer.Config.preset(
        "bart_base", vocabulary_size=SIZE, num_layers=2, num_encoder_layers=2, hidden_dim=WIDTH,
        num_heads=8, intermediate_dim=INNER, max_length=1024, dropout=0.0, bos_id=2, eos_id=2,
    )  # fmt: skip
    translator = kformer.Seq2SeqLM(config)
    beams = dict(num_beams=BEAMS, length_penalty=0.0, min_new_tokens=TARGET)

    def translate():
        return translator.generate(prompts(ROWS, SOURCE), TARGET, **beams).shape

    return {
        "greedy, 1 prompt": lambda: model.generate(prompts(1, PROMPT), NEW).shape,
        "greedy, 16 prompts": lambda: model.generate(prompts(16, PROMPT), NEW).shape,
        "first token of 512": lambda: model.generate(prompts(1, LONG), 1).shape,
        "beam 4, 16 sources": translate,
        "by length": lambda: by_length(model),
        "workload": lambda: workload(model),
    }


def by_length(model):
    """Milliseconds for a token, by the tokens that are there before."""
    out = {}
    for length in (16, 80, 208, 464, 960):
        times = {1: [], 33: []}
        for _ in range(4):  # the first time compiles
            for new, seconds in times.items():
                start = time.perf_counter()
                model.generate(prompts(16, length), new)
                seconds.append(time.perf_counter() - start)
        one, many = (statistics.median(seconds[1:]) for seconds in times.values())
        out[length] = 1000 * (many - one) / 32
    return out


def workload(model):
    """What 50 calls compile whose prompts, lengths, settings and seeds all differ."""
    import kformer

    random, counts = np.random.default_rng(0), [kformer.compilations(model)]
    for call in range(50):
        rows = [random.integers(10, SIZE, random.integers(2, 33)).tolist() for _ in range(4)]
        draws = dict(temperature=0.5 + 0.02 * call, top_p=0.9, top_k=50 + call, seed=call)
        options = draws if call % 2 else {}
        model.generate(rows, int(random.integers(1, 30)), stop=[int(call) + 10], **options)
        counts.append(kformer.compilations(model))
    return {"before": counts[0], "after 10": counts[10], "after 50": counts[-1]}


def kerashub_side():
    import keras_hub

    backbone = keras_hub.models.GPT2Backbone(SIZE, LAYERS, HEADS, WIDTH, INNER, 0.0, PROMPT + NEW)
    model = keras_hub.models.GPT2CausalLM(backbone, preprocessor=None)
    model.compile(sampler="greedy")

    def run(rows):
        ids = np.zeros((rows, PROMPT + NEW), "int32")
        ids[:, :PROMPT] = prompts(rows, PROMPT)
        given = {"token_ids": ids, "padding_mask": np.arange(PROMPT + NEW) < PROMPT + 0 * ids}
        out = np.asarray(model.generate(given, stop_token_ids=None)["token_ids"])
        return out[:, PROMPT:].shape

    return {"greedy, 1 prompt": lambda: run(1), "greedy, 16 prompts": lambda: run(16)}


def bart():
    import torch
    from transformers import BartConfig, BartForConditionalGeneration

    torch.manual_seed(0)
    side = dict(layers=2, attention_heads=8, ffn_dim=INNER)
    config = BartConfig(
        vocab_size=SIZE, d_model=WIDTH, **{f"encoder_{k}": v for k, v in side.items()},
        **{f"decoder_{k}": v for k, v in side.items()}, dropout=0.0,
    )  # fmt: skip
    return BartForConditionalGeneration(config).eval()


def transformers_side():
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = dict(n_layer=LAYERS, n_embd=WIDTH, n_head=HEADS, n_inner=INNER, n_positions=1024)
    config = GPT2Config(vocab_size=SIZE, bos_token_id=0, eos_token_id=None, **sizes)
    model, translator = GPT2LMHeadModel(config).eval(), bart()
    assert model.config._attn_implementation == "sdpa"

    def run(rows, length, new):
        ids = torch.tensor(prompts(rows, length)).long()
        options = dict(do_sample=False, max_new_tokens=new, pad_token_id=0)
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        return out[:, length:].shape

    def translate():
        ids = torch.tensor(prompts(ROWS, SOURCE)).long()
        length = dict(min_new_tokens=TARGET, max_new_tokens=TARGET)
        options = dict(num_beams=BEAMS, length_penalty=0.0, do_sample=False, **length)
        with torch.inference_mode():
            out = translator.generate(ids, attention_mask=torch.ones_like(ids), **options)
        return out[:, 1:].shape

    return {
        "greedy, 1 prompt": lambda: run(1, PROMPT, NEW),
        "greedy, 16 prompts": lambda: run(16, PROMPT, NEW),
        "first token of 512": lambda: run(1, LONG, 1),
        "beam 4, 16 sources": translate,
    }


def ctranslate2_side():
    import ctranslate2
    from ctranslate2.converters.transformers import BartLoader

    model = bart()
    model.config.normalize_before, model.config.normalize_embedding = False, True
    spec = BartLoader().get_model_spec(model)
    names = ["<s>", "<pad>", "</s>", "<unk>", *(f"t{i}" for i in range(4, SIZE))]
    spec.register_source_vocabulary(names)
    spec.register_target_vocabulary(names)
    spec.config.decoder_start_token = "</s>"
    spec.validate()
    spec.optimize()
    folder = tempfile.mkdtemp()
    spec.save(folder)
    translator = ctranslate2.Translator(folder, intra_threads=2, compute_type="float32")
    sources = [[names[i] for i in row] for row in prompts(ROWS, SOURCE)]
    length = dict(min_decoding_length=TARGET, max_decoding_length=TARGET)

    def translate():
        out = translator.translate_batch(sources, beam_size=BEAMS, length_penalty=0.0, **length)
        return len(out), min(len(one.hypotheses[0]) for one in out)

    return {"beam 4, 16 sources": translate}


SIDES = dict(
    kformer=kformer_side, kerashub=kerashub_side, transformers=transformers_side,
    ctranslate2=ctranslate2_side,
)  # fmt: skip


def timed(function):
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def child(side):
    """Answers the names of cases with seconds; the first time is not counted, as it compiles."""
    cases, warm = SIDES[side](), set()
    print(MARK + json.dumps("ready"), flush=True)
    for line in sys.stdin:
        name = line.strip()
        if name in ("by length", "workload"):
            print(MARK + json.dumps(cases[name]()), flush=True)
            continue
        if name not in warm:
            shape = tuple(cases[name]())
            assert shape == SHAPES[name], f"{side}, {name}: {shape}, not {SHAPES[name]}"
            cases[name]()
            warm.add(name)
        print(MARK + json.dumps(timed(cases[name])), flush=True)


class Process:
    """A side in a process of its own."""

    def __init__(self, side, backend):
        command = [sys.executable, __file__, "--child", side]
        env = {**os.environ, "KERAS_BACKEND": backend}
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.process = subprocess.Popen(command, env=env, **pipes)
        self.answer()

    def answer(self):
        for line in self.process.stdout:
            if line.startswith(MARK):
                return json.loads(line[len(MARK) :])
        sys.exit(f"a process ended with {self.process.wait()}")

    def ask(self, name):
        print(name, file=self.process.stdin, flush=True)
        return self.answer()

    def end(self):
        self.process.stdin.close()
        self.process.wait()


def measure(backend, rounds):
    """{case: {side: median seconds}}, and what kformer alone has to say."""
    sides = {side: Process(side, backend) for side in SIDES}
    found = {}
    for case, names in CASES.items():
        seconds = {name: [] for name in names}
        for done in range(rounds + 1):
            for name in names:
                one = sides[name].ask(case)
                if done:  # the first round warms up what the machine itself keeps
                    seconds[name].append(one)
        found[case] = {name: statistics.median(times) for name, times in seconds.items()}
        print_row(case, found[case])
    found["by length"] = sides["kformer"].ask("by length")
    found["workload"] = sides["kformer"].ask("workload")
    for process in sides.values():
        process.end()
    return found


def print_row(case, seconds):
    mine, tokens = seconds["kformer"], 0 if "first" in case else np.prod(SHAPES[case])
    cells = [
        f"{tokens / seconds[side]:,.0f}" if tokens else f"{1000 * seconds[side]:.0f} ms"
        for side in seconds
    ]
    others = [f"{seconds[side] / mine:.2f} × {side}" for side in seconds if side != "kformer"]
    pairs = ", ".join(f"{side} {cell}" for side, cell in zip(seconds, cells, strict=True))
    print(f"| {case} | {pairs} | {', '.join(others)} |", flush=True)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--backends", nargs="+", default=["jax", "torch", "tensorflow"], help="which, in turn")
    add("--rounds", type=int, default=7, help="how often each is timed (default: 7)")
    add("--out", default="out/generate.json", help="where the figures go")
    add("--child", choices=SIDES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child)
        return
    result = {}
    for backend in args.backends:
        print(f"\n{backend}\n\n| case | tokens/s | kformer is |\n|---|---|---|", flush=True)
        result[backend] = found = measure(backend, args.rounds)
        by = ", ".join(f"{n}: {ms:.1f}" for n, ms in found["by length"].items())
        print(f"\nms for 16 tokens, one of each row, after so many: {by}")
        print(f"compiled by 50 unlike calls: {found['workload']}", flush=True)
        Path(args.out).parent.mkdir(parents=True, exist_ok=True)
        Path(args.out).write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
