"""Small arrays of the host on a device."""

import numpy as np
import pytest
import torch

from driver.common.uploads import uploaded
from tests import kit


@pytest.mark.parametrize("device", kit.DEVICES)
def test_lists_and_arrays_arrive_with_their_shape(device):
    for values in ([3, -1], [[1, 2], [3, 4]], range(5), np.arange(6).reshape(2, 3), []):
        got = uploaded(values, torch.device(device))
        assert got.dtype == torch.int32 and got.device.type == device
        assert got.tolist() == np.asarray(values).tolist()
    wide = uploaded([2**40], torch.device(device), np.int64)
    assert wide.tolist() == [2**40]


@kit.gpu
@kit.needs_gpu
def test_an_upload_does_not_wait_for_the_gpu():
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = uploaded([3, 4], torch.device("cuda"))
        with pytest.raises(RuntimeError, match="synchronizing"):
            torch.tensor([3, 4], device="cuda")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert got.tolist() == [3, 4]
