"""Pretrained models, routed: their weights stay, a small router is new.

The package can be called: ``from meta_attention import adapt`` is the function, also after this
module of the same name was imported.
"""

import sys
from types import ModuleType

from meta_attention.adapt.adaptation import Record
from meta_attention.adapt.adapters import load_adapter, read_card, save_adapter
from meta_attention.adapt.bases import is_installed, load_base, load_tokenizer
from meta_attention.adapt.config import AdaptConfig, Shape
from meta_attention.adapt.families import Family, known_families, register_family
from meta_attention.adapt.model import adapt, freeze_base
from meta_attention.adapt.prices import find_price, set_price
from meta_attention.adapt.router import Router, collect_routing, routed_as, routers_of

__all__ = [
    "AdaptConfig",
    "Family",
    "Record",
    "Router",
    "Shape",
    "adapt",
    "collect_routing",
    "find_price",
    "freeze_base",
    "is_installed",
    "known_families",
    "load_adapter",
    "load_base",
    "load_tokenizer",
    "read_card",
    "register_family",
    "routed_as",
    "routers_of",
    "save_adapter",
    "set_price",
]


class _Callable(ModuleType):
    __call__ = staticmethod(adapt)


sys.modules[__name__].__class__ = _Callable
