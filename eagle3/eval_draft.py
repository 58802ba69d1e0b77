"""A draft folder before it is served: what identifies it, and faults that a server would not report."""

from __future__ import annotations

import hashlib
from pathlib import Path

from eagle3.contract import StageError, read_json
from eagle3.record import digest, file_sha256
from eagle3.tensorfile import read_header

# Weights up to here are hashed whole; of larger ones the header and SAMPLED bytes at either end.
WHOLE_BYTES = 256_000_000
SAMPLED = 16_000_000


def fingerprint(folder: Path) -> str:
    """Hash of a draft's config and weights; of large weights only ends and sizes, so that it is quick."""
    config = {k: v for k, v in (read_json(folder / "config.json") or {}).items() if k != "_name_or_path"}
    weights = sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")])
    return digest([config, {p.name: _content(p) for p in weights}])


def _content(path: Path) -> list:
    size = path.stat().st_size
    if size <= WHOLE_BYTES:
        return [size, file_sha256(path)]
    with open(path, "rb") as f:
        ends = hashlib.sha256(f.read(SAMPLED))
        f.seek(size - SAMPLED)
        ends.update(f.read(SAMPLED))
    return [size, ends.hexdigest()]


def check_draft(folder: Path, verifier, max_model_len: int) -> None:
    """Refuse drafts that vLLM serves without a word, but badly. Only headers are read.

    Raises:
        StageError: not this verifier's width or vocabulary; a position limit below the server's; a reduced
            vocabulary without its table (vLLM then takes the first ids).
    """
    config = read_json(folder / "config.json") or {}
    layer = {**config, **(config.get("transformer_layer_config") or {})}
    limit = layer.get("max_position_embeddings")
    if limit is not None and limit < max_model_len:
        raise StageError(
            f"{folder}: the draft's max_position_embeddings {limit} is below the server's max_model_len "
            f"{max_model_len}: longer requests crash it or read past its rotary table; "
            "lower verifier.max_model_len or convert the draft anew"
        )
    for key, want in (("hidden_size", verifier.hidden_size), ("vocab_size", verifier.vocab_size)):
        have = layer.get("target_hidden_size", layer.get(key)) if key == "hidden_size" else layer.get(key)
        if have is not None and have != want:
            raise StageError(f"{folder}: {key} {have}, the verifier has {want}: a draft of another verifier")
    names = tensor_names(folder)
    size, reduced = layer.get("vocab_size"), config.get("draft_vocab_size") or layer.get("vocab_size")
    if names is not None and reduced != size and not names & {"d2t", "draft_id_to_target_id"}:
        raise StageError(
            f"{folder}: draft_vocab_size {reduced} of {size}, but no d2t in its weights: it would be served "
            f"as if it drafted the first {reduced} ids; convert it anew with 05_convert.py"
        )


def tensor_names(folder: Path) -> set[str] | None:
    """Names in the headers of a folder's safetensors files; None where it has none (older .bin drafts).

    Raises:
        StageError: a file that is not whole.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files and not list(folder.glob("*.bin")):
        raise StageError(f"{folder} holds no weights (*.safetensors)")
    names: set[str] = set()
    for path in files:
        try:
            names |= read_header(path)[0].keys()
        except ValueError as err:
            raise StageError(f"{path} is not a whole safetensors file ({err})") from None
    return names if files else None
