"""Forward and backward of a training step in a CUDA graph: launched as one.

Steps of a small model are shorter than it takes Python to launch their kernels. Captured once and
replayed, they take what the device needs. Shapes are fixed, and all that changes from step to step
is read from tensors; drawn routes differ from replay to replay as they do from step to step.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainingArguments

from meta_attention.config import MetaAttentionConfig
from meta_attention.errors import ConfigError, ShapeError

# before one is captured: kernels are compiled and libraries have what they need
PLAIN_STEPS = 3


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step computes, all of it on the device."""

    loss: Tensor  # []
    names: tuple[str, ...]  # of the figures
    figures: Tensor  # [F], no gradient
    weights: Sequence[Tensor] | None  # of the routes as believed, by layer, if they are logged
    concentrations: Sequence[Tensor | None] | None  # likewise
    out: Any  # of the model; None: replayed


# inputs, tokens predicted in the batch, and the weights of what is added to the task loss
Objective = Callable[[Mapping[str, Tensor], Tensor | int | None, Sequence[Any]], StepResult]


class CapturedStep:
    """A step of fixed shapes. Its gradients are those of the parameters after every replay.

    Args:
        objective: Computes a step, without waiting for the device.
        parameters: What learns.
        inputs: A batch, for its shapes.
        num_items: Tokens predicted in it.
        num_weights: How many weights the objective takes.
        pool: Memory of another captured step that never runs at the same time.
    """

    def __init__(
        self,
        objective: Objective,
        parameters: Iterable[nn.Parameter],
        inputs: Mapping[str, Tensor],
        num_items: Tensor | int | None,
        num_weights: int,
        pool: Any = None,
    ) -> None:
        device = next(iter(inputs.values())).device
        self.inputs = {name: value.clone() for name, value in inputs.items()}
        self.num_items = None
        if num_items is not None:
            self.num_items = torch.as_tensor(num_items, device=device).clone()
        self.weights = torch.zeros(num_weights, device=device)
        learning = [parameter for parameter in parameters if parameter.requires_grad]
        for parameter in learning:
            parameter.grad = None
        torch.cuda.synchronize(device)
        self.graph = torch.cuda.CUDAGraph()
        # a data loader may pin memory in a thread of its own meanwhile, which is no part of a step
        recording = torch.cuda.graph(self.graph, pool=pool, capture_error_mode="thread_local")
        with torch.cuda.device(device), recording:
            result = objective(self.inputs, self.num_items, self.weights.unbind())
            result.loss.backward()
        # what autograd recorded must go: a plain step would be tied to the stream of this one
        self.result = replace(result, loss=result.loss.detach(), out=None)
        self.gradients = [(parameter, parameter.grad) for parameter in learning]

    def __call__(
        self,
        inputs: Mapping[str, Tensor],
        num_items: Tensor | int | None,
        weights: Sequence[float],
    ) -> StepResult:
        """Replay with another batch; what is returned is overwritten by the next replay."""
        for name, buffer in self.inputs.items():
            if inputs[name].shape != buffer.shape:
                raise ShapeError(
                    f"a captured step takes {name} {list(buffer.shape)}, got "
                    f"{list(inputs[name].shape)}"
                )
            buffer.copy_(inputs[name], non_blocking=True)
        if self.num_items is not None and num_items is not None:
            self.num_items.copy_(torch.as_tensor(num_items), non_blocking=True)
        self.weights.copy_(torch.tensor(weights, pin_memory=True), non_blocking=True)
        self.graph.replay()
        # whoever stepped has dropped them
        for parameter, gradient in self.gradients:
            parameter.grad = gradient
        return self.result


class CapturedSteps:
    """Steps of one shape but several kinds, each captured when it has run a few times.

    Args:
        parameters: What learns.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self._seen: dict[Hashable, int] = {}
        self._captured: dict[Hashable, CapturedStep] = {}

    def find(
        self,
        kind: Hashable,
        objective: Objective,
        inputs: Mapping[str, Tensor],
        num_items: Tensor | int | None,
        num_weights: int,
    ) -> CapturedStep | None:
        """The step to replay; None: run it as it is."""
        seen = self._seen[kind] = self._seen.get(kind, 0) + 1
        if seen <= PLAIN_STEPS:
            return None
        if kind not in self._captured:
            others = list(self._captured.values())
            pool = others[0].graph.pool() if others else None
            self._captured[kind] = CapturedStep(
                objective, self.parameters, inputs, num_items, num_weights, pool
            )
        return self._captured[kind]


def check_capture(
    args: TrainingArguments, config: MetaAttentionConfig, has_documents: bool = False
) -> None:
    """Raise unless steps can be captured.

    Args:
        args: Trainer's own.
        config: Of the model.
        has_documents: Batches have ``document_ids``.
    """
    problem = None
    if args.device.type != "cuda":
        problem = f"a CUDA device, got {args.device.type}"
    elif args.world_size > 1:
        problem = f"one process, got {args.world_size}"
    elif args.gradient_accumulation_steps > 1:
        problem = f"batches in one part, got grad_accum={args.gradient_accumulation_steps}"
    elif args.fp16:
        problem = "precision bf16 or fp32, got fp16"
    elif args.gradient_checkpointing:
        problem = "no gradient checkpointing"
    elif config.depth_capacity is not None and has_documents:
        problem = "depth_capacity without isolate_documents, where tokens that enter are counted"
    elif config.depth_capacity not in (None, 1.0) and config.depth_routing == "threshold":
        problem = (
            "depth_routing='top_k': how many tokens are above a threshold changes from step to step"
        )
    if problem is not None:
        raise ConfigError(f"captured steps must have {problem}; leave --capture out")
