"""The stages of a run by name, and forward hooks that show them on any network, ours or transformers'."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

EMBEDDED, VISION_OUTPUT, CONNECTED = "vision embeddings", "vision output", "connector output"
FEATURES, TEXT, LOGITS = "visual features", "token embeddings", "logits"
MERGED = "merged embeddings"
VISION, DECODER = "vision layer", "decoder layer"

See: TypeAlias = Callable[[str, Tensor], None]
"""Gets the name of a stage and its activations, which it must copy if it keeps them."""


def vision_layer(index: int) -> str:
    return f"{VISION} {index}"


def decoder_layer(index: int) -> str:
    return f"{DECODER} {index}"


@contextmanager
def vision_taps(vision: nn.Module, connector: nn.Module | None, see: See) -> Iterator[None]:
    """Shows what enters a tower's first layer, leaves each layer, enters and leaves the connector. Ours or theirs."""
    hooks = _layer_hooks(vision, see, EMBEDDED, vision_layer)
    if connector is not None:
        hooks.append(connector.register_forward_pre_hook(_input_to(see, VISION_OUTPUT), with_kwargs=True))
        hooks.append(connector.register_forward_hook(_output_to(see, CONNECTED)))
    with _removed_after(hooks):
        yield


@contextmanager
def decoder_taps(decoder: nn.Module, see: See) -> Iterator[None]:
    """Shows what enters a decoder's first layer (`MERGED`) and leaves each layer. Theirs: ours runs in segments."""
    with _removed_after(_layer_hooks(decoder, see, MERGED, decoder_layer)):
        yield


def _layer_hooks(network: nn.Module, see: See, entry: str, name_of: Callable[[int], str]) -> list[RemovableHandle]:
    layers = layers_of(network)
    return [
        layers[0].register_forward_pre_hook(_input_to(see, entry), with_kwargs=True),
        *(layer.register_forward_hook(_output_to(see, name_of(index))) for index, layer in enumerate(layers)),
    ]


@contextmanager
def _removed_after(hooks: list[RemovableHandle]) -> Iterator[None]:
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def layers_of(network: nn.Module) -> nn.ModuleList:
    """The layers of a tower or decoder: its longest list of modules, whatever it is called."""
    lists = [module for module in network.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=len)


def _input_to(see: See, name: str) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        see(name, args[0] if args else next(iter(kwargs.values())))

    return hook


def _output_to(see: See, name: str) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        see(name, output if isinstance(output, Tensor) else output[0])

    return hook
