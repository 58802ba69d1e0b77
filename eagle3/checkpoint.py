"""Checkpoints of 04: step-NNNNNN folders that are whole or do not count; training state as files.

    config.json         Eagle3SpeculatorConfig
    model.safetensors   trainable tensors, float32, speculators' names
    state.pt            optimizer moments by tensor name, schedules, random state, position, best so far
    meta.json           step, epoch, identity, vocabulary and frozen tensors by fingerprint
    COMPLETE            written last: name -> bytes of the others

A folder is filled under a dotted name and renamed when whole. `best` is a relative link.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from eagle3.contract import ConfigError, StageError, fsync_dir, read_json, write_json, write_text
from eagle3.record import differences

if TYPE_CHECKING:
    import torch

log = logging.getLogger("eagle3")

FILES = ("config.json", "model.safetensors", "state.pt", "meta.json")


def step_name(step: int) -> str:
    return f"step-{step:06d}"


def mark_complete(folder: Path, names: Iterable[str]) -> None:
    """Write COMPLETE: the sizes of these files, by which `why_broken` tells that all is there."""
    sizes = {name: (folder / name).stat().st_size for name in names}
    write_text(folder / "COMPLETE", json.dumps(sizes) + "\n")


def why_broken(folder: Path) -> str | None:
    """What makes a checkpoint folder unusable, or None if it is whole."""
    marker = folder / "COMPLETE"
    if not marker.is_file():
        return "has no COMPLETE"
    try:
        sizes = json.loads(marker.read_text())
    except ValueError:
        return "has an unreadable COMPLETE"
    for name, size in sizes.items():
        path = folder / name
        if not path.is_file():
            return f"lacks {name}"
        if path.stat().st_size != size:
            return f"has {name} of {path.stat().st_size} bytes, COMPLETE says {size}"
    return None


def draft_folder(given: str) -> Path:
    """The checkpoint folder `init_from` means: itself, or the best one of a 04_train or run directory."""
    path = Path(given)
    for folder in (path, path / "best", path / "04_train" / "best"):
        if (folder / "model.safetensors").is_file() and (folder / "config.json").is_file():
            return folder.resolve()
    raise ConfigError(
        f"train.init_from {given}: no config.json and model.safetensors there, nor in best/ below it"
    )


class Checkpoints:
    """The checkpoints of one 04_train folder.

    Args:
        folder: 04_train.
        stamp: what every checkpoint here must agree with: {"identity", "vocabulary", "frozen"}.
    """

    def __init__(self, folder: Path, stamp: dict):
        self.folder, self.stamp = folder, json.loads(json.dumps(stamp))

    def all(self) -> list[Path]:
        """Checkpoint folders, newest first, whole or not."""
        return sorted(self.folder.glob("step-[0-9]*"), key=lambda p: -int(p.name.removeprefix("step-")))

    def newest(self) -> Path | None:
        """The newest whole checkpoint of this run; broken newer ones are named in the log.

        Raises:
            ConfigError: it was made with another identity, vocabulary map or verifier; the differences are
                named.
        """
        for path in self.all():
            if why := why_broken(path):
                log.warning("checkpoint %s %s: falling back to the one before it", path.name, why)
                continue
            meta = read_json(path / "meta.json")
            found = {key: meta.get(key) for key in self.stamp}
            if changed := differences(found, self.stamp):
                raise ConfigError(
                    f"{path} does not belong to this run: {'; '.join(changed)}. Rerun 04_train.py with "
                    "--force to train anew, or choose another RUN_DIR"
                )
            return path
        return None

    def save(self, step: int, meta: dict, write: Callable[[Path], None]) -> Path:
        """Write step-NNNNNN.

        Args:
            write: fills the folder it is given with config.json, model.safetensors and state.pt.
        """
        path = self.folder / step_name(step)
        tmp = self.folder / f".{path.name}.{os.getpid()}.tmp"
        shutil.rmtree(tmp, ignore_errors=True)
        tmp.mkdir(parents=True)
        try:
            write(tmp)
            write_json(tmp / "meta.json", {"step": step, **meta, **self.stamp})
            for name in FILES:
                with open(tmp / name, "rb+") as f:
                    os.fsync(f.fileno())
            mark_complete(tmp, FILES)
            if path.exists():  # the same step once more, e.g. now validated: a broken or older copy gives way
                shutil.rmtree(path)
            os.replace(tmp, path)
            fsync_dir(self.folder)
        except OSError as err:
            free = shutil.disk_usage(self.folder).free
            raise StageError(
                f"could not write checkpoint {path}: {err.strerror}; {free} bytes free; the one before it is "
                "kept"
            ) from None
        finally:
            shutil.rmtree(tmp, ignore_errors=True)
        return path

    def link_best(self, step: int) -> None:
        """Point `best` at a checkpoint, atomically, with a relative link."""
        tmp = self.folder / f".best.{os.getpid()}.tmp"
        tmp.unlink(missing_ok=True)
        tmp.symlink_to(step_name(step))
        os.replace(tmp, self.folder / "best")
        fsync_dir(self.folder)

    def prune(self, best: int | None) -> None:
        """Keep the newest two whole checkpoints and the best one; what is broken and older goes too."""
        whole = [p for p in self.all() if why_broken(p) is None]
        keep = {p.name for p in whole[:2]} | ({step_name(best)} if best else set())
        for path in self.all():
            if path.name not in keep:
                shutil.rmtree(path)


def remove_leftovers(folder: Path) -> None:
    """Delete half-written checkpoint folders of a killed run."""
    for path in folder.glob(".step-*.tmp"):
        shutil.rmtree(path, ignore_errors=True)
    for path in folder.glob(".best.*.tmp"):
        path.unlink(missing_ok=True)


# --- training state as plain tensors ------------------------------------------------------------------------


def plain_name(name: str) -> str:
    """A parameter's name without what wrappers put before it."""
    return name.replace("_orig_mod.", "").removeprefix("module.")


