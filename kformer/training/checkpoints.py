"""Checkpoints on disk: a folder per step, written whole, with checksums.

    directory/step-00000500/state.safetensors     weights, optimizer, random streams, metrics
                            manifest.json         where training stood, and what belongs to it

The manifest is written last and the folder renamed into place, so that a folder with its proper
name is complete whatever happened. Which one is newest is read from its name, not from a clock.
"""

import warnings
from pathlib import Path

import numpy as np

from kformer import backend, files

FORMAT = 1
LIMIT = 2**24  # bytes of a manifest
KEYS = ("epoch", "batch", "step", "seconds", "model", "data", "sha256")


def variables_of(model):
    """{name: variable} of all that training changes; numbered, as some names differ in every
    process."""
    groups = {
        "model": model.variables,
        "optimizer": model.optimizer.variables,
        "metrics": model.metrics_variables,
    }
    return {
        f"{group}/{number:05d}": variable
        for group, members in groups.items()
        for number, variable in enumerate(members)
    }


def save(directory, model, data, position, keep=2):
    """Write a checkpoint, then remove all but the newest `keep`.

    Weights that are not finite are refused: the last good checkpoint stays.
    """
    from safetensors.numpy import save_file

    arrays = {}
    for name, variable in variables_of(model).items():
        arrays[name] = np.array(backend.to_numpy(variable.value), order="C")
        if not name.startswith("metrics/") and not np.isfinite(arrays[name]).all():
            rule = "weights must be finite to be saved"
            raise ValueError(f"{rule}, got NaN or infinity in {name} at step {position['step']}")
    folder = Path(directory) / f"step-{position['step']:08d}"
    with files.written(folder) as beside:
        beside.mkdir()
        save_file(arrays, beside / "state.safetensors")
        manifest = {
            "format": FORMAT,
            **position,
            "model": signature(model),
            "data": None if data is None else data.fingerprint(),
            "sha256": files.sha256(beside / "state.safetensors"),
        }
        files.write_json(beside / "manifest.json", manifest)
    abandoned = Path(directory).glob(".step-*")  # by a process that was killed while it wrote
    for old in [*folders(directory)[keep:], *abandoned]:
        files.remove(old)


def signature(model):
    """What a checkpoint's model and this one must have in common."""
    return {variable.path: list(variable.shape) for variable in model.weights}


def folders(directory):
    """Checkpoints, newest first."""
    found = Path(directory).glob("step-*") if Path(directory).is_dir() else []
    return sorted((f for f in found if f.name[5:].isdigit()), key=lambda f: f.name, reverse=True)


def load_newest(directory):
    """(folder, manifest, arrays) of the newest sound checkpoint, or None if there is none.

    One that is damaged is passed over with a warning that names it.
    """
    for folder in folders(directory):
        try:
            return folder, *load(folder)
        except (ValueError, OSError) as error:
            warnings.warn(f"{folder} is damaged and was passed over: {error}", stacklevel=2)
    return None


def load(folder):
    """The manifest and the arrays of a checkpoint; ValueError if anything is not as written."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    text = files.read_text(folder / "manifest.json", LIMIT, "a manifest")
    manifest = files.parse_json(text, "a manifest")
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ValueError(f"a manifest must be a dict of format {FORMAT}, got {text[:40]!r}")
    if missing := [key for key in KEYS if key not in manifest]:
        raise ValueError(f"a manifest must have {', '.join(KEYS)}, got no {missing[0]}")
    if files.sha256(folder / "state.safetensors") != manifest["sha256"]:
        raise ValueError("state.safetensors must have the checksum of its manifest, got another")
    try:
        return manifest, load_file(folder / "state.safetensors")
    except SafetensorError as error:
        raise ValueError(f"state.safetensors must be whole, got {error}") from None


def restore(model, data, found):
    """Put a checkpoint into the model: {"epoch", "batch", "step", "seconds", "metrics"}.

    Another model or other data are an error: training would go on with something else.
    """
    folder, manifest, arrays = found
    mine, theirs = signature(model), manifest["model"]
    differ = [path for path in {**mine, **theirs} if mine.get(path) != theirs.get(path)]
    if differ:
        shapes = f"{mine.get(differ[0])} here and {theirs.get(differ[0])} there"
        raise ValueError(f"{folder} must be of this model, got {differ[0]} with {shapes}")
    if data is not None and manifest["data"] != data.fingerprint():
        raise ValueError(f"{folder} must be of the same data and batches, got others")
    model.optimizer.build(model.trainable_variables)
    places = {k: v for k, v in variables_of(model).items() if not k.startswith("metrics/")}
    for name, variable in places.items():
        if name not in arrays or arrays[name].shape != tuple(variable.shape):
            raise ValueError(f"{folder} must be of this optimizer, got no {name} for it")
    for name, variable in places.items():
        variable.assign(arrays[name])
    metrics = [arrays[name] for name in sorted(arrays) if name.startswith("metrics/")]
    return {**{k: manifest[k] for k in KEYS[:4]}, "metrics": metrics}
