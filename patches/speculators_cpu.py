"""speculators 0.9.0, CPU only: its Trainer and its process group without an accelerator.

Why: `Trainer` moves the model to an integer device and autocasts for "cuda", `_StepTimer` calls
torch.accelerator.synchronize, and `maybe_setup_distributed` insists on an accelerator; all of it fails on a
machine that has none, although nothing in the training itself needs one.
Upstream: speculators/train/trainer.py, speculators/train/distributed.py
Delete when: `Trainer` of the installed version trains a model on a CPU-only torch (tests/test_train.py then
fails here, because this module refuses versions that it does not know).
"""

from __future__ import annotations

from importlib import metadata

import torch

KNOWN = ("0.9.0",)


def apply() -> None:
    """Patch speculators in this process; refuses an unknown version and a machine with an accelerator.

    Raises:
        ImportError: naming version or device.
    """
    version = metadata.version("speculators").partition("+")[0]
    if version not in KNOWN:
        raise ImportError(
            f"patches.speculators_cpu knows speculators {', '.join(KNOWN)}, not {version}: check it"
        )
    if torch.accelerator.is_available():
        raise ImportError("patches.speculators_cpu is for machines without an accelerator only")
    from speculators.train import distributed, trainer

    trainer.get_local_rank = lambda: torch.device("cpu")
    torch.accelerator.synchronize = lambda *_args, **_kwargs: None  # nothing runs ahead of a CPU
    distributed.maybe_setup_distributed = setup_gloo
    set_up = trainer.Trainer.setup_trainer
    if not hasattr(set_up, "on_cpu"):

        def setup_trainer(self):
            self.device_type = "cpu"
            set_up(self)

        setup_trainer.on_cpu = True
        trainer.Trainer.setup_trainer = setup_trainer


def setup_gloo(sp_size: int = 1) -> None:
    """`maybe_setup_distributed` with gloo, for processes that torchrun started."""
    import os

    from speculators.train import distributed

    distributed._local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    distributed._is_distributed = "LOCAL_RANK" in os.environ
    if not distributed._is_distributed:
        return
    torch.distributed.init_process_group("gloo")
    distributed._rank = torch.distributed.get_rank()
    distributed._world_size = torch.distributed.get_world_size()
    distributed._init_sp_process_groups(distributed._rank, distributed._world_size, sp_size)
