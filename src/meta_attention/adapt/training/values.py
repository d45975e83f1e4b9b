"""A router of values: what experts are worth is learnt once, and has a price for every cost.

Nothing is pressed. Half of the routes of a step try any expert, the others stay with the dearest,
and the gradient says what was gained. Every evaluation is at the price that makes routes cost what
was asked for, found on some of the training text.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from transformers import EvalPrediction

from meta_attention.adapt.prices import cost_range, find_price
from meta_attention.adapt.router import routers_of
from meta_attention.adapt.training.trainer import RouterTrainer
from meta_attention.routing import BEYOND, check_cost
from meta_attention.training.packing import PackedDataset, spread_blocks

# costs that a price list has, beside the one asked for
LISTED_COSTS = (0.15, 0.25, 0.4, 0.6)
# tokens that a price is found on, about, and texts, at least
PRICING_TOKENS, PRICING_TEXTS = 1 << 14, 4
OFFERED = ("divergence", "recall_divergence", "lm_loss", "attention_share", "routed_cost")


class ValueTrainer(RouterTrainer):
    """Trains a router of values; see :class:`RouterTrainer`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        lowest, highest = cost_range(self.routed)
        check_cost(self.target_cost, lowest, highest)
        costs = {*LISTED_COSTS, self.target_cost}
        self.listed = sorted(cost for cost in costs if lowest < cost <= highest)
        self.pricing = self._pick_blocks()

    @property
    def routed(self) -> Any:
        """The model, whose price is set."""
        return self.model

    @property
    def target_cost(self) -> float:
        assert self.settings.target_cost is not None  # settings of values have one
        return self.settings.target_cost

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As Trainer's; however it ends, the model costs what its settings say."""
        try:
            return super().train(*args, **kwargs)
        finally:
            self._let_cost(self.adaptation.config.price)

    def evaluate(self, *args: Any, at_cost: float | None = None, **kwargs: Any) -> dict[str, float]:
        """As Trainer's, at the price of a cost: by default the target's."""
        cost = self.target_cost if at_cost is None else at_cost
        with self.window.clock_stopped(), self.accelerator.autocast():
            find_price(self.routed, self.pricing, cost)
        return super().evaluate(*args, **kwargs)

    def may_be_best(self, metrics: Mapping[str, float]) -> bool:
        """The last one is kept: nothing presses, so values get better as long as they learn.

        The loss of an evaluation says less, for its price is of other text, and what costs a little
        more than asked for has a lower one.
        """
        return False

    def _reduce_rows(self, prediction: EvalPrediction) -> dict[str, float]:
        """With the price at which it was."""
        return super()._reduce_rows(prediction) | {"price": self.adaptation.config.price}

    def price_list(self) -> list[dict[str, float]]:
        """What the model does on held-out text for each of the costs; it stays at the last."""
        offers = []
        for cost in self.listed:
            metrics = self.evaluate(metric_key_prefix="offer", at_cost=cost)
            found = {n: metrics[f"offer_{n}"] for n in OFFERED if f"offer_{n}" in metrics}
            price = self.adaptation.config.price
            offers.append({"target_cost": cost, "price": price, **found})
        return offers

    def _set_modes(self, model: nn.Module) -> None:
        super()._set_modes(model)
        # until it is known what they are worth, everything is bought
        self._let_cost(-BEYOND)

    def _let_cost(self, price: float) -> None:
        """For a while: what is saved keeps the price it has."""
        for router in routers_of(self.routed):
            router.controller.price.fill_(price)

    def _pick_blocks(self) -> list[Tensor]:
        """Text from all over the training data as it was, in batches as of a step."""
        blocks: PackedDataset = self.train_dataset.blocks  # type: ignore[union-attr]
        number = max(PRICING_TEXTS, PRICING_TOKENS // blocks.length)
        size = self.args.per_device_train_batch_size
        return list(spread_blocks(blocks, number, size, self.args.device))
