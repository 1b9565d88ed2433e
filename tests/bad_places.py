"""More folders that are no checkpoints: their indices, names, links, ids and kinds of files.

name → (how to make one, what the error must say), as in `bad_checkpoints.py`.
"""

import os
import pickle
import re
import socket

import numpy as np
from checkpoint_support import (
    CONFIG,
    ONE,
    SHAPES,
    TWO,
    B,
    W,
    arrays,
    config,
    file,
    file_of,
    index,
    index_text,
    instead,
    link,
    packed,
    saved,
    shard,
    weights,
    zipped,
)

INDEX = "model.safetensors.index.json"
LISTS = b"[]," * 999
HTML = "<!DOCTYPE html><html><head><title>503</title></head></html>\n" * 20
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 123\n"
DEEP = "[" * 100_000 + "]" * 100_000


def only(name, content):
    """A folder with other weights than safetensors."""

    def make(folder):
        (folder / "model.safetensors").unlink()
        (folder / name).write_bytes(content)

    return make


def without(name):
    """An index whose shard is not there."""
    return index(lambda folder, found: (folder / name).unlink())


def mapped(change):
    return index(lambda folder, found: change(found["weight_map"]))


def grown(folder, found):
    """A tensor lies in both shards."""
    made = arrays()
    (folder / TWO).write_bytes(file_of({n: made[n] for n in [*SHAPES][4:]}))


def spoiled(folder, found):
    with open(folder / TWO, "ab") as out:
        out.write(b"\0")


def socket_at(path):
    with socket.socket(socket.AF_UNIX) as made:
        here = os.getcwd()
        os.chdir(path.parent)  # such names are short
        made.bind(path.name)
        os.chdir(here)


def unreadable(name):
    def make(folder):
        (folder / name).chmod(0)

    return make


def sparse(folder):
    """A file that is long on the disk without being there."""

    def change(h):
        start, more = h[W]["data_offsets"][0], 2**40 - 384
        for name, info in h.items():
            if name != "__metadata__" and info["data_offsets"][0] >= start:
                info["data_offsets"][1] += more
                info["data_offsets"][0] += more * (name != W)
        h[W]["shape"] = [8, 2**35]

    path = folder / "model.safetensors"
    path.write_bytes(file_of(arrays(), change))
    os.truncate(path, path.stat().st_size + 2**40 - 384)


