"""The price at which values are worth a cost: as it rises, fewer routes take what is dear."""

import math
from collections.abc import Callable

from meta_attention.errors import ConfigError

# nats for which nobody buys full attention, and for which everybody does
DEAREST, CHEAPEST = 10.0, 1e-8
# as much in any units: experts may differ little in their cost, and so hardly in what they take
BEYOND = 1e6
# halvings of the interval in which the price is sought, as a ratio: to a part in fifty thousand
BISECTIONS = 20


def search_price(
    cost_at: Callable[[float], float], target_cost: float, *, tolerance: float = 0.0
) -> float:
    """The lowest price found at which routes cost no more than asked for.

    Args:
        cost_at: What routes cost at a price, which it sets; called last with the price found.
        target_cost: What they may cost.
        tolerance: Share of it by which the cost may be below, to end the search sooner.
    """
    if cost_at(0.0) <= target_cost:
        return 0.0
    for cheapest, dearest in ((CHEAPEST, DEAREST), (DEAREST, BEYOND)):
        low, high = math.log(cheapest), math.log(dearest)
        is_found = False
        for _ in range(BISECTIONS):
            middle = 0.5 * (low + high)
            cost = cost_at(math.exp(middle))
            if cost > target_cost:
                low = middle
                continue
            high, is_found = middle, cost <= target_cost
            if is_found and cost >= (1.0 - tolerance) * target_cost:
                return math.exp(high)
        price = math.exp(high)
        # sets it, too; what was found once may be a token off where sums are not the same twice
        cost = cost_at(price)
        if is_found or cost <= target_cost:
            return price
    raise ConfigError(
        f"no price up to {BEYOND:g} nats makes routes cost {target_cost}: are all values finite?"
    )


def check_cost(target_cost: float, lowest: float, highest: float) -> None:
    """Raise unless routes can cost so much."""
    if not lowest < target_cost <= highest:
        raise ConfigError(
            f"target_cost must be above {lowest:.3f}, what the cheapest experts cost, and at most "
            f"{highest:g}, got {target_cost}"
        )
