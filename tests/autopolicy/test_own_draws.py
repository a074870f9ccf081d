"""Tests that random operators of a proof draw as after a seed, and leave torch's default generator unchanged."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from parallelformers_ng.autopolicy.own_draws import OwnDraws

DRAWS: dict[str, Callable[[], torch.Tensor]] = {
    "rand": lambda: torch.rand(3),
    "randn": lambda: torch.randn(3),
    "randint": lambda: torch.randint(9, (4,)),
    "randint from": lambda: torch.randint(2, 9, (4,)),
    "randperm": lambda: torch.randperm(9),
    "rand_like": lambda: torch.rand_like(torch.ones(3)),
    "randint_like": lambda: torch.randint_like(torch.ones(9), 7),
    "normal of tensors": lambda: torch.normal(torch.zeros(2), torch.ones(2)),
    "normal_": lambda: torch.empty(3).normal_(),
    "trunc_normal_": lambda: torch.nn.init.trunc_normal_(torch.empty(5)),
    "multinomial": lambda: torch.multinomial(torch.ones(9), 3),
    "bernoulli": lambda: torch.bernoulli(torch.full((9,), 0.5)),
    "dropout": lambda: functional.dropout(torch.ones(9), 0.5),
    "dropout with gradients": lambda: functional.dropout(torch.ones(9, requires_grad=True), 0.5),
    "dropout of attention": lambda: functional.scaled_dot_product_attention(*[torch.ones(1, 3, 4)] * 3, dropout_p=0.5),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_own_draws_equal_seeded_ones(draw: Callable[[], torch.Tensor]) -> None:
    before = torch.get_rng_state()
    with OwnDraws(5) as draws:
        own = draw()
    assert draws.has_drawn
    assert torch.equal(torch.get_rng_state(), before)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        assert torch.equal(draw(), own)


def test_operators_without_draws_are_not_counted() -> None:
    with OwnDraws(5) as draws:
        functional.scaled_dot_product_attention(*[torch.ones(1, 3, 4)] * 3)
        torch.rand(3, generator=torch.Generator())
    assert not draws.has_drawn
