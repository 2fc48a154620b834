"""Private names of torch for torch_settings.py: what a program may have set. The compiler's are in torch_private.py."""

import sys
from typing import Any

import torch


def has_function_modes() -> bool:
    """Whether something changes what torch's functions do in this thread: a default device is such a mode."""
    return torch._C._len_torch_function_stack() > 0


def take_function_modes() -> Any:
    """Switch all of them off, in this thread. Returns what ``put_back_function_modes`` needs."""
    import torch.utils._device as device

    modes = [torch._C._pop_torch_function_stack() for _ in range(torch._C._len_torch_function_stack())]
    of_thread = torch._GLOBAL_DEVICE_CONTEXT  # has the attribute once a device was set in this thread
    state = modes, getattr(of_thread, "device_context", None), device.CURRENT_DEVICE
    of_thread.device_context = device.CURRENT_DEVICE = None
    return state


def put_back_function_modes(state: Any) -> None:
    import torch.utils._device as device

    of_thread = torch._GLOBAL_DEVICE_CONTEXT
    modes, of_thread.device_context, device.CURRENT_DEVICE = state
    for mode in reversed(modes):
        torch._C._push_on_torch_function_stack(mode)


def set_grad(enabled: bool) -> None:
    """``torch.set_grad_enabled`` without making an object, which takes three times as long."""
    torch._C._set_grad_enabled(enabled)


def is_autocast_on() -> bool:
    """For any kind of device, in this thread."""
    return torch._C._is_any_autocast_enabled()


def deterministic_algorithms() -> tuple[bool, bool] | None:
    """None: they are not asked for. Else whether ops without one warn alone, and whether the compiler is asked too."""
    if not torch.are_deterministic_algorithms_enabled():
        return None
    config = sys.modules.get("torch._inductor.config")
    return torch.is_deterministic_algorithms_warn_only_enabled(), config is not None and config.deterministic


def set_deterministic_algorithms(value: tuple[bool, bool] | None) -> None:
    """``value``: as ``deterministic_algorithms`` gives it."""
    torch.use_deterministic_algorithms(value is not None, warn_only=value is not None and value[0])
    sys.modules["torch._inductor.config"].deterministic = value is not None and value[1]  # type: ignore[attr-defined]


def float32_products() -> tuple[str | None, str, str] | None:
    """None: float32 matrices are multiplied in float32. Else torch's old setting, if it can tell, and its new ones."""
    of = torch._C._get_fp32_precision_getter
    on_cpu, on_gpu = of("mkldnn", "matmul"), of("cuda", "matmul")
    if on_cpu in ("none", "ieee") and on_gpu in ("none", "ieee"):
        return None
    try:
        return torch.get_float32_matmul_precision(), on_cpu, on_gpu
    except RuntimeError:  # the program has set a new one alone
        return None, on_cpu, on_gpu


def set_float32_products(value: tuple[str | None, str, str] | None) -> None:
    """``value``: as ``float32_products`` gives it."""
    if value is None:
        torch.set_float32_matmul_precision("highest")
        return
    everywhere, on_cpu, on_gpu = value
    if everywhere is not None:
        torch.set_float32_matmul_precision(everywhere)
    torch._C._set_fp32_precision_setter("mkldnn", "matmul", on_cpu)
    torch._C._set_fp32_precision_setter("cuda", "matmul", on_gpu)
