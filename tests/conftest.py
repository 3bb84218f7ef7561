"""Skip tests marked `gpu`, with the reason, where the kernels cannot run."""

import pytest
import torch


def _missing_gpu() -> str | None:
    if not torch.cuda.is_available():
        return "needs a Hopper GPU: torch finds no CUDA device"
    found = torch.cuda.get_device_capability()
    if found != (9, 0):
        return f"needs a Hopper GPU: compute capability 9.0, found {found[0]}.{found[1]}"
    return None


def pytest_collection_modifyitems(items):
    marked = [item for item in items if item.get_closest_marker("gpu")]
    reason = _missing_gpu() if marked else None
    if reason:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))
