"""Counts and optimizer groups of every switch, against the leaves of its tree and by hand."""

import math

import pytest
from tests.model.forms import FORMS

from portolan import accounting
from portolan.accounting import forward_flops_per_token
from portolan.model.tree import parameter_shapes
from portolan.optim.groups import components_of, resolve_groups
from portolan.optim.settings import OptimizerSettings
from portolan.shapes import derive_shape

D, LAYERS, H = 768, 8, 128
REFERENCE = derive_shape("ladder", D)


def shape_of(name, width=D):
    return derive_shape("ladder", width, **FORMS[name].fields)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("width", [768, 6144])
def test_total_is_the_sum_over_the_leaves(name, width):
    config = shape_of(name, width)
    leaves = sum(math.prod(shape) for shape in parameter_shapes(config).values())
    quantiles = config.mlp == "moe" and config.balance.startswith("qb_")
    biases = config.num_layers * config.num_experts if quantiles else 0
    assert config.num_layers * config.num_balance_biases == biases
    assert accounting.total_parameters(config) == leaves + biases


ARMS = [("muonh", "muonh"), ("muonh", "adam"), ("muonh", "adamh"), ("adamh", "muonh"),
        ("adamw", "muonh"), ("adamw", "adamh")]  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_groups_are_those_of_the_resolved_table(name):
    config = shape_of(name)
    for matrix, gated_norm in ARMS:
        settings = OptimizerSettings(
            hyperball_scope="joint",
            matrix=matrix,
            gnorm=None if gated_norm == "muonh" else gated_norm,
        )
        table = resolve_groups(
            parameter_shapes(config),
            scope="joint",
            settings=settings,
            components=components_of(config),
        )
        counts = accounting.count_optimizer_groups(config, matrix, gated_norm)
        for group in ("muonh", "adamh", "adam", "adamw"):
            assert getattr(counts, group) == table.num_parameters(group), (matrix, group)
        state = accounting.state_bytes(config, matrix, gated_norm)
        assert (state.optimizer, state.parameters) == (table.state_bytes, table.parameter_bytes)


ROUTED = 6 * (D // 2) ** 2 * 8
"""Forward FLOPs of the selected experts of one token, behind the latent pair of 4 D R."""
CHANGES = {
    # name: (change of N_act, of published FLOPs, of full over causal FLOPs), summed over layers
    "dense": (9 * D**2 - 10 * D**2 - 384 * D, -2 * D**2 - 2 * 384 * D, 0),
    "no-latent": (3 * 8 * D * D // 4 - D**2, ROUTED - 2 * D**2, 0),
    "no-latent-equal-flops": (0, 0, 0),
    "no-shared": (-3 * D**2, -6 * D**2, 0),
    "full-kv": (2 * D * 5 * H, 4 * D * 5 * H, 2 * 4 * 5 * H),
    "no-exclusive": (0, 0, -6 * D),
    "no-head-gate": (0, 0, -2 * D * 6),
    "no-conv": (0, 0, -2 * 4 * (H + 2 * D)),
    "conv-k": (0, 0, -2 * 4 * 2 * D),
    "conv-on-values": (0, 0, 2 * 4 * H),
    "conv-2-taps": (0, 0, -2 * 2 * (H + 2 * D)),
    "no-latent-norm": (0, 0, 0),
    "softmax-aux": (0, 0, 0),
}


@pytest.mark.parametrize("name", CHANGES)
def test_active_parameters_and_flops_by_hand(name):
    config = shape_of(name)

    def extra(config):
        return forward_flops_per_token(config, "full") - forward_flops_per_token(config, "causal")

    found = (
        accounting.active_parameters(config) - accounting.active_parameters(REFERENCE),
        forward_flops_per_token(config) - forward_flops_per_token(REFERENCE),
        extra(config) - extra(REFERENCE),
    )
    assert found == tuple(LAYERS * change for change in CHANGES[name])


def test_forms_that_count_by_layers_or_norms():
    norms = 2 * LAYERS + 2
    plain = shape_of("plain-norm")
    difference = accounting.total_parameters(REFERENCE) - accounting.total_parameters(plain)
    assert difference == norms * 2 * D * 128
    both = shape_of("conv-global")
    assert accounting.count_parameters(both).convolutions == 2 * 4 * (H + 2 * D)
    assert sum(both.global_layers) == 2
    assert accounting.count_parameters(shape_of("dense")).dense == LAYERS * 9 * D**2


def test_matched_expert_width_is_seven_24ths_of_the_width():
    for width in (384, 768, 1536, 6144):
        assert shape_of("no-latent-equal-flops", width).expert_width == 7 * width // 24
    micro = derive_shape("micro", 32, latent=False, match_routed_flops=True)
    assert micro.expert_width == 16  # 5 D / 12 = 13.3 at K = 2, to a multiple of 8
