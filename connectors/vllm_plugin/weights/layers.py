"""vLLM's layerwise reload, one module at a time, and a shadow of the model for its loaders.

A module whose weights are processed after load (packed for a CPU, put into a kernel's layout) does not hold what its
loaders fill any more. vLLM keeps for each module what its tensors were before (`record_metadata_for_reloading`); from
that `open_module` makes fresh ones, `close_module` processes them and copies the result into the tensors that the
engine uses, whose addresses stay (CUDA graphs hold them), and `put_back` gives up and leaves the old ones. So a load
needs the memory of one group of modules, and a module is old or new as a whole.

vLLM has no public way to reload one module at a time; should `vllm.model_executor.model_loader.reload` get one, it
replaces the private calls, all of which are in this file. Tried with vLLM 0.32.0; 0.25.1 has the same functions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers import attention
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import layerwise, meta
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs
from vllm.platforms import current_platform

from connectors.vllm_plugin.weights.pages import Pages
from connectors.vllm_plugin.weights.plan import ParameterFacts

_PLAIN_CACHES = ("auto", "float32", "bfloat16", "float16")
_PROCESS = "process_weights_after_loading"


def is_processed(module: nn.Module) -> bool:
    """Whether something happens to the module's weights after they were loaded."""
    method = getattr(module, "quant_method", None)
    if not isinstance(method, QuantizeMethodBase):
        return False
    # These two leave on a GPU what was loaded as it is, and pack it on a CPU.
    plain = isinstance(method, UnquantizedLinearMethod | UnquantizedEmbeddingMethod)
    return not (plain and current_platform.is_cuda_alike())


def is_quantized(module: nn.Module) -> bool:
    """Whether the module keeps its weights in fewer bits than they are sent in."""
    method = getattr(module, "quant_method", None)
    return isinstance(method, QuantizeMethodBase) and "Unquantized" not in type(method).__name__


def shadow_of(model: nn.Module) -> nn.Module:
    """The model as its loaders first saw it: the same modules, tensors before any processing, all on meta.

    It shares everything but tensors with the model, which is left alone: it may run meanwhile.
    """
    shadows: dict[int, nn.Module] = {}
    tensors: dict[int, torch.Tensor] = {}
    return _shadow(model, shadows, tensors)


def _shadow(module: nn.Module, shadows: dict[int, nn.Module], tensors: dict[int, torch.Tensor]) -> nn.Module:
    if id(module) in shadows:
        return shadows[id(module)]
    shadow: nn.Module = object.__new__(type(module))
    shadows[id(module)] = shadow
    shadow.__dict__.update(module.__dict__)
    parameters, buffers = layerwise.get_layerwise_info(module).restore_metadata
    shadow._parameters = {
        name: _shadow_tensor(module._parameters.get(name), before, shadow, tensors)
        for name, before in _as_loaded(module._parameters, parameters).items()
    }
    shadow._buffers = {
        name: _shadow_tensor(module._buffers.get(name), before, shadow, tensors)
        for name, before in _as_loaded(module._buffers, buffers).items()
    }
    shadow._modules = {
        name: None if child is None else _shadow(child, shadows, tensors) for name, child in module._modules.items()
    }
    return shadow


def _as_loaded(live: dict[str, torch.Tensor | None], before: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """vLLM skips a few tensors when it notes what was before; those are never processed."""
    skipped = {name: tensor for name, tensor in live.items() if tensor is not None and name in meta.SKIP_TENSORS}
    return {**before, **skipped}


def _shadow_tensor(
    live: torch.Tensor | None, before: torch.Tensor, owner: nn.Module, tensors: dict[int, torch.Tensor]
) -> torch.Tensor:
    if live is not None and id(live) in tensors:
        return tensors[id(live)]
    tensor: torch.Tensor = restore_layer_refs(meta.to_meta_tensor(before), owner)
    if live is not None:
        # Tied parameters are one tensor here too.
        tensors[id(live)] = tensor
    return tensor


def named_tensors(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, torch.Tensor]]:
    """(full name, owner, the owner's full name, tensor) of each parameter and buffer, tied ones once."""
    seen: set[int] = set()
    for prefix, owner in module.named_modules():
        for name, tensor in (*owner._parameters.items(), *owner._buffers.items()):
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                yield f"{prefix}.{name}" if prefix else name, owner, prefix, tensor


