"""Arguments of PyG that gids supports with one value only. Called by gids.pyg's classes."""

from __future__ import annotations

from typing import Any

_PYG = "leave it out, or use PyG's own NeighborLoader, which needs pyg-lib"
_PLAIN = "leave it out"

_ONLY: dict[str, tuple[object, str]] = {
    "subgraph_type": ("directional", _PYG),
    "directed": (True, _PYG),
    "disjoint": (False, _PYG),
    "time_attr": (None, _PYG),
    "input_time": (None, _PYG),
    "temporal_strategy": ("uniform", _PYG),
    "sample_direction": ("forward", _PYG),
    "neighbor_sampler": (None, "use PyG's own NodeLoader with that sampler"),
    "transform_sampler_output": (None, "give transform=, which is called with each Data"),
    "custom_cls": (None, "give transform=, which is called with each Data"),
    "input_id": (None, "index it with batch.input_id, positions among input_nodes"),
    "sampler": (None, "give the seeds as input_nodes, in any order"),
    "batch_sampler": (None, "give the seeds as input_nodes, and batch_size"),
    "generator": (None, "give seed=, a number"),
    "collate_fn": (None, _PLAIN),
}
"""The supported value, and advice for users who give another one."""


def refuse_other_values(given: dict[str, Any]) -> None:
    """Remove PyG's arguments from a call's keyword arguments. Raises ValueError for unsupported values."""
    for name in [name for name in given if name in _ONLY]:
        value = given.pop(name)
        supported, cure = _ONLY[name]
        plain = getattr(value, "value", value)  # of an Enum
        if plain is not supported and not (isinstance(plain, str) and plain == supported):
            shown = f"={plain!r}" if isinstance(plain, str | bool | int | float) else ""
            raise ValueError(f"{name}{shown} is not supported, only {supported!r}: {cure}")
