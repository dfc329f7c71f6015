"""What a model does only on an accelerator, or where it is asked for: see `Accelerator`.

A plain run on the CPU does not come here: it computes in float32, and has the memory of the
machine.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from atlas_cli.errors import AtlasError, UsageError, is_out_of_memory

if TYPE_CHECKING:
    from atlas_cli.core.stacks import Stack
    from atlas_cli.models.composed import FunctionalModel, LossOf

PRECISIONS = ("auto", "fp32", "bf16", "fp16")
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_CHANNELS_LAST = ("cuda", "xpu")  # on others, as on the CPU, images stay as they are
Tell = Callable[[str], None]


class Accelerator:
    """Runs the forward and backward passes of a model.

    `precision` is that of autocast: auto takes bf16 on devices that have it, fp16 on other CUDA
    devices, whose losses are scaled, and fp32 elsewhere. Where memory ends, fewer images run at a
    time: features of a batch come in parts, and so do the gradients, whose sum is the same.
    Channels come last where that is good for convolutions: activations follow the images.
    """

    def __init__(
        self,
        device: torch.device,
        precision: str = "auto",
        tell: Tell = lambda text: None,
        *,
        channels_last: bool = False,
    ) -> None:
        self._device, self._tell = device, tell
        self._format = torch.channels_last if channels_last else torch.preserve_format
        self.precision = _chosen(device, precision)
        self._most: int | None = None  # images at a time

    @property
    def scaled(self) -> bool:
        """Whether losses are scaled, as fp16 needs."""
        return self.precision == "fp16"

    def arranged(self, images: torch.Tensor) -> torch.Tensor:
        """Images as the model's convolutions take them best."""
        return images.contiguous(memory_format=self._format)

    def autocast(self) -> torch.autocast:
        """What passes run in."""
        enabled = self.precision != "fp32"
        kind = self._device.type if enabled else "cpu"  # not every kind of device has autocast
        return torch.autocast(kind, _DTYPES[self.precision] if enabled else None, enabled=enabled)

    def features(self, run: Callable[[torch.Tensor], torch.Tensor], images: Any) -> torch.Tensor:
        """run(images), in parts if memory ends."""
        while True:
            size = min(self._most or len(images), len(images))
            try:
                return torch.cat([run(part) for part in images.split(max(1, size))])
            except RuntimeError as problem:
                self._reduce(size, problem)

    def backward(
        self, model: FunctionalModel, images: torch.Tensor, loss_of: LossOf
    ) -> torch.Tensor:
        """Add the gradients of a batch to those kept, and give the loss.

        The loss is taken once, of the features of the whole batch: it may count, or keep a state.
        """
        kept = model.take_gradients()
        parts = None
        if self._most is None or self._most >= len(images):
            try:
                parts = model.forward_parts(images)
            except RuntimeError as problem:
                self._reduce(len(images), problem)
        if parts is None:
            features = self.features(model.features_at_once, images)
        else:
            features = torch.cat([part.detach() for part in parts]).float()
        features = features.requires_grad_()
        loss = loss_of(features)
        loss.backward()
        assert features.grad is not None
        if parts is None or not self._whole(model, parts, features.grad):
            del parts
            self._accumulate(model, images, features.grad)
        model.add_gradients(kept)
        return loss.detach()

    def _whole(
        self, model: FunctionalModel, parts: list[torch.Tensor], gradient: torch.Tensor
    ) -> bool:
        """Take the gradients of a whole batch; False if there is not enough memory."""
        try:
            model.backward_parts(parts, gradient)
        except RuntimeError as problem:
            model.take_gradients()
            self._reduce(len(gradient), problem)
            return False
        return True

    def _accumulate(
        self, model: FunctionalModel, images: torch.Tensor, gradient: torch.Tensor
    ) -> None:
        """Run the batch once more, a few images at a time, each with its part of the gradient."""
        while True:
            size = min(self._most or len(images), len(images))
            try:
                for some, part in zip(images.split(size), gradient.split(size), strict=True):
                    model.backward_parts(model.forward_parts(some), part)
            except RuntimeError as problem:
                model.take_gradients()
                self._reduce(size, problem)
            else:
                return

    def _reduce(self, size: int, problem: RuntimeError) -> None:
        """From now on half as many images at a time. Raises what is no lack of memory."""
        if not is_out_of_memory(problem):
            raise problem
        if size == 1:
            raise AtlasError(no_memory(self._device)) from problem
        self._most = size // 2
        self._tell(
            f"not enough memory on {self._device} for {size} images at a time: {self._most} from "
            "now on; the result is the same"
        )
        problem.__traceback__ = None  # its frames hold what was computed
        release(self._device)