def parameter_facts(shadow: nn.Module, model: nn.Module) -> dict[str, ParameterFacts]:
    """Of all that a load can fill, in the order of the model's modules: not of attention, which is processed last."""
    modules = dict(model.named_modules())
    return {
        name: ParameterFacts(
            module=prefix,
            shape=tuple(tensor.shape),
            stride=tuple(tensor.stride()),
            dtype=str(tensor.dtype).removeprefix("torch."),
            is_buffer=name.rpartition(".")[2] in owner._buffers,
            is_loaded=name.rpartition(".")[2] in owner._parameters,
            is_processed=is_processed(modules[prefix]),
        )
        for name, owner, prefix, tensor in named_tensors(shadow)
        if not _is_deferred(modules[prefix])
    }


def moved_in_memory(model: nn.Module, facts: Mapping[str, ParameterFacts]) -> list[str]:
    """Of these parameters those that do not lie as their loaders knew them any more."""
    live = {name: (tensor.shape, tensor.stride(), tensor.dtype) for name, _, _, tensor in named_tensors(model)}
    return [
        name
        for name, each in facts.items()
        if live.get(name) != (torch.Size(each.shape), each.stride, getattr(torch, each.dtype))
    ]


def _is_deferred(module: nn.Module) -> bool:
    """Attention, which vLLM processes after all other modules. Its scales have values without a checkpoint."""
    find = getattr(attention, "is_deferred_attention_layer", None)
    return bool(find(module)) if find else isinstance(module, attention.Attention | attention.MLAAttention)


def open_module(module: nn.Module, pages: Pages) -> None:
    """Give the module fresh tensors for its loaders; those that the engine uses are put aside."""
    info = layerwise.get_layerwise_info(module)
    info.kernel_tensors = layerwise.get_layer_params_buffers(module)
    if hasattr(info, "kernel_non_persistent_buffers"):
        info.kernel_non_persistent_buffers = set(module._non_persistent_buffers_set)
    meta.restore_layer_on_meta(module, info)
    fresh = [name for name, tensor in module._parameters.items() if tensor is not None and tensor.is_meta]
    meta.materialize_layer(module, info)
    for tensor in (module._parameters[name] for name in fresh):
        if tensor is not None and tensor.is_cpu and tensor.is_contiguous() and tensor.nbytes:
            tensor.data = pages.moved(tensor)


def close_module(module: nn.Module) -> None:
    """Process what an open module was given, and take it over into the tensors that the engine uses."""
    method: Any = getattr(module, "quant_method", None)
    if current_platform.is_cpu() and getattr(method, "moe_kernel", None) is not None:
        # vLLM packs experts for a CPU only when it makes their kernel, not when it loads them again.
        method.moe_kernel = None
    layerwise._layerwise_process(module, layerwise.get_layerwise_info(module))


def put_back(module: nn.Module) -> None:
    """Give an open module its old tensors again."""
    info = layerwise.get_layerwise_info(module)
    layerwise._place_kernel_tensors(module, info)
    info.reset()


def process_again(module: nn.Module) -> None:
    """Process a module whose weights are another module's, a tied head: what it made of the old ones is stale."""
    module.quant_method.process_weights_after_loading(module)


def tied_to(model: nn.Module, names: set[str]) -> list[nn.Module]:
    """Modules that process parameters which `names` (full names of other modules) own too."""
    modules = dict(model.named_modules())
    shared = {id(tensor) for name in names for tensor in modules[name]._parameters.values() if tensor is not None}
    return [
        module
        for name, module in modules.items()
        if name not in names
        and is_processed(module)
        and any(id(tensor) in shared for tensor in module._parameters.values() if tensor is not None)
    ]


def attention_of(model: nn.Module) -> list[nn.Module]:
    """Attention modules that vLLM processes once everything else is loaded, and not in vain."""
    return [module for module in model.modules() if _is_deferred(module) and not _keeps_defaults(module)]


def _keeps_defaults(module: Any) -> bool:
    """Whether processing only sets the scales of a cache that is not quantised to what they are. That takes a GPU of
    many layers longer than half of its weights."""
    if type(module) is not attention.Attention or module.kv_cache_dtype not in _PLAIN_CACHES:
        return False
    ways = (vars(kind) for kind in type(module.impl).__mro__)
    way = next((each[_PROCESS] for each in ways if _PROCESS in each), None)
    return way is not None and way.__module__ == "vllm.v1.attention.backend"


def process_attention(module: Any, dtype: torch.dtype) -> None:
    module.process_weights_after_loading(dtype)
