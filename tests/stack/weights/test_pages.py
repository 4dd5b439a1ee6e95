"""Memory for open modules: used again when its tensors are gone, and only then."""

from __future__ import annotations

import pytest
import torch

from connectors.vllm_plugin.weights.pages import Pages

pytestmark = [pytest.mark.stack, pytest.mark.timeout(120)]


def test_memory_is_used_again_once_nobody_has_a_view_of_it() -> None:
    pages = Pages()
    first = pages.moved(torch.empty(64, 32, dtype=torch.bfloat16))
    assert (first.shape, first.dtype, first.is_contiguous()) == (torch.Size([64, 32]), torch.bfloat16, True)
    first.fill_(1)
    kept, address = first.detach()[3:5], first.data_ptr()
    del first
    second = pages.moved(torch.empty(32, 64, dtype=torch.bfloat16)).fill_(2)
    assert second.data_ptr() != address
    assert bool((kept == 1).all())
    del kept
    assert pages.moved(torch.empty(2048, dtype=torch.bfloat16)).data_ptr() == address
    assert pages.moved(torch.empty(16, dtype=torch.bfloat16)).data_ptr() != address


def test_tensors_outlive_what_gave_them_memory() -> None:
    pages = Pages()
    tensor = pages.moved(torch.empty(1000)).fill_(3)
    del pages
    assert bool((tensor == 3).all())
