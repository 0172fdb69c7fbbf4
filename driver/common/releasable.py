"""Memory that is released while a program does not need it, and restored at the same addresses."""

import warnings
import weakref
from typing import Any

import torch
from torch import Tensor


class ReleasableMemory:
    """Tensors whose memory can be released and restored; their contents are lost.

    On a GPU the addresses stay, so that captured graphs stay valid: an address range is reserved
    once, and physical memory is mapped there (CUDA virtual memory management). torch does not count
    this memory. Where the driver or its Python bindings are missing, it is ordinary memory, which
    is not released, and a warning says so. On the CPU, which has no graphs, storages are resized.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.released = False  # whether the tensors have no memory
        self._supported = True
        self._tensors: list[Tensor] = []  # that can be released
        self._blocks: list[_Block] = []  # on a GPU, of the tensors
        self._peak_bytes = 0

    def zeros(self, *shape: int, dtype: torch.dtype) -> Tensor:
        self.peak_bytes()
        if self.device.type == "cuda" and self._supported:
            try:
                block = _Block(torch.Size(shape).numel() * dtype.itemsize, self.device)
            except (ImportError, DriverError) as error:
                self._supported = False
                warnings.warn(
                    f"no CUDA virtual memory ({type(error).__name__}: {error}): KV cache and"
                    " features keep their memory during updates and sleep; install cuda-bindings",
                    stacklevel=3,
                )
            else:
                flat = torch.as_tensor(block, device=self.device)
                self._blocks.append(block)
                self._tensors.append(flat.view(dtype).view(shape).zero_())
                return self._tensors[-1]
        tensor = torch.zeros(shape, dtype=dtype, device=self.device)
        if self.device.type == "cpu":
            self._tensors.append(tensor)
        return tensor

    def release(self) -> None:
        """Releases the memory; nothing may use the tensors until `restore`."""
        if self.released:
            return
        self.peak_bytes()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # kernels may still use it
            for block in self._blocks:
                block.unmap()
        if self.device.type == "cpu":
            for tensor in self._tensors:
                tensor.untyped_storage().resize_(0)
        self.released = True

    def restore(self) -> None:
        """Allocates the memory again, with zeros; torch.OutOfMemoryError if that fails."""
        if not self.released:
            return
        self.peak_bytes()
        for block in self._blocks:
            block.map()
        for tensor in self._tensors:
            if self.device.type == "cpu":
                tensor.untyped_storage().resize_(tensor.nbytes)
            tensor.zero_()
        self.released = False

    def peak_bytes(self) -> int:
        """Most bytes of a GPU in use at once so far: torch's and these. Resets torch's peak."""
        if self.device.type != "cuda":
            return 0
        now = torch.cuda.max_memory_allocated(self.device)
        if not self.released:
            now += sum(block.size for block in self._blocks)
        self._peak_bytes = max(self._peak_bytes, now)
        torch.cuda.reset_peak_memory_stats(self.device)
        return self._peak_bytes


_DROPPED: list[tuple[Any, ...]] = []  # blocks that are not freed yet


class DriverError(RuntimeError):
    """A call of the CUDA driver failed."""


class _Block:
    """A range of addresses of a GPU with physical memory, readable as an array of bytes."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        from cuda.bindings import driver  # torch requires these bindings on Linux

        self._driver: Any = driver
        torch.cuda.init()
        where = driver.CUmemLocation()
        where.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        where.id = torch.cuda.current_device() if device.index is None else device.index
        self._kind = driver.CUmemAllocationProp()
        self._kind.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._kind.location = where
        self._access = driver.CUmemAccessDesc()
        self._access.location = where
        self._access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        best = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        step = _checked(driver.cuMemGetAllocationGranularity(self._kind, best))
        self.size = -(-num_bytes // step) * step
        self._address = _checked(driver.cuMemAddressReserve(self.size, 0, 0, 0))
        self._mapped: list[Any] = []  # at most one handle
        held = driver, self._address, self.size, self._mapped, device
        weakref.finalize(self, _free, held).atexit = False  # at exit the driver frees it
        self.map()
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (int(self._address), False),
            "version": 2,
        }

    def map(self) -> None:
        driver = self._driver
        if self._mapped:
            return
        code, handle = driver.cuMemCreate(self.size, self._kind, 0)
        if code == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            torch.cuda.empty_cache()  # torch keeps freed memory
            code, handle = driver.cuMemCreate(self.size, self._kind, 0)
        if code == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            free, total = torch.cuda.mem_get_info(self._access.location.id)
            raise torch.OutOfMemoryError(
                f"CUDA out of memory: {self.size / 1e9:.2f} GB are needed, {free / 1e9:.2f} of"
                f" {total / 1e9:.2f} GB are free"
            )
        _checked((code, handle))
        _checked(driver.cuMemMap(self._address, self.size, 0, handle, 0))
        self._mapped.append(handle)
        _checked(driver.cuMemSetAccess(self._address, self.size, [self._access], 1))

    def unmap(self) -> None:
        _unmap(self._driver, self._address, self.size, self._mapped)


def _unmap(driver: Any, address: Any, size: int, mapped: list[Any]) -> None:
    _checked(driver.cuMemUnmap(address, size))
    _checked(driver.cuMemRelease(mapped.pop()))


def _free(held: tuple[Any, ...]) -> None:
    """Frees a block that no tensor refers to, after a capture of a graph that is in progress."""
    _DROPPED.append(held)
    if torch.cuda.is_current_stream_capturing():  # Python collects garbage at any time
        return
    while _DROPPED:
        driver, address, size, mapped, device = _DROPPED.pop()
        if mapped:
            torch.cuda.synchronize(device)  # kernels may still use it
            _unmap(driver, address, size, mapped)
        _checked(driver.cuMemAddressFree(address, size))


def _checked(result: tuple[Any, ...]) -> Any:
    """The value of a driver call, if it has one."""
    code, *values = result
    if code.value:
        raise DriverError(code.name)
    return values[0] if values else None
