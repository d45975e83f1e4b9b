"""Training the routers of a pretrained model, which itself stays as it is."""

from meta_attention.adapt.training.run import open_router_run, read_blocks, train_router
from meta_attention.adapt.training.settings import RouterSettings

__all__ = ["RouterSettings", "open_router_run", "read_blocks", "train_router"]
