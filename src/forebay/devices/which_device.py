"""The device that a user names."""

from __future__ import annotations

from typing import Any

import torch

from forebay.devices.device_api import Device
from forebay.errors import OptionError


def device_of(device: Any) -> torch.device | None:
    """Return the device that the user named; None for none.

    Raises:
        OptionError: There is no such device.
    """
    if isinstance(device, Device):
        return device.torch_device
    try:
        return None if device is None else torch.device(device)
    except (RuntimeError, TypeError) as error:
        reason = str(error).partition("\n")[0]
        raise OptionError(
            f"device={device!r} is not valid: {reason}\n"
            "  Nothing was started. Name one such as 'cpu', 'cuda' or 'cuda:1'."
        ) from error


def check_device(device: torch.device | None) -> None:
    """Make sure that a device is on this machine.

    Raises:
        OptionError: It is a GPU that torch does not find.
    """
    if device is None or device.type != "cuda":
        return
    # This does not initialize CUDA, after which forked workers could not use it.
    count = torch.cuda.device_count()
    if (device.index or 0) >= count:
        raise OptionError(
            f"device={str(device)!r} is not available: torch finds {count} CUDA devices here\n"
            f"  Nothing was started. Use device='cpu'; or look at torch.version.cuda (it is "
            f"{torch.version.cuda}), the driver (nvidia-smi) and CUDA_VISIBLE_DEVICES."
        )


def check_loader_device(device: Any) -> None:
    """Make sure that a loader can return batches on a device.

    Raises:
        OptionError: There is no such device on this machine, or batches are not copied to its kind.
    """
    named = device_of(device)
    check_device(named)
    if named is not None and named.type not in ("cpu", "cuda"):
        raise OptionError(
            f"device={str(named)!r} is not possible: batches are copied to 'cpu' or 'cuda'\n"
            "  Nothing was started. Leave device out, and move each batch in the training loop."
        )


def copying_device(device: Any, *, pins: bool = False) -> Device | None:
    """Return the device to which batches have to be copied; None if they stay in host memory.

    Args:
        device: As for `device_of`, after `check_device`.
        pins: Whether batches that stay in host memory are page-locked; without CUDA they cannot be.
    """
    if isinstance(device, Device):
        return device
    named = device_of(device)
    if named is not None and named.type == "cuda":
        from forebay.devices.cuda import CudaDevice

        return CudaDevice(named)
    if pins and named is None and torch.cuda.is_available():
        from forebay.devices.pinned_memory import PinnedMemory

        return PinnedMemory()
    return None
