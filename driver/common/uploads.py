"""Small arrays of the host on a device."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def uploaded(
    values: npt.ArrayLike, device: torch.device, dtype: npt.DTypeLike = np.int32
) -> Tensor:
    """A tensor of the values; the copy does not wait for work that a GPU has enqueued.

    One from memory that is not pinned would wait. NumPy reads a list faster than torch.
    """
    array = torch.from_numpy(np.asarray(values, dtype))
    if device.type == "cuda":
        array = array.pin_memory()
    return array.to(device, non_blocking=True)