INDICES = {
    "B15 the first shard missing": (without(ONE), f"{ONE} must be there, got nothing at"),
    "B15 the last shard missing": (without(TWO), f"{TWO} must be there, got nothing at"),
    "B15 a tensor in two shards": (
        index(grown), rf"names for it; missing \[\], more \['{[*SHAPES][4]}'\]",
    ),
    "B15 an absent tensor": (
        mapped(lambda m: m.update(absent=ONE)), r"names for it; missing \['absent'\], more \[\]",
    ),
    "B15 a tensor in the other shard": (
        mapped(lambda m: m.update({B: ONE})), rf"missing \['{B}'\], more \[\]",
    ),
    "B15 a tensor not named": (mapped(lambda m: m.pop(B)), rf"missing \[\], more \['{B}'\]"),
    "B15 a shard with a byte more": (index(spoiled), "must end with its last tensor, at"),
    "B15 empty": (index_text(b""), "an index of shards must have 1 to 4,194,304 bytes, got 0 in"),
    "B15 an array": (index_text(b"[]"), "must be a JSON object, got list"),
    "B15 an empty object": (index_text(b"{}"), r"must hold 'weight_map' .* beside it, got \[\]"),
    "B15 an empty map": (index_text(b'{"weight_map": {}}'), r"must hold .*, got \['weight_map'\]"),
    "B15 a map that is a list": (index_text(b'{"weight_map": ["a"]}'), "must hold 'weight_map'"),
    "B15 a map that is null": (index_text(b'{"weight_map": null}'), r"must hold 'weight_map' and"),
    "B15 more beside the map": (
        index_text(b'{"weight_map": {"a": "b"}, "code": 1}'), r"got \['code', 'weight_map'\]",
    ),
    "B15 a shard is a number": (mapped(lambda m: m.update({B: 1})), f"names .*, got 1 for '{B}'"),
    "B15 a shard is null": (mapped(lambda m: m.update({B: None})), f"got None for '{B}'"),
    "B15 a shard is a list": (mapped(lambda m: m.update({B: [ONE]})), r"got \['model-00001-of"),
    "B15 1,001 shards": (
        mapped(lambda m: m.update({f"t{i}": f"{i}.safetensors" for i in range(999)})),
        "must name at most 1000 shards, got 1001",
    ),
    "B15 a shard of other things": (
        index(lambda folder, found: (folder / TWO).write_bytes(packed(b'{"a":[%s1]}' % LISTS))),
        "must have at most 1,140 values, got 2,001",
    ),
    "B15 an index of 5 MB": (
        index_text(b'{"weight_map": {}}' + b" " * 5_000_000), "1 to 4,194,304 bytes, got 5,000,018",
    ),
    "B15 half a million names": (
        index_text(b'{"weight_map": {%s}}' % b",".join(b'"%d":""' % i for i in range(300_000))),
        "must have at most 400,000 values, got 600,0",
    ),
    "B15 pickles in the index": (mapped(lambda m: m.update({B: "pytorch_model.bin"})), "model.bin"),
}  # fmt: skip
NAMES = {
    f"B16 a shard named {name!r:.40}": (
        shard(name), "must name shards by plain file names ending in .safetensors, got ['\"]",
    )
    for name in (
        "../model.safetensors", "a/../../model.safetensors", "/tmp/model.safetensors", "",
        "~/model.safetensors", "~.safetensors", "model\0.safetensors", "model.safetensors\0",
        "..\\model.safetensors", "a\\model.safetensors", "C:\\model.safetensors", ".safetensors",
        "C:model.safetensors", "\\\\host\\share\\model.safetensors", "sub/model.safetensors",
        "./a.safetensors", ".hidden.safetensors", "..safetensors", "con.safetensors",
        "-.safetensors", "NUL.safetensors", "Aux.x.safetensors", "com1.safetensors",
        "LPT9.safetensors",
        "model.safetensors:stream.safetensors", "model.safetensors ", "model.safetensors.",
        "model.safetensors\n", "mo\ndel.safetensors", "modèl.safetensors", "model．safetensors",
        "model%2f.safetensors", "model*.safetensors", "model?.safetensors", "$HOME.safetensors",
        "file:///tmp/model.safetensors", "https://host/model.safetensors", "model.bin",
        "model.SAFETENSORS", "x" * 10_000 + ".safetensors", "x" * 201 + ".safetensors",
        "model\u202e.safetensors", "|cat.safetensors", "model.safetensors.index.json",
    )
}  # fmt: skip
LINKS = {
    "B16 weights by a link": (
        link("model.safetensors", "../elsewhere/weights"), "must lie in its folder, got a link to",
    ),
    "B16 a config by a link": (
        link("config.json", "../elsewhere/config"), "config.json must lie in its folder, got a",
    ),
    "B16 an index by a link": (
        link(INDEX, "../elsewhere/index"), "index.json must lie in its folder, got a link",
    ),
    "B16 a shard by a link": (link(TWO, "../elsewhere/shard"), "must lie in its folder, got a li"),
    "B16 a link into a folder below": (
        link("model.safetensors", "below/weights"), "must lie in its folder, got a link to",
    ),
    "B16 a link to a system's file": (
        link("config.json", "/etc/passwd", move=False), "lie in its folder, got a link to /etc",
    ),
    "B16 a link to a device": (
        link("model.safetensors", "/dev/zero", move=False), "its folder, got a link to /dev/zero",
    ),
    "B16 a link to nothing": (
        link("model.safetensors", "nothing", move=False), "must hold model.safetensors or",
    ),
    "B16 a link to itself": (
        link("config.json", "config.json", move=False), "config.json must be there, got nothing",
    ),
    "B16 a link to its folder": (
        link("model.safetensors", ".", move=False), "must (lie in its|be a)",
    ),
}  # fmt: skip
IDS = {
    f"B17 {source!r:.40}": source
    for source in (
        "", "a/", "/a", "a//b", "a/b/c", "../a", "a/..", "a/../b", "a..b", "a--b/c",
        "~", "~/model", "~root/model", "a b", " a", "a\n", "a\0b", "\0", "a\\b", "..\\a", "C:\\a",
        "C:a", "file:///tmp", "file:a", "http://host/a", "https://host/a", "HTTPS://host/a",
        "gs://a/b", "s3://a/b", "hf://a/b", "javascript:a", "//host/a", "\\\\host\\a", "a@main",
        "a?b", "a#b", "a%2fb", "a/b:c", "ａ/b", "é", "\u202ea", "-a", "-rf", ".a", "_a", "a/.b",
        "a/-b", "x" * 97, "x" * 10_000, "x/" * 5_000, "/" * 10_000, "a;ls", "$(ls)", "`ls`", "a|b",
        "a&b",
        None, 3, 3.5, True, ["a"], {"a": 1}, b"a", b"/tmp",
    )
}  # fmt: skip
ADDRESSES = {
    f"B18 {address}": (
        config(name_or_path=address), f"must not name addresses, got '{re.escape(address[:4])}",
    )
    for address in (
        "file:///etc/passwd", "http://host/a", "https://host/a", "HTTP://host", "gs://bucket/a",
        "s3://bucket/a", "ftp://host/a", "hdfs://a", "a+b.c-d://x", "  http://host/a",
    )
} | {
    "B18 in a list in a list": (config(x=[1, [{"y": "file:///a"}]]), "got 'file:///a' for 'y'"),
    "B20 auto_map": (config(auto_map={"AutoConfig": "x.Y"}), "not choose code, got 'auto_map'"),
    "B20 auto_map deep in it": (config(text_config={"a": [{"auto_map": 1}]}), "got 'auto_map'"),
    "B20 trust_remote_code": (config(trust_remote_code=True), "code, got 'trust_remote_code'"),
    "B20 trust_remote_code false": (config(trust_remote_code=False), "got 'trust_remote_code'"),
    "B20 _attn_implementation_internal": (
        config(_attn_implementation_internal="host/code"), "got '_attn_implementation_internal'",
    ),
    "B20 the same deep in it": (
        config(vision={"_attn_implementation_internal": 1}), "got '_attn_implementation_internal'",
    ),
}  # fmt: skip
JSONS = {
    f"B21 {name}, {what}": (how(content), message)
    for name, content, message in (
        ("100,000 levels of lists", DEEP, "must be at most 32 levels deep"),
        ("100,000 levels of objects", '{"a":' * 10**5 + "1" + "}" * 10**5, "32 levels deep"),
        ("33 levels", '{"a":' + "[" * 32 + "]" * 32 + "}", "must be at most 32 levels deep"),
        ("10^400", '{"a": 1e400}', "must hold finite numbers, got 1e400"),
        ("-10^400", '{"a": -1e400}', "must hold finite numbers, got -1e400"),
        ("NaN", '{"a": NaN}', "must hold finite numbers, got NaN"),
        ("Infinity", '{"a": Infinity}', "must hold finite numbers, got Infinity"),
        ("-Infinity", '{"a": [-Infinity]}', "must hold finite numbers, got -Infinity"),
        ("500,000 digits", '{"a": ' + "9" * 500_000 + "}", "numbers of 400 digits at most, got"),
        ("500,000 decimals", '{"a": 1.' + "9" * 500_000 + "}", "finite numbers, got 1.99999999"),
        ("a mark of byte order", '\ufeff{"a": 1}', "must be JSON, got Unexpected UTF-8 BOM"),
        ("UTF-16", '{"a": 1}'.encode("utf-16"), "must be UTF-8, got byte 0 of"),
        ("UTF-16 without a mark", '{"a": 1}'.encode("utf-16-le"), "must be JSON, got Expecting"),
        ("UTF-32", '{"a": 1}'.encode("utf-32"), "must be UTF-8, got byte 0 of"),
        ("Latin 1", '{"é": 1}'.encode("latin-1"), "must be UTF-8, got byte 2 of"),
        ("a number", "1", "must be a JSON object, got int"),
        ("a text", '"a"', "must be a JSON object, got str"),
        ("null", "null", "must be a JSON object, got NoneType"),
        ("nothing", "", r"must have 1 to [\d,]+ bytes, got 0 in"),
        ("zeros", b"\0" * 100, "must be JSON, got Expecting value"),
        ("a space", " ", "must be JSON, got Expecting value"),
        ("a web page", HTML, "must be JSON, got Expecting value"),
        ("a pointer of git-lfs", POINTER, "must be JSON, got Expecting value"),
        ("YAML", "a: 1", "must be JSON, got Expecting value"),
        ("a pickle", pickle.dumps(CONFIG), "must be UTF-8, got byte 0 of"),
    )
    for what, how in (
        ("config.json", lambda content: file("config.json", content)),
        ("an index", index_text),
    )
}  # fmt: skip
OTHERS = {
    "B21 100 MB of a number, config.json": (
        file("config.json", lambda: '{"a": ' + "9" * 10**8 + "}"), "1 to 1,048,576 bytes, got 100,",
    ),
    "B23 a pickle": (weights(pickle.dumps(arrays(), 2)), "got a pickle in place of weights"),
    "B23 a new pickle": (weights(pickle.dumps(arrays(), 5)), "got a pickle in place of weights"),
    "B23 a zip": (weights(zipped(data="x" * 999)), "got a pickle in place of weights"),
    "B23 an npz": (weights(saved({})), "got a pickle in place of weights"),
    "B23 pytorch_model.bin": (
        only("pytorch_model.bin", pickle.dumps({})), r"pickles are never read\), got .*_model.bin",
    ),
    "B23 model.pt": (only("model.pt", zipped(a="b")), r"never read\), got .*'model.pt'"),
    "B23 weights.npz": (only("weights.npz", saved(1)), r"never read\), got .*'weights.npz"),
    "B23 a pickled shard": (
        index(lambda folder, found: file(TWO, pickle.dumps({}, 2))(folder)), "of 2 to .*, got",
    ),
    "B24 a web page": (weights(HTML), "got a web page in place of weights"),
    "B24 a web page after spaces": (weights("\n\n  " + HTML), "got a web page in place of weights"),
    "B24 a pointer of git-lfs": (weights(POINTER), "got a pointer of git-lfs in place of weights"),
    "B24 an error in JSON": (weights('{"error": "Access denied"}'), "must begin with a header of"),
    "B24 HDF5": (weights(b"\x89HDF\r\n\x1a\n" + b"\0" * 500), "must begin with a header of"),
    "B24 GGUF": (weights(b"GGUF\3\0\0\0" + b"\1" * 500), "must begin with a header of"),
    "B24 zeros": (weights(b"\0" * 4096), "must begin with a header of .*, got length 0 in 4,096"),
    "B24 noise": (weights(np.random.default_rng(0).bytes(4096)), "must begin with a header of"),
    "B25 no bytes": (weights(b""), "must begin with a header of .*, got no length in 0 bytes"),
    "B25 nothing in it": (
        lambda folder: [path.unlink() for path in folder.iterdir()], "config.json must be",
    ),
    "B25 no config": (instead("config.json", lambda path: None), "config.json must be there, got"),
    "B25 no weights": (
        instead("model.safetensors", lambda path: None), r"must hold .*, got \['config.json'\]",
    ),
} | {
    f"B25 {what} as {name[-24:]}": (instead(name, how), message)
    for name in ("config.json", "model.safetensors", INDEX, TWO)
    for what, how, message in (
        ("a folder", os.mkdir, f"{name} must be a file, got a folder"),
        ("a FIFO", os.mkfifo, f"{name} must be a file, got no plain file"),
        ("a socket", socket_at, f"{name} must be a file, got no plain file"),
    )
}  # fmt: skip
MANY = ",".join(f'"{i}":"{i}"' for i in range(199_000))
EMPTY = '{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
EMPTIES = ",".join(f'"{i}":{EMPTY}' for i in range(36_000))
BOMBS = {  # small files that are large in memory
    "B2 a header of 200,000 lists": (
        weights(lambda: packed(b'{"a":[%s]}' % b",".join([b"[]"] * 199_000))), "data_offsets, got",
    ),
    "B2 a header of 200,000 pairs": (weights(lambda: packed(f"{{{MANY}}}".encode())), "got '0'"),
    "B2 a header of 36,000 tensors": (
        weights(lambda: packed(f"{{{EMPTIES}}}".encode())),
        "12 missing: .*; 36000 unexpected: '0'",
    ),
    "B2 a header of wide characters": (
        weights(lambda: packed('{"\U0001f600":"{4}"}'.replace("{4}", "x" * 4_000_000).encode())),
        "data_offsets, got 'x",
    ),
    "B15 an index of 200,000 names": (
        index_text(lambda: f'{{"weight_map":{{{MANY}}}}}'), "at most 40,000 tensors, got 199,000",
    ),
    "B6 a terabyte of nothing": (sparse, rf"'{W}' \[8, {2**35}\] in place of \[8, 12\]$"),
}  # fmt: skip
FORBIDDEN = {
    f"B25 {name} unreadable": (unreadable(name), "Permission denied")
    for name in ("config.json", "model.safetensors")
}
