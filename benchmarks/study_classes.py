"""Which tokens go to full attention: classes of tokens, and the share of full in each.

A family is a question with one answer for every token: its position, how rare it is, whether it
begins a word. What is asked is asked of the token that is routed, and of what can be known when it
is: of repeats, that the words up to this token were there before, so that what followed them then
may follow again.

Shapes: N sequences, T their length, G key-value heads that have routes of their own, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from study_data import Cache
from study_reading import FULL, Reading
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from meta_attention import MetaAttentionForCausalLM
from meta_attention.evaluation.detection import quantile_classes
from meta_attention.evaluation.forcing import attention_layers
from meta_attention.evaluation.information import heldout_information, mutual_information

QUOTES = frozenset('"\u201c\u201d\u2018\u00ab\u00bb')
APOSTROPHES = "'\u2019"
SENTENCE_ENDS = frozenset(".!?:\n") | QUOTES


@dataclass(frozen=True, slots=True)
class Family:
    """Classes that share all tokens among them."""

    names: tuple[str, ...]
    of_token: Tensor  # [N, T], index of the name


class TokenTable:
    """What can be said of tokens by their text, and by how often they were trained on.

    Args:
        cache: Tokenizer and training text.
        device: Where.
    """

    def __init__(self, cache: Cache, device: str) -> None:
        texts = token_texts(cache.tokenizer, cache.vocab_size)
        self.end = cache.manifest["eos_token_id"]

        def mark(holds: Callable[[str], bool]) -> Tensor:
            return torch.tensor([bool(text) and holds(text) for text in texts], device=device)

        self.has_quote = mark(lambda text: not QUOTES.isdisjoint(text))
        self.has_digit = mark(lambda text: any(map(str.isdigit, text)))
        self.has_newline = mark(lambda text: "\n" in text)
        self.has_word = mark(lambda text: any(map(str.isalnum, text)))
        self.is_punctuation = mark(
            lambda text: not any(c.isalnum() or c == "\ufffd" for c in text) and bool(text.strip())
        )
        self.joins_before = mark(lambda text: text[0].isalnum() or text[0] in APOSTROPHES)
        self.joins_after = mark(lambda text: text[-1].isalnum())
        self.ends_sentence = mark(lambda text: text[-1] in SENTENCE_ENDS)
        self.ends_sentence[self.end] = True
        self.is_space = mark(lambda text: text == " ")
        # with its space or without; the pronoun is no name
        self.is_capital = mark(lambda text: text[0] == " " and text[1:2].isupper() and text != " I")
        self.is_bare_capital = mark(lambda text: text[0].isupper() and text != "I")
        self.decile = frequency_deciles(cache.tokens("train", device), cache.vocab_size)

    def families(self, reading: Reading, window: int) -> dict[str, Family]:
        """Of the predicting positions of a reading [N, T - 1]."""
        ids = reading.ids[:, :-1]
        before = self.tokens_before(ids)
        further = self.tokens_before(before)
        is_inside = self.joins_before[ids] & self.joins_after[before] & self.has_word[ids]
        is_name = (self.is_capital[ids] & ~self.ends_sentence[before]) | (
            self.is_bare_capital[ids] & self.is_space[before] & ~self.ends_sentence[further]
        )
        yes_no = {
            "name": (("capitalised in a sentence", "other"), is_name),
            "digit": (("digit", "other"), self.has_digit[ids]),
            "punctuation": (("punctuation", "other"), self.is_punctuation[ids]),
            "newline": (("newline", "other"), self.has_newline[ids]),
        }
        return {
            "position": positions(ids, window),
            "frequency": Family(
                tuple(f"tenth {k + 1}" + _ends(k, 10, "frequent", "rare") for k in range(10)),
                self.decile[ids],
            ),
            **{name: Family(names, (~holds).long()) for name, (names, holds) in yes_no.items()},
            "quote": _first_that_holds(
                {"quotation mark": self.has_quote[ids], "after one": self.has_quote[before]}
            ),
            "word": _first_that_holds(
                {"continues a word": is_inside, "starts a word": self.has_word[ids]}
            ),
            **{f"repeated {n}-gram": repeats(ids, n, window) for n in (2, 4)},
            "entropy": Family(
                tuple(f"fifth {k + 1}" + _ends(k, 5, "sure", "unsure") for k in range(5)),
                quantile_classes(reading.predictions.entropy, 5),
            ),
        }

    def tokens_before(self, ids: Tensor) -> Tensor:
        """The one before each token [N, T]; a sequence begins as if a document did."""
        before = ids.roll(1, dims=1)
        before[:, 0] = self.end
        return before


def token_texts(tokenizer: PreTrainedTokenizerFast, vocab_size: int) -> list[str]:
    """Text of each token; empty for special ones."""
    special = set(tokenizer.all_special_ids)

    def text(index: int) -> str:
        # a space before a full stop is part of the token
        return str(tokenizer.decode([index], clean_up_tokenization_spaces=False))

    return ["" if index in special else text(index) for index in range(vocab_size)]


def frequency_deciles(texts: dict[str, Tensor], vocab_size: int) -> Tensor:
    """Tenth of the training text that each token is of [V], 0 for the most frequent tokens."""
    counts = sum(torch.bincount(text.long(), minlength=vocab_size) for text in texts.values())
    assert isinstance(counts, Tensor)
    order = counts.argsort(descending=True, stable=True)
    ordered = counts[order].float()
    # a token is where its middle is
    middle = (ordered.cumsum(dim=0) - ordered / 2) / ordered.sum()
    deciles = torch.empty_like(order)
    deciles[order] = (10 * middle).long().clamp(max=9)
    return deciles


def positions(ids: Tensor, window: int) -> Family:
    """Below the window, where local attention sees all; from there on, doublings of it."""
    at = torch.arange(ids.shape[1], device=ids.device)
    edges = [window]
    while edges[-1] < ids.shape[1]:
        edges.append(2 * edges[-1])
    bucket = torch.bucketize(at, torch.tensor(edges, device=ids.device), right=True)
    begins = [0, *edges]
    names = tuple(
        f"{begin}-{min(end, ids.shape[1]) - 1}"
        for begin, end in zip(begins, edges, strict=False)
        if begin < ids.shape[1]
    )
    return Family(names, bucket.expand_as(ids))


def repeats(ids: Tensor, n: int, window: int) -> Family:
    """Whether the last n tokens were there before, and what followed them is in the window."""
    distance = distance_to_repeat(ids, n)
    # what followed is one nearer
    near, far = (distance > 0) & (distance <= window + 1), distance > window + 1
    family = _first_that_holds({"inside the window": near, "beyond the window": far})
    return Family((*family.names[:-1], "new"), family.of_token)


def distance_to_repeat(ids: Tensor, n: int) -> Tensor:
    """How far back the n tokens up to each one [N, T] last occurred; 0 for never."""
    N, T = ids.shape
    key = ids
    for _ in range(n - 1):
        before = key.roll(1, dims=1)
        key = (before * (int(ids.max()) + 1) + ids).unique(return_inverse=True)[1]
    row = torch.arange(N, device=ids.device).unsqueeze(1)
    # equal n-grams of a sequence next to each other, in order of position
    sorted_key, order = (row * (int(key.max()) + 1) + key)[:, n - 1 :].flatten().sort(stable=True)
    is_repeat = sorted_key[1:] == sorted_key[:-1]
    distance = torch.zeros_like(order)
    distance[order[1:]] = torch.where(is_repeat, order[1:] - order[:-1], 0)
    found = torch.zeros_like(ids)
    found[:, n - 1 :] = distance.view(N, T - n + 1)
    return found


def _first_that_holds(holds: dict[str, Tensor]) -> Family:
    masks = list(holds.values())
    of_token = torch.full_like(masks[0], len(masks), dtype=torch.long)
    for index in reversed(range(len(masks))):
        of_token[masks[index]] = index
    return Family((*holds, "other"), of_token)


def _ends(index: int, count: int, low: str, high: str) -> str:
    return {0: f" ({low})", count - 1: f" ({high})"}.get(index, "")


# --- figures ---


def share_of_full(
    model: MetaAttentionForCausalLM, reading: Reading, families: dict[str, Family]
) -> dict[str, Any]:
    """Share of full of every class by layer and over all, with its lift and its information."""
    names = [layer.expert_names for layer in attention_layers(model)]
    layers = [layer for layer in sorted(reading.routes) if FULL in names[layer]]
    routes = {layer: _by_head(reading.routes[layer])[:, :-1] for layer in layers}
    is_full = torch.stack(
        [(routes[layer] == names[layer].index(FULL)).float().mean(dim=2) for layer in layers]
    )  # [layers, N, T - 1]
    overall = is_full.mean(dim=(1, 2))
    result: dict[str, Any] = {
        "layers": layers,
        "full": is_full.mean().item(),
        "full_by_layer": overall.tolist(),
        "families": {},
    }
    for name, family in families.items():
        of_token = family.of_token.flatten()
        count = torch.bincount(of_token, minlength=len(family.names)).float()
        sums = torch.zeros(len(layers), len(count), device=count.device)
        sums.index_add_(1, of_token, is_full.flatten(1))
        shares = sums / count.clamp(min=1.0)
        mean = shares.mean(dim=0)
        classes = {}
        for index, label in enumerate(family.names):
            # a class nobody is in has no share
            if count[index] > 0:
                classes[label] = {
                    "tokens": (count[index] / count.sum()).item(),
                    "full": mean[index].item(),
                    "lift": _ratio(mean[index].item(), result["full"]),
                    "full_by_layer": shares[:, index].tolist(),
                }
        information = [_mean_over_heads(family.of_token, routes[layer]) for layer in layers]
        result["families"][name] = {
            "classes": classes,
            "information": sum(information) / len(information),
            "information_by_layer": information,
        }
    return result


def explained_by_token(reading: Reading) -> dict[str, Any]:
    """I(route; token) on sequences that were not counted, against all there is to explain."""
    ids = reading.ids[:, :-1]
    is_first = (torch.arange(len(ids), device=ids.device) % 2 == 0).unsqueeze(1).expand_as(ids)
    layers = []
    for layer in sorted(reading.routes):
        heads = _by_head(reading.routes[layer])[:, :-1].unbind(dim=2)
        found = [heldout_information(ids, head, is_first) for head in heads]
        information = sum(one.information for one in found) / len(found)
        entropy = sum(one.entropy for one in found) / len(found)
        share = _ratio(information, entropy)
        layers.append(
            {"layer": layer, "information": information, "entropy": entropy, "share": share}
        )
    information = sum(layer["information"] or 0.0 for layer in layers) / len(layers)
    entropy = sum(layer["entropy"] or 0.0 for layer in layers) / len(layers)
    return {
        "information": information,
        "entropy": entropy,
        "share": _ratio(information, entropy),
        "layers": layers,
    }


def routes_by_token(reading: Reading, num_experts: Sequence[int]) -> dict[int, Tensor]:
    """The route that each token most often takes in the other half of the sequences."""
    ids = reading.ids
    half = torch.arange(len(ids), device=ids.device) % 2  # [N]
    num_ids = int(ids.max()) + 1
    result = {}
    for layer, routes in reading.routes.items():
        E, chosen = num_experts[layer], []
        for head in _by_head(routes).unbind(dim=2):  # [N, T]
            at = (half.unsqueeze(1) * num_ids + ids) * E + head
            counts = torch.bincount(at.flatten(), minlength=2 * num_ids * E)
            counts = counts.view(2, num_ids, E).float()
            # of a token that was never seen, what most tokens do
            shares = counts.sum(dim=1, keepdim=True) / counts.sum().clamp(min=1.0)
            best = (counts + 0.5 * shares).argmax(dim=-1)  # [2, ids]
            chosen.append(best[1 - half.unsqueeze(1), ids])
        result[layer] = torch.stack(chosen, dim=2).view_as(routes)
    return result


def _by_head(routes: Tensor) -> Tensor:
    """[N, T, G], G = 1 where a token has one route."""
    return routes if routes.dim() == 3 else routes.unsqueeze(2)


def _mean_over_heads(of_token: Tensor, routes: Tensor) -> float:
    heads = routes.unbind(dim=2)
    return sum(mutual_information(of_token, head) for head in heads) / len(heads)


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0.0 else None
