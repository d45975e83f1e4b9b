"""Where each token of a text goes, and how sure the controllers are.

Where every key-value head of a token has a route of its own, a token's numbers are means over them.

Shapes: N tokens of the text, E experts of a layer, G key-value heads that have routes of their own.
"""

from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from meta_attention.controller import PointPosterior, RoutingPosterior
from meta_attention.errors import DataError
from meta_attention.evaluation.evaluate import layer_kl
from meta_attention.evaluation.forcing import attention_layers
from meta_attention.evaluation.perplexity import evaluating
from meta_attention.evaluation.routing import (
    RoutedLayer,
    RoutingSummary,
    reading_routing,
    summarise_routing,
)
from meta_attention.evaluation.windows import TokenizedText, tokenize

POINT_SIGNALS = ("mean_entropy", "margin")
DIRICHLET_SIGNALS = (*POINT_SIGNALS, "mutual_information", "vacuity", "entropy")

# shown for a token that holds a part of a character which a later token completes
PARTIAL = "\u00b7"
# characters that would move a cursor or end a page are shown as signs; tabs and line ends stay
_SIGNS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"}
_SIGNS |= {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


@dataclass(frozen=True, slots=True)
class InspectedLayer:
    """One layer's routes; means over the key-value heads where each has its own."""

    experts: tuple[str, ...]
    costs: list[float]
    weights: list[list[float]]  # [N][E], all zero where a token passed the block by
    expert: list[int]  # [N], index of the largest weight
    signals: dict[str, list[float]]
    """Uncertainty of each token by the name of the signal, and ``kl`` to the prior in nats.

    Empty in a layer of one expert. Without a prior only what the weights themselves say."""
    num_groups: int = 1
    """Key-value heads that have routes of their own; 1: one route for all of a token."""


@dataclass(frozen=True, slots=True)
class Inspection:
    """A text, its tokens and their routes in every routed layer."""

    tokens: list[str]
    """What each token stands for, for display: joined, the text.

    A token that is only a part of a character is a dot, and control characters are signs."""
    ids: list[int]
    loss: list[float | None]
    """Of each token given those before it, in nats; None for the first."""
    layers: list[InspectedLayer]
    routing: RoutingSummary

    @property
    def signals(self) -> tuple[str, ...]:
        """Names of the signals that some layer has."""
        return tuple(dict.fromkeys(name for layer in self.layers for name in layer.signals))

    @property
    def num_groups(self) -> int:
        """Key-value heads that a token's numbers are means over; 1: it has one route for all."""
        return max(layer.num_groups for layer in self.layers)

    @property
    def first_routed_layer(self) -> int:
        """The first layer with a choice; 0 if there is none."""
        return next((i for i, layer in enumerate(self.layers) if len(layer.experts) > 1), 0)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {
            "layers": [asdict(layer) | {"experts": list(layer.experts)} for layer in self.layers],
            "routing": self.routing.to_dict(),
        }


def inspect_text(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str
) -> Inspection:
    """Run a text through a routed model, ours or adapted, once and keep what its controllers said.

    Args:
        model: The model.
        tokenizer: Its tokenizer, a fast one.
        text: At most as many tokens as the model has positions.
    """
    document = tokenize(model, tokenizer, text)
    N, longest = len(document.ids), model.config.max_position_embeddings
    if not 1 <= N <= longest:
        raise DataError(
            f"a text to inspect must have between 1 and max_position_embeddings = {longest} "
            f"tokens, got {N}" + ("; inspect a part of it" if N else "")
        )
    with evaluating(model):
        ids = document.ids.to(model.device)
        with reading_routing(model) as reader:
            output = model(input_ids=ids[None], use_cache=False, **reader.options)
            weights, concentrations = reader.read(output)
        log_probs = output.logits[0, :-1].float().log_softmax(dim=-1)
        loss = -log_probs.gather(-1, ids[1:, None]).squeeze(-1)
        layers = attention_layers(model)
        routes = list(zip(layers, weights, concentrations, strict=True))
        kls = [layer_kl(layer, concentration) for layer, _, concentration in routes]
        return Inspection(
            tokens=_shown(text, document),
            ids=document.ids.tolist(),
            loss=[None, *loss.tolist()] if getattr(model.config, "causal", True) else [None] * N,
            layers=[_inspect_layer(*route, kl) for route, kl in zip(routes, kls, strict=True)],
            routing=summarise_routing(
                weights,
                [None if kl is None else kl.mean().item() for kl in kls],
                [layer.expert_names for layer in layers],
                [layer.controller.costs for layer in layers],
            ),
        )


def _inspect_layer(
    layer: RoutedLayer,
    weights: Tensor,  # [1, N, E] or [1, N, G, E]
    concentration: Tensor | None,
    kl: Tensor | None,
) -> InspectedLayer:
    signals: dict[str, Tensor] = {}
    if len(layer.expert_names) > 1:
        posterior = (
            PointPosterior(weights) if concentration is None else RoutingPosterior(concentration)
        )
        names = POINT_SIGNALS if concentration is None else DIRICHLET_SIGNALS
        signals = {name: getattr(posterior, name) for name in names}
    num_groups = 1
    if weights.dim() == 4:
        num_groups = weights.shape[2]
        weights = weights.mean(dim=2)
        signals = {name: values.mean(dim=2) for name, values in signals.items()}
    if kl is not None:
        signals["kl"] = kl
    return InspectedLayer(
        layer.expert_names,
        layer.controller.costs.tolist(),
        weights[0].tolist(),
        weights[0].argmax(dim=-1).tolist(),
        {name: values[0].tolist() for name, values in signals.items()},
        num_groups,
    )


def _shown(text: str, document: TokenizedText) -> list[str]:
    parts = [text[a:b] for a, b in zip([0, *document.ends], document.ends, strict=False)]
    return [
        part.translate(_SIGNS) or (PARTIAL if size else "")
        for part, size in zip(parts, document.num_bytes.tolist(), strict=True)
    ]
