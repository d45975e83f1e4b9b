"""Tokens -> hard routes without a posterior in between, where nobody asks for one."""

from typing import TypeGuard

import torch
from torch import Tensor, nn

from meta_attention.controller import BayesianMetaController, PriorFreeController
from meta_attention.controller.controllers import MLPController
from meta_attention.ops.route_tokens import can_run_kernel, route_tokens

# what is derived from these may believe something else
KNOWN = (BayesianMetaController, PriorFreeController)


def can_route_directly(controller: nn.Module, x: Tensor) -> TypeGuard[MLPController]:
    """Whether nobody sees what the controller would say of ``x``, and a kernel can do without.

    Whoever watches a controller or overrules it has a hook on it, or another in its place. It is
    for the caller to know that routes are hard and nobody asks the caller for a posterior.
    """
    return (
        not torch.is_grad_enabled()
        and isinstance(controller, MLPController)
        and type(controller) in KNOWN
        and not controller.training
        and not (controller._forward_hooks or controller._forward_pre_hooks)
        and "forward" not in vars(controller)
        and can_run_kernel(
            x, controller.network, groups=controller.groups, impl=controller.config.impl
        )
    )


def route_directly(controller: MLPController, x: Tensor, position_ids: Tensor) -> Tensor:
    """Weights ``[B, T, E]`` or ``[B, T, G, E]`` of hard routes, each the most believed in.

    The same as ``choose_routes(controller(x, position_ids), routing="hard").weights``.
    """
    has_prior = isinstance(controller, BayesianMetaController)
    return route_tokens(
        x,
        position_ids,
        controller.network,
        prior_concentration=controller.prior_concentration if has_prior else None,
        groups=controller.groups,
        max_positions=controller.max_positions,
        impl=controller.config.impl,
    )
