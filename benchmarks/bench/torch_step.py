"""PyTorch's way, when torch is installed: GradScaler, clip_grad_norm_ and fused AdamW on the same arrays."""

from collections.abc import Callable
from typing import Any

from .shapes import Shapes
from .steps import LEARNING_RATE, MAX_NORM, SCALE


def torch_step(shapes: Shapes) -> Callable[[], Any] | None:
    """A function of nothing that takes a step, or None without torch."""
    try:
        import torch
    except ImportError:
        return None
    device = "cuda" if torch.cuda.is_available() else "cpu"
    params = [torch.nn.Parameter(0.02 * torch.randn(shape, device=device)) for shape in shapes]
    grads = [SCALE * 1e-4 * torch.randn(shape, device=device) for shape in shapes]
    optimizer = torch.optim.AdamW(params, lr=LEARNING_RATE, fused=True)
    scaler = torch.amp.GradScaler(device, init_scale=SCALE)
    scaler.scale(torch.zeros((), device=device))  # the scaler makes its scale when it first sees a loss

    def run() -> Any:
        for param, grad in zip(params, grads, strict=True):
            # unscale_ divides in place, so each step gets the gradients anew; a copy that the others needn't make.
            param.grad = grad.clone() if param.grad is None else param.grad.copy_(grad)
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(params, MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
        if device == "cuda":
            torch.cuda.synchronize()
        return ()

    return run
