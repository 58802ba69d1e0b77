"""torch's Muon on CPUs without bf16 units: its Newton-Schulz iteration in float32.

Why: `torch.optim.Muon` orthogonalizes in bf16, which a CPU without AVX-512 BF16 or AMX multiplies in a plain
loop: 26 s for one step of a 5 M parameter draft, under a second in float32.
Upstream: torch/optim/_muon.py
Delete when: torch.optim.Muon takes the type of its iteration, or chooses it by device.
"""

from __future__ import annotations

import torch

KNOWN = ("2.13.0",)


def apply() -> None:
    """Patch torch.optim.Muon in this process.

    Raises:
        ImportError: naming the torch version that is not known.
    """
    version = torch.__version__.partition("+")[0]
    if version not in KNOWN:
        raise ImportError(f"patches.torch_muon_cpu knows torch {', '.join(KNOWN)}, not {version}: check it")
    from torch.optim import _muon

    _muon._zeropower_via_newtonschulz = orthogonalize


def orthogonalize(
    grad: torch.Tensor, ns_coefficients: tuple[float, float, float], ns_steps: int, eps: float
) -> torch.Tensor:
    """The nearest semi-orthogonal matrix, roughly (singular values end between 0.7 and 1.2).

    X <- a X + (b G + c G^2) X with G = X X^T, from X = grad / |grad| (Jordan et al., "Muon: An optimizer for
    hidden layers in neural networks", 2024).

    Args:
        grad: [m, n], any float type.
        ns_coefficients: (a, b, c).
        ns_steps: iterations.
        eps: least norm to divide by.

    Returns:
        float32 [m, n].
    """
    a, b, c = ns_coefficients
    wide = grad.float() if grad.size(0) <= grad.size(1) else grad.float().T
    x = wide / wide.norm().clamp(min=eps)
    for _ in range(ns_steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if grad.size(0) <= grad.size(1) else x.T
