"""Which fixed sizes a batch can have. Plain arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

from encoder_service.towers.base import Budget
from shared.errors import ConfigError
from shared.sizing import SizeRule

#: pixels; the side of the smallest picture for which a budget of its own is worth the warm-up
SMALLEST_USEFUL_SIDE = 64
#: images of one budget, at most: each costs a captured kernel a launch, even when it has length 0
MAX_IMAGES = 128


def smallest_useful(rule: SizeRule) -> int:
    """Patches of the smallest picture that is worth a budget of its own."""
    return rule.grid(SMALLEST_USEFUL_SIDE, SMALLEST_USEFUL_SIDE).patches


def ladder(explicit: Sequence[int], smallest: int, largest: int, merge: int, floor: int = 0) -> tuple[Budget, ...]:
    """The budgets, ascending.

    Args:
        explicit: patches of each budget; empty for powers of two.
        smallest: patches of the smallest useful image: where powers of two begin, and what decides how many images a
            budget takes.
        largest: patches of the largest batch, where powers of two end.
        merge: patches of a budget form whole tokens of ``merge`` × ``merge``.
        floor: patches that a forward has at least on this device, so that bits do not depend on the batch.

    Raises:
        ConfigError: an explicit budget that ``merge²`` does not divide or that is outside ``floor`` and ``largest``.
    """
    token = merge**2
    smallest, largest = max(smallest, floor), max(largest, floor)
    if explicit:
        for patches in explicit:
            if patches % token or not floor <= patches <= largest:
                raise ConfigError(
                    f"a replay budget of {patches} patches must be divisible by {token} (patches of one token) and "
                    f"lie between {max(floor, token)} and max_batch_patches, {largest}"
                )
        sizes = sorted(set(explicit))
    else:
        top = max(largest // token, 1) * token
        sizes = [top]
        power = 1 << max(top - 1, 1).bit_length() - 1
        while smallest <= power < top:
            sizes.append(-(-power // token) * token)
            power //= 2
        if power < smallest < sizes[-1]:  # a smallest image that is no power of two
            sizes.append(-(-smallest // token) * token)
        sizes = sorted(set(sizes))
    return tuple(Budget(patches, max(1, min(patches // smallest, MAX_IMAGES))) for patches in sizes)


def smallest_fit(budgets: Sequence[Budget], patches: int, images: int) -> Budget | None:
    """The first of the ascending budgets that takes the batch; None when none does."""
    return next((budget for budget in budgets if budget.patches >= patches and budget.images >= images), None)
