"""vLLM 0.32, CPU platform only: an EAGLE-3 Llama draft in one KV group with an MLA verifier (kimi-tiny).

Why: the CPU's MLA kernel knows blocks of 16 tokens only, its ordinary attention claims multiples of 32, and
both land in one group: "No common block size for 16 (CPU_MLA: [16]; CPU_ATTN: [MultipleOf(32)])" ends the
start-up. The attention kernel does have a path for 16 ("vec16", which `_get_attn_isa` chooses by block
size); with it kimi-tiny's draft was served as trained: 3.94 tokens a step, all 24 held-out answers the
language's own (run).
Use: --worker-extension-cls patches.vllm_cpu_mla_draft.WorkerExtension, with the repository root on
PYTHONPATH (the worker imports this file before it sizes its cache). Other verifiers have blocks of 128 and
don't need it.
Upstream: vllm/v1/attention/backends/cpu_attn.py, get_supported_kernel_block_sizes
Delete when: vllm-cpu serves kimi-tiny with a draft without it.
"""

from __future__ import annotations

from importlib import metadata

from vllm.platforms import current_platform
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

KNOWN = ("0.32.0",)


def apply() -> None:
    """Let CPU_ATTN take blocks of 16. Raises ImportError by name where this fix was never tried."""
    if not current_platform.is_cpu():
        raise ImportError("patches.vllm_cpu_mla_draft is for the CPU build of vLLM only")
    version = metadata.version("vllm-cpu").partition("+")[0]
    if version not in KNOWN:
        known = ", ".join(KNOWN)
        raise ImportError(f"patches.vllm_cpu_mla_draft knows vllm-cpu {known}, not {version}: check it")

    def sixteens(kv_cache_spec=None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    CPUAttentionBackend.get_supported_kernel_block_sizes = staticmethod(sixteens)


apply()


class WorkerExtension:
    """Adds nothing: naming it makes the worker import this module."""