def full(tensor: torch.Tensor) -> torch.Tensor:
    """A whole copy on the CPU; a sharded tensor is gathered (every rank must call this in the same order)."""
    if hasattr(tensor, "full_tensor"):
        tensor = tensor.full_tensor()
    return tensor.detach().to("cpu", copy=True)


def put(target: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """`value` placed like `target`: on its device, sharded if it is."""
    if hasattr(target, "device_mesh"):
        from torch.distributed.tensor import distribute_tensor

        return distribute_tensor(value.to(target.device), target.device_mesh, target.placements)
    return value.to(target.device)


def trainable(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Plain name -> parameter, for those that are trained."""
    return {plain_name(n): p for n, p in model.named_parameters() if p.requires_grad}


def optimizer_state(model: torch.nn.Module, optimizers: list[torch.optim.Optimizer]) -> list[dict]:
    """Per optimizer {"state": {name: {key: tensor}}, "groups": hyperparameters}; whole tensors."""
    import torch

    names = {p: n for n, p in trainable(model).items()}
    found = []
    for optimizer in optimizers:
        state = {
            names[p]: {k: full(v) if isinstance(v, torch.Tensor) else v for k, v in values.items()}
            for p, values in optimizer.state.items()
        }
        groups = [{k: v for k, v in g.items() if not k.startswith("param")} for g in optimizer.param_groups]
        found.append({"state": state, "groups": groups})
    return found


def load_optimizer_state(
    model: torch.nn.Module, optimizers: list[torch.optim.Optimizer], saved: list[dict]
) -> None:
    """Inverse of `optimizer_state`; exact, whatever the number of ranks now is."""
    import torch

    names = {p: n for n, p in trainable(model).items()}
    for optimizer, entry in zip(optimizers, saved, strict=True):
        for group, values in zip(optimizer.param_groups, entry["groups"], strict=True):
            group.update(values)
            for p in group["params"]:
                if (name := names.get(p)) in entry["state"]:
                    # AdamW's step counter is a scalar, on the device only where the update is fused.
                    optimizer.state[p] = {
                        k: put(p, v) if isinstance(v, torch.Tensor) and v.ndim
                        else v.to(p.device) if isinstance(v, torch.Tensor) and group.get("fused")
                        else v
                        for k, v in entry["state"][name].items()
                    }  # fmt: skip


def load_weights(model: torch.nn.Module, folder: Path) -> None:
    """Trainable tensors of a checkpoint into a model, sharded or not.

    Raises:
        StageError: other tensors than the model trains.
    """
    import torch
    from safetensors.torch import load_file

    tensors, wanted = load_file(folder / "model.safetensors"), trainable(model)
    if tensors.keys() != wanted.keys():
        raise StageError(
            f"{folder}/model.safetensors and the draft differ in {sorted(tensors.keys() ^ wanted.keys())}"
        )
    with torch.no_grad():
        for name, p in wanted.items():
            p.copy_(put(p, tensors[name]))
