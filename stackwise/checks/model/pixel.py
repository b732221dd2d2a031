"""Pixel: output images are aligned with input images, and every element of a continuous input is read.

Shapes: H height, W width, N sampled pixels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stackwise.checks.check import check
from stackwise.checks.engine.examination import Examination, projection
from stackwise.checks.probe.call import dtype_of, reason_of, refusals
from stackwise.checks.result import CheckResult
from stackwise.checks.subject import Subject

_ROWS = 4
# Pixels of an output image along each axis whose gradients are computed.
_SAMPLED = 6
# Largest 1 - correlation of the place of a pixel with that of the inputs that it depends on. Healthy models
# have less than 0.1, and outputs in another order at least 0.5 on one of the axes.
_MISALIGNED = 0.3
# An output pixel has a place among the inputs if one of these has this multiple of the median effect.
_LOCAL = 4.0


@check
def pixel_alignment(subject: Subject) -> CheckResult:
    """Does each pixel of an output image depend most on the input image at the same place?"""
    inputs = subject.inputs(_ROWS)
    if not is_image(inputs):
        return subject.not_applicable("needs images as inputs")
    H, W = inputs.shape[-2:]
    places = [(i, j) for i in _spread(H) for j in _spread(W)]
    try:
        x, output = _output(subject, inputs)
        image = _image(output, H, W)
        if image is None:
            return subject.not_applicable("needs an output image of the size of the input image")
        gradients = [_gradient(x, image[..., i, j]) for i, j in places]
    except refusals() as error:
        return subject.not_applicable(f"needs a model with a gradient of its input: {reason_of(error)}")
    centers = [_center(gradient.square().flatten(0, -3).sum(dim=0)) for gradient in gradients]
    local = [(place, center) for place, center in zip(places, centers, strict=True) if center is not None]
    if 2 * len(local) < len(places):
        return subject.not_applicable("needs outputs that depend most on a part of the image")
    own_N2, found_N2 = (torch.tensor(each, dtype=torch.float64) for each in zip(*local, strict=True))
    correlations = [float(torch.corrcoef(torch.stack((own_N2[:, d], found_N2[:, d])))[0, 1]) for d in (0, 1)]
    worst = min(correlations)
    if not 1 - worst > _MISALIGNED:
        return subject.passed(1 - worst, _MISALIGNED)
    return subject.failed(
        1 - worst,
        _MISALIGNED,
        where="height" if worst == correlations[0] else "width",
        meaning="Output pixels do not depend most on the input pixels at the same place. Along this axis, "
        f"the correlation of their place with that of the strongest inputs is {worst:.2f}.",
        advice="Check how patches are joined to an image: a reshape needs the order rows of patches, rows of "
        "a patch, columns of patches, columns of a patch. Check if height and width are exchanged.",
    )


@check
def input_effect(subject: Subject) -> CheckResult:
    """Does every element of a continuous input have an effect on the output?"""
    inputs = subject.inputs(_ROWS)
    if not inputs.is_floating_point():
        return subject.not_applicable("needs continuous inputs, such as vectors, audio or images")
    try:
        x, output = _output(subject, inputs)
        unread = ~_gradient(x, output).any(dim=0)
    except refusals() as error:
        return subject.not_applicable(f"needs a model with a gradient of its input: {reason_of(error)}")
    if unread.all():
        return subject.not_applicable("needs a model with a gradient of its input")
    n = int(unread.sum())
    if not n:
        return subject.passed(0.0, 0.0)
    # A sequence or an image may end with a part that fills no frame or patch.
    channels = _channel_axis(subject, unread)
    read = (~unread).nonzero()
    box = tuple(
        slice(None) if dim == channels else slice(int(read[:, dim].min()), int(read[:, dim].max()) + 1)
        for dim in range(unread.ndim)
    )
    first = unread.nonzero()[0].tolist()
    return subject.failed_unless(
        "the model drops an incomplete frame or patch at the end" if not unread[box].any() else None,
        float(n),
        0.0,
        where=f"element {first} of {list(unread.shape)}",
        meaning=f"{n} of {unread.numel()} elements of an input have no effect on any output.",
        advice="Look for a slice that is too short, a channel or feature that is overwritten, a stride that "
        "skips inputs, and padding on the wrong side.",
    )


def _channel_axis(subject: Subject, element: Tensor) -> int | None:
    """Return the axis of channels or features of a row: the last one of a sequence, or the smallest."""
    if subject.spec.per_position:
        return element.ndim - 1
    return min(range(element.ndim), key=element.shape.__getitem__) if element.ndim > 1 else None


def is_image(inputs: Tensor) -> bool:
    """Return True for images (B, C, H, W) of more than 3 x 3 pixels."""
    return inputs.is_floating_point() and inputs.ndim > 3 and min(inputs.shape[-2:]) > 3


def _spread(size: int) -> list[int]:
    """Return indices of pixels, spread over an axis."""
    return torch.linspace(0, size - 1, min(_SAMPLED, size)).long().tolist()


def _output(subject: Subject, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return inputs with a gradient and the output of a model without constant weights.

    Raises:
        ValueError: if the output is random, as that of a masked autoencoder.
    """
    model = Examination.of(subject).model()
    x = inputs.to(dtype_of(model)).requires_grad_()
    with torch.enable_grad(), subject.fixed_randomness():
        output = subject.spec.logits(model, x)
        if not torch.equal(output, subject.spec.logits(model, x)):
            raise ValueError("two outputs differ")
        return x, output


def _image(output: Tensor, H: int, W: int) -> Tensor | None:
    """Return an output (., H, W), or None if it is no image of this size."""
    if output.ndim > 3 and output.shape[-2:] == (H, W):
        return output
    return output.movedim(-1, 1) if output.ndim == 4 and output.shape[1:3] == (H, W) else None


def _gradient(x: Tensor, output: Tensor) -> Tensor:
    """Return the gradient of a random projection of the output."""
    with torch.enable_grad():
        projected = (output * projection(output, 0)).sum()
        return torch.autograd.grad(projected, x, retain_graph=True)[0]


def _center(effect_HW: Tensor) -> tuple[float, float] | None:
    """Return the center of the inputs with a large effect, or None if they are not local."""
    peak = float(effect_HW.max())
    if not peak > _LOCAL * float(effect_HW.median()):
        return None
    i, j = (effect_HW > peak / 4).nonzero().double().mean(dim=0).tolist()
    return i, j
