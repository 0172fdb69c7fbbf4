"""A platform of verl without an accelerator, for `VERL_PLATFORM=cpu`."""

import contextlib
import types

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry

init_process_group = torch.distributed.init_process_group


def init_on_cpu(backend=None, *args, **kwargs):
    """verl asks for one backend for the CPU and one for the device, here the CPU again."""
    return init_process_group("gloo", *args, **kwargs)


torch.distributed.init_process_group = init_on_cpu


def nothing(*_, **__):
    return 0


class DeviceModule(types.ModuleType):
    """`torch.cpu`, and members of `torch.cuda` about memory that do nothing."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "get_device_name":
            return lambda *_: "CPU"
        if name == "mem_get_info":
            return lambda *_: (1 << 30, 1 << 30)
        if name in ("get_rng_state", "set_rng_state"):
            return getattr(torch, name)
        return getattr(torch.cpu, name, nothing)


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    """One CPU as one device; Ray counts it as a GPU, since verl's pools ask for one."""

    device_name, vendor_name = "cpu", "cpu"
    device_module = DeviceModule("cpu")

    def is_available(self):
        return True

    def current_device(self):
        return "cpu"  # the argument of `Tensor.to`

    def device_count(self):
        return 1

    def set_device(self, device_index):
        pass

    def synchronize(self, device_index=None):
        pass

    def manual_seed(self, seed):
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def set_allocator_settings(self, settings):
        pass

    def empty_cache(self):
        pass

    def get_device_capability(self, device_index=0):
        return None, None

    def communication_backend_name(self):
        return "gloo"

    def visible_devices_envvar(self):
        return "CUDA_VISIBLE_DEVICES"

    def nvtx_range(self, msg):
        return contextlib.nullcontext()

    def profiler_start(self):
        pass

    profiler_stop = profiler_start

    def ray_resource_name(self):
        return "GPU"

    def ray_noset_envvars(self):
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self):
        return False

    def cudart(self):
        return None
