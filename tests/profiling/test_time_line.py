"""Shares of kernels that overlap."""

from profiling.kernels.time_line import shares, short


def event(name, begin, duration, kind="kernel"):
    return {"name": name, "ts": begin, "dur": duration, "cat": kind}


def test_a_kernel_has_the_time_from_the_end_before_to_its_own():
    events = [
        event("a", 10, 5),
        event("b", 11, 8),  # waits for a
        event("a", 25, 2),
        event("launch", 0, 90, "cuda_runtime"),
    ]
    assert shares(events) == {"a": (2, 7, 7), "idle": (0, 6, 0), "b": (1, 4, 8)}


def test_names_are_short():
    name = "void tlt::(anonymous namespace)::mid_kernel<__nv_bfloat16, 4>(tlt::Params, int)"
    assert short(name) == "mid_kernel"
    assert short("memcpy32_post") == "memcpy32_post"
