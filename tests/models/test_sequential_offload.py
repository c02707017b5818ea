"""Networks compute on a device layer by layer: at no time are two of their layers there, and they end as they were."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import T5Config, T5EncoderModel

from tastemaker.models import sequential_offload
from tastemaker.models.sequential_offload import max_device_bytes, offloaded_layers, temporarily_on_device

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def small_t5() -> T5EncoderModel:
    torch.manual_seed(0)
    config = T5Config(vocab_size=20, d_model=16, d_kv=8, d_ff=64, num_layers=3, num_heads=2)
    return T5EncoderModel(config).eval().requires_grad_(False)


class Present(sequential_offload._Onloaded):
    """Tensors that stay where they are: what would be on the device is only noted."""

    tensors_there: set[Tensor]

    def onload(self, *_: Any) -> None:
        Present.tensors_there |= self.tensors

    def offload(self, *_: Any) -> None:
        Present.tensors_there -= self.tensors


def test_one_layer_is_on_the_device_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    net, ids, seen = small_t5(), torch.tensor([[1, 2, 3]]), list[int]()
    expected = net(ids).last_hidden_state
    Present.tensors_there = set()
    monkeypatch.setattr(sequential_offload, "_Onloaded", Present)
    layers = offloaded_layers(net)
    assert layers == list(net.encoder.block)

    def check(module: nn.Module, *_: Any) -> None:
        assert {*module.parameters(recurse=False)} <= Present.tensors_there
        there = [i for i, layer in enumerate(layers) if {*layer.parameters()} & Present.tensors_there]
        assert len(there) <= 1
        seen.extend(there)

    for module in net.modules():
        module.register_forward_pre_hook(check)
    with temporarily_on_device(net, torch.device("cuda")):
        found = net(ids).last_hidden_state
    assert found.equal(expected) and sorted(set(seen)) == [0, 1, 2] and not Present.tensors_there


def test_failing_calls_take_their_layer_back(monkeypatch: pytest.MonkeyPatch) -> None:
    net = small_t5()
    Present.tensors_there = set()
    monkeypatch.setattr(sequential_offload, "_Onloaded", Present)
    with pytest.raises(IndexError), temporarily_on_device(net, torch.device("cuda")):
        net(torch.tensor([[99]]))
    with pytest.raises(RuntimeError), temporarily_on_device(net, torch.device("cuda")):
        net.encoder.block[1](torch.zeros(1, 3, 5))
    assert not Present.tensors_there


def test_tensors_are_those_of_the_host_again() -> None:
    net = small_t5()
    before = {key: (x.data_ptr(), x.clone()) for key, x in net.state_dict().items()}
    with temporarily_on_device(net, DEVICE):
        assert net(torch.tensor([[1, 2]], device=DEVICE)).last_hidden_state.device.type == DEVICE.type
    for key, x in net.state_dict().items():
        assert x.data_ptr() == before[key][0] and x.equal(before[key][1])
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())


def test_only_layers_with_weights_of_their_own_are_moved_apart() -> None:
    net = nn.Module()
    net.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(3))
    net.head = nn.Linear(8, 8, bias=False)
    assert max_device_bytes(net) == 2 * 4 * 64  # the head and one layer
    net.head.weight = net.layers[0].weight  # type: ignore[union-attr, assignment]
    assert offloaded_layers(net) == list(net.layers)[1:]
    small = nn.Sequential(nn.ModuleList([nn.Linear(2, 2)]), nn.Linear(50, 50))
    assert offloaded_layers(small) == [] and offloaded_layers(nn.Linear(2, 2)) == []
