"""The output row of an end token in a model with random weights."""

import torch


def end_row(
    row: torch.Tensor,
    chance: float,
    weight: torch.Tensor,
    hidden: torch.Tensor,
    common: torch.Tensor,
    lean: torch.Tensor | float = 0.0,
) -> torch.Tensor:
    """Returns an end token's row that beats all rows of `weight` in about `chance` of the states `hidden` [n,
    width].

    Except along `lean`, it is orthogonal to the states `common` [m, width], the mean state and the one in
    which a reply begins, so that a reply ends for reasons specific to a step.
    """
    basis = torch.linalg.qr(common.T).Q
    row = row - basis @ (basis.T @ row) + lean
    best, own = (hidden @ weight.T).max(-1).values, hidden @ row
    factor = torch.where(own > 0, best / own, torch.inf).sort().values[round(chance * len(hidden))]
    if factor.isinf():
        raise AssertionError("the end token's row points away from nearly all states")
    # Two decimals: rounding in the passes above (number of threads, kind of machine) must not affect weights.
    return (row * factor).round(decimals=2)
