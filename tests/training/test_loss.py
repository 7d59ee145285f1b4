"""The loss in pieces is the loss: same value, same gradients, whatever the head."""

from __future__ import annotations

import copy
import inspect
import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
import transformers
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from soup_flows.architecture import known_families
from soup_flows.architecture.value import PLAIN_HEADS
from soup_flows.training import loss as module
from soup_flows.training.loss import _PLAIN_HEAD, has_plain_head, head_loss, loss_in_head, worth_it_from

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(module.PIECE_ELEMENTS, "cpu", 97 * 3)  # three positions at a time


@pytest.mark.parametrize("tied", [False, True])
def test_value_and_every_gradient(tied: bool) -> None:
    torch.manual_seed(0)
    one = LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=tied))
    other = copy.deepcopy(one)
    ids = torch.randint(0, 97, (1, 11))
    keep, labels = torch.tensor([0, 2, 3, 4, 7, 8, 9, 10]), torch.tensor([5, 96, 0, -100, 1, 2, 3, 4])
    logits = one(ids, logits_to_keep=keep).logits[0]
    wanted = F.cross_entropy(logits, labels, reduction="sum")
    (wanted / 7).backward()
    assert has_plain_head(other)
    with loss_in_head(other, labels):
        found = other(ids, logits_to_keep=keep).logits.sum()
    (found / 7).backward()
    assert found.item() == pytest.approx(wanted.item(), rel=1e-6)
    for (name, mine), theirs in zip(other.named_parameters(), one.parameters(), strict=True):
        assert torch.allclose(mine.grad, theirs.grad, rtol=1e-4, atol=1e-6), name
    assert torch.equal(other(ids).logits, one(ids).logits)  # the head is as it was


def test_bias_frozen_head_and_no_gradient() -> None:
    torch.manual_seed(0)
    hidden, weight, bias = torch.randn(7, 8, requires_grad=True), torch.randn(97, 8), torch.randn(97)
    labels = torch.randint(0, 97, (7,))
    wanted = F.cross_entropy(hidden @ weight.T + bias, labels, reduction="sum")
    (slope,) = torch.autograd.grad(wanted, hidden)
    found = head_loss(hidden, weight, bias.requires_grad_(), labels)
    mine, mine_bias = torch.autograd.grad(found, (hidden, bias))
    assert torch.allclose(mine, slope, rtol=1e-4, atol=1e-6)
    assert torch.allclose(mine_bias, torch.autograd.grad(
        F.cross_entropy(hidden @ weight.T + bias, labels, reduction="sum"), bias
    )[0], rtol=1e-4, atol=1e-6)  # fmt: skip
    with torch.no_grad():
        assert head_loss(hidden, weight, bias, labels).item() == pytest.approx(wanted.item(), rel=1e-6)


def test_half_precision_under_autocast() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(50, 8, requires_grad=True), torch.randn(97, 8, requires_grad=True)
    labels = torch.randint(0, 97, (50,))
    wanted = torch.autograd.grad(
        F.cross_entropy(hidden @ weight.T, labels, reduction="sum"), (hidden, weight)
    )
    with torch.autocast("cpu", torch.bfloat16):
        loss = head_loss(hidden, weight, None, labels)
    found = torch.autograd.grad(loss, (hidden, weight))
    assert [grad.dtype for grad in found] == [torch.float32, torch.float32]
    for mine, theirs in zip(found, wanted, strict=True):
        assert (mine - theirs).norm() < 0.02 * theirs.norm()


def test_a_head_with_something_behind_it_is_left_alone() -> None:
    config = Gemma2Config(**SHAPE, head_dim=8, final_logit_softcapping=3.0)
    assert worth_it_from(Gemma2ForCausalLM(config)) == math.inf
    llama = LlamaForCausalLM(LlamaConfig(**SHAPE))
    assert worth_it_from(llama) == 32 / 3
    assert worth_it_from(llama.requires_grad_(False)) == 0


def test_the_planner_knows_the_plain_heads() -> None:
    """`Architecture.plain_head` says without transformers what the classes' source says."""
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    forwards = {
        kind: inspect.getsource(getattr(transformers, names[kind]).forward) for kind in known_families()
    }
    assert {kind for kind, source in forwards.items() if _PLAIN_HEAD.search(source)} == PLAIN_HEADS