def prefers_channels_last(module: torch.nn.Module, device: torch.device) -> bool:
    """Whether a tower is made of convolutions, on a device whose kernels want channels last.

    A transformer has one convolution, which cuts patches out.
    """
    found = sum(isinstance(part, torch.nn.Conv2d) for part in module.modules())
    return found > 1 and device.type in _CHANNELS_LAST


def _chosen(device: torch.device, precision: str) -> str:
    if precision not in PRECISIONS:
        raise UsageError(f"--precision {precision}: expected {', '.join(PRECISIONS)}")
    if precision != "auto":
        return precision
    if device.type == "cpu":
        return "fp32"
    module = torch.get_device_module(device.type)
    supported = getattr(module, "is_bf16_supported", lambda: False)
    if supported():
        return "bf16"
    return "fp16" if device.type == "cuda" else "fp32"


def no_memory(device: torch.device) -> str:
    """What to say where nothing smaller can be tried."""
    return (
        f"not enough memory on {device}; fewer vectors, --storage int8, --device-memory 0 or "
        "--device cpu may help"
    )


def release(device: torch.device) -> None:
    """Give cached memory back to a device that keeps some."""
    if device.type != "cpu":
        module = torch.get_device_module(device.type)
        getattr(module, "empty_cache", lambda: None)()


# Compiling ------------------------------------------------------------------------------------


def compile_model(model: FunctionalModel, tell: Tell) -> None:
    """Let torch.compile make the forward and backward passes of a model, where it can."""
    model.compile(lambda module: _Compiled(module, tell))


class _Compiled:
    """A module as torch.compile makes it; as it is, from where that fails."""

    def __init__(self, module: torch.nn.Module, tell: Tell) -> None:
        self._module, self._tell = module, tell
        self._fast: Callable[..., torch.Tensor] | None = torch.compile(module)

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        if self._fast is None:
            return self._module(images)  # type: ignore[no-any-return]
        try:
            return self._fast(images)
        except Exception as problem:  # of any kind: compilers call many libraries
            if is_out_of_memory(problem):
                raise
            self._fast = None
            reason = (str(problem).strip() or type(problem).__name__).splitlines()[0][:200]
            self._tell(f"--compile: torch cannot compile this model here, so it is not: {reason}")
        return self._module(images)  # type: ignore[no-any-return]


# Vectors that stay on the host ----------------------------------------------------------------


class HostedStacks(Mapping[str, "tuple[Stack, ...]"]):
    """Stacks in host memory, which come to the device block by block.

    The block after the one that is asked for is copied meanwhile, on a stream of its own where the
    device has streams: from pinned memory, that does not wait for the host.
    """

    def __init__(self, stacks: Mapping[str, tuple[Stack, ...]], device: torch.device) -> None:
        self._stacks = {name: tuple(map(_pinned, some)) for name, some in stacks.items()}
        self._device = device
        names = list(stacks)
        self._next = dict(zip(names, [*names[1:], *names[:1]], strict=True))
        self._coming: dict[str, tuple[Stack, ...]] = {}
        module = torch.get_device_module(device.type)
        self._module = module if hasattr(module, "Stream") else None
        self._stream = module.Stream() if self._module else None

    def __getitem__(self, name: str) -> tuple[Stack, ...]:
        found = self._coming.pop(name, None)
        if self._module and found is not None:
            self._module.current_stream().wait_stream(self._stream)
        if found is None:
            found = tuple(_moved(stack, self._device) for stack in self._stacks[name])
        self._coming.clear()
        with self._module.stream(self._stream) if self._module else contextlib.nullcontext():
            following = self._next[name]
            self._coming[following] = tuple(
                _moved(s, self._device) for s in self._stacks[following]
            )
        if self._module:
            for stack in found:  # their memory was taken on the other stream
                for tensor in _tensors(stack).values():
                    tensor.record_stream(self._module.current_stream())
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._stacks)

    def __len__(self) -> int:
        return len(self._stacks)


def _tensors(stack: Stack) -> dict[str, torch.Tensor]:
    return {key: value for key, value in vars(stack).items() if isinstance(value, torch.Tensor)}


def _pinned(stack: Stack) -> Stack:
    if not torch.cuda.is_available():
        return stack
    return type(stack)(**{**vars(stack), **{k: t.pin_memory() for k, t in _tensors(stack).items()}})


def _moved(stack: Stack, device: torch.device) -> Stack:
    there = {key: tensor.to(device, non_blocking=True) for key, tensor in _tensors(stack).items()}
    return type(stack)(**{**vars(stack), **there})
