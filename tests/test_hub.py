"""Downloads: what the hub sends is whole and has its checksum, or it is no checkpoint.

The hub is a server on this machine that speaks as much of its protocol as `huggingface_hub` asks.
"""

import errno
import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading

import numpy as np
import pytest
from checkpoint_support import TWO, good, load, sharded
from huggingface_hub import constants, file_download

from kformer.interop import hub
from kformer.interop.checkpoint import INDEX
from kformer.interop.header import CheckpointError

ID, COMMIT = "owner/name", "c" * 40
HTML = b"<!DOCTYPE html><html>Bad gateway</html>"


class Hub(http.server.ThreadingHTTPServer):
    """Serves the files of a folder; `sent` may spoil what is sent in place of a file."""

    def __init__(self, folder):
        super().__init__(("127.0.0.1", 0), Answers)
        self.folder, self.asked, self.status = folder, [], 200
        self.sent = lambda name, content: content
        self.cut = self.more = ()
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self):
        self.shutdown()
        self.server_close()


class Answers(http.server.BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def do_HEAD(self):
        self.do_GET(only_head=True)

    def do_GET(self, only_head=False):
        path = self.path.split("?")[0]
        if self.server.status != 200:
            self.answer(HTML, only_head, status=self.server.status)
        elif path == f"/api/models/{ID}/revision/main":
            self.answer(json.dumps({"id": ID, "sha": COMMIT, "siblings": []}).encode())
        elif path == f"/api/models/{ID}/tree/{COMMIT}":
            files = [entry(file) for file in sorted(self.server.folder.iterdir())]
            self.answer(json.dumps([*files, *self.server.more]).encode())
        elif path.startswith(f"/{ID}/resolve/{COMMIT}/"):
            name = path.rsplit("/")[-1]
            content = (self.server.folder / name).read_bytes()
            self.server.asked += [] if only_head else [name]
            self.answer(self.server.sent(name, content), only_head, name, tag(name, content))
        else:
            self.answer(b"{}", only_head, status=404)

    def answer(self, content, only_head=False, name=None, tag=None, status=200):
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        if tag:
            self.send_header("ETag", f'"{tag}"')
            self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if not only_head:
            self.wfile.write(content[: len(content) // 2] if name in self.server.cut else content)


def tag(name, content):
    """The checksum by which the hub calls a file: SHA-256 of weights, git's of all others."""
    if name.endswith(".safetensors"):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def entry(file):
    content = file.read_bytes()
    found = {"type": "file", "path": file.name, "size": len(content)}
    if file.name.endswith(".safetensors"):
        lfs = {"oid": tag(file.name, content), "size": len(content), "pointerSize": 100}
        return {**found, "oid": "0" * 40, "lfs": lfs}
    return {**found, "oid": tag(file.name, content)}


@pytest.fixture
def server(tmp_path, monkeypatch):
    folder = good(tmp_path / "served")
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    made = Hub(folder)
    monkeypatch.setattr(constants, "ENDPOINT", made.url)
    monkeypatch.setattr(
        constants,
        "HUGGINGFACE_CO_URL_TEMPLATE",
        made.url + "/{repo_id}/resolve/{revision}/{filename}",
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
    monkeypatch.setattr(file_download.time, "sleep", lambda seconds: None)
    yield made
    made.stop()


def same(a, b):
    assert list(a) == list(b)
    for name in a:
        np.testing.assert_array_equal(a[name], b[name])


def refused(message):
    with pytest.raises(CheckpointError, match=message) as caught:
        load(ID)
    assert len(str(caught.value).splitlines()) == 1


def partial(tmp_path):
    return [path.name for path in (tmp_path / "cache").rglob("*.incomplete")]


@pytest.mark.parametrize("parts", [1, 2])
def test_download(parts, server, tmp_path):
    """Only what a checkpoint consists of; a second time, and without the hub, from the cache."""
    if parts == 2:
        sharded(server.folder)
    expected = load(server.folder)
    same(load(ID), expected)
    weights = [file.name for file in server.folder.glob("model*")]
    assert sorted(server.asked) == sorted(["config.json", *weights])
    same(load(ID), expected)
    server.stop()
    same(load(ID), expected)
    assert len(server.asked) == 1 + len(weights)


def test_no_hub(server, tmp_path):
    server.stop()
    refused(f"'{ID}' is no folder and could not be downloaded, nor is it in the cache: .+")
    assert not list((tmp_path / "cache").rglob("*config*"))


@pytest.mark.parametrize("status", [401, 404, 500, 503])
def test_the_hub_says_no(status, server):
    server.status = status
    refused(f"'{ID}' is no folder and could not be downloaded, .*: .+")
    server.status = 200
    same(load(ID), load(server.folder))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_another_checksum(name, server):
    """Bytes of the right number that are others: refused, forgotten and downloaded anew."""
    server.sent = lambda asked, content: content[:-1] + b"!" if asked == name else content
    refused(f"{name} must have the checksum [0-9a-f]+ of the hub, got [0-9a-f]+; it is downloaded")
    server.sent = lambda asked, content: content
    same(load(ID), load(server.folder))


def test_a_damaged_index(server):
    """It is read before the shards are there: what it says counts when its checksum does."""
    sharded(server.folder)
    server.sent = lambda asked, content: b"?" * len(content) if asked == INDEX else content
    refused(f"{INDEX} must have the checksum [0-9a-f]+ of the hub, got")
    server.sent = lambda asked, content: content
    same(load(ID), load(server.folder))


@pytest.mark.parametrize("text", ["", "?", "[]", "{}"])
def test_no_index(text, server):
    sharded(server.folder)
    (server.folder / INDEX).write_text(text)
    refused("must (have 1 to|be JSON|be a JSON object|hold 'weight_map')")


def test_no_weights(server):
    (server.folder / "model.safetensors").unlink()
    refused(r"must hold model.safetensors or .* \(pickles are never read\), got \['config.json'\]")


def test_a_damaged_cache(server, tmp_path):
    """Checksums are compared each time: a bit of what was downloaded before is another."""
    expected = load(ID)
    blob = (hub.folder_of(ID) / "model.safetensors").resolve()
    raw = bytearray(blob.read_bytes())
    raw[-1] ^= 1
    blob.write_bytes(raw)
    refused("model.safetensors must have the checksum")
    same(load(ID), expected)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_cut_download(name, server, tmp_path):
    server.cut = (name,)
    refused(f"'{ID}' is no folder and could not be downloaded, .*: .+")
    assert not partial(tmp_path)
    server.cut = ()
    same(load(ID), load(server.folder))


def test_a_cut_shard(server, tmp_path):
    sharded(server.folder)
    server.cut = (TWO,)
    refused(f"'{ID}' is no folder and could not be downloaded, .*: .+")
    server.cut = ()
    same(load(ID), load(server.folder))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_web_page(name, server, tmp_path):
    """With status 200, as some gates between here and the hub send it."""
    server.sent = lambda asked, content: HTML if asked == name else content
    refused(f"could not be downloaded|{name} must have the checksum")
    assert not partial(tmp_path)
    server.sent = lambda asked, content: content
    same(load(ID), load(server.folder))


def test_a_full_disk(server, tmp_path, monkeypatch):
    get = file_download.http_get

    def full(url, *args, **kwargs):
        if url.endswith("safetensors"):
            raise OSError(errno.ENOSPC, "No space left on device")
        get(url, *args, **kwargs)

    monkeypatch.setattr(file_download, "http_get", full)
    refused(r"could not be downloaded, .*: \[Errno 28\] No space left on device")
    assert not partial(tmp_path)
    monkeypatch.setattr(file_download, "http_get", get)
    same(load(ID), load(server.folder))


def test_a_cache_that_cannot_be(server, tmp_path):
    (tmp_path / "cache").write_text("a file")
    refused("could not be downloaded, .*: .*(File exists|Not a directory)")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everything")
def test_a_cache_for_reading_only(server, tmp_path):
    """Empty, it is one line; filled, it is read."""
    (tmp_path / "cache").mkdir(mode=0o500)
    refused("could not be downloaded, .*: .*Permission denied")
    (tmp_path / "cache").chmod(0o700)
    expected = load(ID)
    for path in [tmp_path / "cache", *(tmp_path / "cache").rglob("*")]:
        if path.is_dir():
            path.chmod(0o500)
    same(load(ID), expected)


def test_an_index_that_leads_out(server, tmp_path):
    """Names of shards are checked before they are asked for."""
    index = sharded(server.folder)
    index["weight_map"] = dict.fromkeys(index["weight_map"], "../../escape.safetensors")
    (server.folder / INDEX).write_text(json.dumps(index))
    server.more = [{"type": "file", "path": "../../escape.safetensors", "size": 1, "oid": "0" * 40}]
    refused("must name shards by plain file names ending in .safetensors, got '../../escape")
    assert sorted(server.asked) == ["config.json", INDEX]


def test_a_snapshot_that_leads_out(server, tmp_path):
    """A link of the cache may lead to its blobs, and nowhere else."""
    load(ID)
    path = hub.folder_of(ID) / "config.json"
    blob = path.resolve()
    os.replace(blob, tmp_path / blob.name)
    path.unlink()
    path.symlink_to(tmp_path / blob.name)
    server.stop()
    refused("config.json must lie in its folder, got a link to")


def test_two_processes(server, tmp_path):
    """Both have it in the end, and the cache holds each file once."""
    code = "import sys; from kformer.interop import hub; print(hub.folder_of(sys.argv[1]).name)"
    here = {"HF_ENDPOINT": server.url, "HF_HUB_CACHE": constants.HF_HUB_CACHE}
    env = {**os.environ, **here, "KERAS_BACKEND": "numpy"}  # which starts fastest
    command = [sys.executable, "-c", code, ID]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    both = [subprocess.Popen(command, env=env, **pipes) for _ in range(2)]
    for process in both:
        out, error = process.communicate(timeout=120)
        assert out.strip() == COMMIT, error
    blobs = [path.name for path in (tmp_path / "cache").rglob("blobs/*")]
    assert len(blobs) == 2 and not partial(tmp_path)
    same(load(ID), load(server.folder))


def test_without_the_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    rule = f"'{ID}' is no folder, and to download it takes huggingface_hub: pip install 'kformer"
    refused(rule)
