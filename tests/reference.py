"""Float64 references in plain torch, one per op, written to be read."""

import torch

# ---- layers ----------------------------------------------------------------------------------


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


# ---- attention and kv ------------------------------------------------------------------------


# ---- sampling --------------------------------------------------------------------------------


# ---- tree ------------------------------------------------------------------------------------


# ---- ngram -----------------------------------------------------------------------------------
