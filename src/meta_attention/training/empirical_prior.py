"""Empirical Bayes: the strength of each layer's prior, estimated from the training text.

The evidence lower bound holds the prior only in the KL term. For posteriors as they are, the
strength that maximises it is the one whose prior is nearest to them:

    minimise over strength   log B(p) - sum_e p_e s_e,   p = floor + strength * (1 - cost)

where ``s_e`` is the mean over tokens of E_q[log weight_e]. The log-normaliser of a Dirichlet is
convex, so that this is too, and has one minimum.

Shapes: N blocks, T their length, E experts.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerControl, TrainerState, TrainingArguments

from meta_attention.controller.controllers import BayesianMetaController
from meta_attention.evaluation.forcing import attention_layers
from meta_attention.evaluation.perplexity import evaluating
from meta_attention.training.logs import RowLog, read_rows

PRIOR_FILE = "prior.jsonl"
# steps between two estimates
EVERY = 20
# an estimate stays within these
WEAKEST, STRONGEST = 1e-2, 1e2


def estimate_strength(concentration: Tensor, costs: Tensor, floor: float) -> float:
    """Strength of the prior nearest to posteriors.

    Args:
        concentration: Of the posteriors ``[..., E]``.
        costs: Cost of each expert ``[E]``.
        floor: The paper's epsilon.
    """
    a = concentration.detach().double().cpu().flatten(0, -2)  # [N, E]
    expected_log = (a.digamma() - a.sum(dim=-1, keepdim=True).digamma()).mean(dim=0)  # [E]
    slope = 1.0 - costs.detach().double().cpu()  # d p / d strength

    def derivative(strength: float) -> float:
        p = floor + strength * slope
        return (slope * (p.digamma() - p.sum().digamma() - expected_log)).sum().item()

    low, high = WEAKEST, STRONGEST
    if derivative(low) >= 0.0:
        return low
    if derivative(high) <= 0.0:
        return high
    for _ in range(60):
        # of the logarithm: strengths differ by factors
        middle = (low * high) ** 0.5
        low, high = (middle, high) if derivative(middle) < 0.0 else (low, middle)
    return (low * high) ** 0.5


class EmpiricalPrior(RowLog):
    """Estimates the strength of every routed layer's prior anew, every so many steps.

    The model's config has the newest, so that a saved model has it too. A resumed run goes on with
    what its log says.

    Args:
        folder: Of the run.
        blocks: Training text that posteriors are looked at on, as :func:`text_to_look_at` has it.
        first: Strength until the first estimate.
    """

    def __init__(self, folder: Path, blocks: dict[str, Tensor], first: float) -> None:
        super().__init__(folder, PRIOR_FILE)
        self.blocks = blocks
        self.first = first

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        super().on_train_begin(args, state, control, **kwargs)
        self.restore(kwargs["model"], state.global_step)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.global_step % EVERY == 0:
            strengths = self.estimate(kwargs["model"])
            self._set(kwargs["model"], strengths)
            if state.is_world_process_zero:
                self.write({"step": state.global_step, "prior_strength": strengths})

    def restore(self, model: Any, step: int) -> None:
        """The prior that a model of this step has: its weights alone do not say which."""
        strengths = [self.first] * len(attention_layers(model))
        for row in read_rows(self.folder / self.name):
            if row["step"] <= step:
                strengths = row["prior_strength"]
        self._set(model, strengths)

    def estimate(self, model: Any) -> list[float]:
        """Strength of every layer; of one that has no prior to estimate, as it is."""
        with evaluating(model):
            # logits of all these blocks at once would take the most memory, and nobody reads them
            blocks = {name: given.to(model.device) for name, given in self.blocks.items()}
            out = model(**blocks, use_cache=False, output_routing=True, logits_to_keep=1)
        found = []
        routes = zip(attention_layers(model), out.routing_weights, out.concentrations, strict=True)
        for layer, weights, concentration in routes:
            controller = layer.controller
            strength = controller.prior_strength
            if isinstance(controller, BayesianMetaController):
                floor = model.config.prior_floor
                # a token that passed the block by left no posterior there
                has_entered = weights.sum(dim=-1) > 0.0
                if has_entered.any():
                    given = concentration[has_entered]
                    strength = estimate_strength(given, controller.costs, floor)
            found.append(strength)
        return found

    def _set(self, model: Any, strengths: list[float]) -> None:
        for layer, strength in zip(attention_layers(model), strengths, strict=True):
            layer.controller.set_prior_strength(strength)
        model.config.prior_strength = tuple(strengths)


def text_to_look_at(dataset: Any, num_blocks: int = 32) -> dict[str, Tensor]:
    """Blocks spread over a training text ``[N, T]``, with their documents where these are apart."""
    num_blocks = min(num_blocks, len(dataset))
    step = len(dataset) // num_blocks
    blocks = [dataset[index * step] for index in range(num_blocks)]
    names = blocks[0].keys() & {"input_ids", "document_ids"}
    return {name: torch.stack([block[name] for block in blocks]) for name in names}
