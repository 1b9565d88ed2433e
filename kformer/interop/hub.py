"""Where a checkpoint lies: a folder as it is, or an id of the Hugging Face hub, downloaded.

`huggingface_hub` keeps the cache: a file appears in it whole or not at all, one process downloads
and others wait. It names what it downloads by the checksum that the hub gives; whether the file has
it is checked here, each time.
"""

import hashlib
import os
import re
from pathlib import Path

from kformer import files
from kformer.interop.checkpoint import INDEX, TEXTS, WEIGHTS, contained, shards_of
from kformer.interop.header import CheckpointError, brief, refusing

ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?")
MAX_ID = 96
SMALL = (*TEXTS, INDEX)


def folder_of(source):
    """The folder of a checkpoint: `source` itself, or what is downloaded for this id."""
    if isinstance(source, str | Path) and os.path.isdir(source):
        return Path(source)
    name = source if isinstance(source, str) else ""
    if len(name) > MAX_ID or not ID.fullmatch(name) or ".." in name or "--" in name:
        rule = "a checkpoint must be a folder, or an id such as 'name' or 'owner/name' of at most"
        raise CheckpointError(f"{rule} {MAX_ID} letters, digits and '._-', got {brief(source)}")
    with refusing():
        folder = Path(fetched(name, SMALL))
        verify(folder, SMALL)
        shards = shards_of(contained(folder, INDEX)) if (folder / INDEX).exists() else [WEIGHTS]
        fetched(name, shards, revision=folder.name)
        verify(folder, shards)
    return folder


def fetched(name, wanted, **revision):
    """The folder in the cache with these files of the hub, without the network if it must be."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        rule = f"{name!r} is no folder, and to download it takes huggingface_hub"
        raise CheckpointError(f"{rule}: pip install 'kformer[hub]'") from None
    first = None
    for local in (False, True):
        try:
            return snapshot_download(
                name, allow_patterns=list(wanted), local_files_only=local, **revision
            )
        except Exception as error:  # of the network, of its libraries, of the disk
            first = first or error
    text = (str(first).strip().splitlines() or [type(first).__name__])[0]
    rule = f"{name!r} is no folder and could not be downloaded, nor is it in the cache"
    raise CheckpointError(f"{rule}: {text[:300]}")


def verify(folder, names):
    """Every file must have the checksum that its name in the cache says. (Where the system has no
    links, files have no such names, and this checks nothing.)"""
    for path in (folder / name for name in names):
        blob = path.resolve()
        if not path.exists() or not re.fullmatch("[0-9a-f]{40}|[0-9a-f]{64}", blob.name):
            continue
        found = files.sha256(blob) if len(blob.name) == 64 else git_checksum(blob)
        if found != blob.name:
            forget(path, blob)
            rule = f"{path.name} must have the checksum {blob.name} of the hub"
            raise CheckpointError(f"{rule}, got {found}; it is downloaded anew next time")


def git_checksum(path):
    """By which git names the content of a file."""
    head = f"blob {path.stat().st_size}\0".encode()
    with open(path, "rb") as file:
        begun = hashlib.sha1(head, usedforsecurity=False)
        return hashlib.file_digest(file, lambda: begun).hexdigest()


def forget(*paths):
    """Out of the cache, where that may be written."""
    for path in paths:
        try:
            path.unlink(missing_ok=True)
        except OSError:
            return
