"""Fills a library's empty model from a checkpoint, one module at a time, through the independent decoder.

Names travel by the library's own conversion table. Before anything runs it is proven that every tensor of the model is
filled exactly once; what the checkpoint holds beyond that is told. Stacked experts are read when one is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from decode import Reader  # type: ignore[import-not-found]  # beside this file, run by path
from pieces import can_slice, is_plain, logical_names, slice_tensor  # type: ignore[import-not-found]
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key


@dataclass
class Group:
    """What fills one name of the model: tensors of the checkpoint, and the library's converter when there is one.

    sources: (pattern of the converter, logical tensor) in the library's order. Both patterns and converter are the
    library's; without a converter there is one source and its value is taken as it is.
    """

    target: str
    converter: Any = None
    sources: list[tuple[str, str]] = field(default_factory=list)

    def all_targets(self) -> list[str]:
        if self.converter is None:
            return [self.target]
        first, *rest = self.converter.target_patterns
        return [self.target, *(self.target.replace(first, other) for other in rest)]


class LazyExperts:
    """Stands in for a stacked parameter [E, ..]: indexing with one expert's number reads and decodes that one."""

    def __init__(self, shape: torch.Size, read: Callable[[int], Tensor]) -> None:
        self.shape, self.dtype, self.device, self.ndim = shape, torch.float32, torch.device("cpu"), len(shape)
        self._read = read

    def __getitem__(self, index: Any) -> Tensor:
        value = self._read(int(index))
        if value.shape != self.shape[1:]:
            raise ValueError(f"an expert has shape {list(value.shape)}, its module wants {list(self.shape[1:])}")
        return value


class Filler:
    """The model's tensors and where each comes from. ValueError names those without exactly one source."""

    def __init__(self, model: nn.Module, reader: Reader) -> None:
        self.model, self.reader = model, reader
        self.held = logical_names(reader)
        self.wanted = {name: tuple(value.shape) for name, value in model.state_dict().items()}
        self.groups: dict[str, Group] = {}
        self.by_target: dict[str, Group] = {}
        self.unused: list[str] = []
        self._gather()
        self._tie()
        missing = sorted(set(self.wanted) - set(self.by_target))
        if missing:
            raise ValueError(
                f"{len(missing)} tensors of {type(model).__name__} have no source in the checkpoint: "
                + ", ".join(missing[:8])
            )

    def _gather(self) -> None:
        table = get_model_conversion_mapping(self.model)
        renamings = [t for t in table if isinstance(t, WeightRenaming)]
        converters = [t for t in table if isinstance(t, WeightConverter)]
        by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
        prefix = self.model.base_model_prefix
        for name in sorted(self.held, key=dot_natural_key):
            target, pattern = rename_source_key(name, renamings, converters, prefix, self.wanted)
            if target not in self.wanted and name in self.wanted:
                target, pattern = name, None
            if target not in self.wanted:
                self.unused += self.held[name]
                continue
            group = self.groups.setdefault(target, Group(target, by_pattern[pattern] if pattern else None))
            if group.sources and (pattern is None or group.converter is None):
                raise ValueError(f"both {group.sources[0][1]} and {name} would fill {target}")
            group.sources.append((pattern or name, name))
        for group in self.groups.values():
            for target in group.all_targets():
                if target in self.by_target:
                    raise ValueError(f"{target} would be filled twice")
                self.by_target[target] = group

    def _tie(self) -> None:
        """A tied name without a tensor of its own takes the other's; one with other bytes stays untied, as on load."""
        for target, source in dict(getattr(self.model, "all_tied_weights_keys", None) or {}).items():
            if target not in self.by_target and source in self.by_target:
                self.by_target[target] = Group(target, None, list(self.by_target[source].sources))
            elif source not in self.by_target and target in self.by_target:
                self.by_target[source] = Group(source, None, list(self.by_target[target].sources))

    def plain_source(self, target: str) -> str | None:
        """The checkpoint's tensor when ``target`` is that tensor as it stands, else None."""
        group = self.by_target[target]
        if group.converter is not None or len(group.sources) != 1:
            return None
        name = group.sources[0][1]
        ok = is_plain(self.reader, name, self.held[name]) and self.reader.places[name].shape == self.wanted[target]
        return name if ok else None

    def values(self, group: Group) -> dict[str, Tensor]:
        """Every tensor of the model that ``group`` fills, as float32, shapes checked."""
        if group.converter is None:
            made = {group.target: self._oriented(group.target, group.sources[0][1])}
        else:
            made = self._convert(group, [(p, partial(self.reader.tensor, n)) for p, n in group.sources])
        for name, value in made.items():
            if tuple(value.shape) != self.wanted.get(name):
                raise ValueError(f"{name} got shape {list(value.shape)}, the model wants {self.wanted.get(name)}")
        return made

    def _convert(self, group: Group, readers: Sequence[tuple[str, Callable[[], Tensor]]]) -> dict[str, Tensor]:
        converter = deepcopy(group.converter)
        for pattern, read in readers:
            converter.add_tensor(group.target, group.target, pattern, read)
        made = converter.convert(group.target, model=self.model, config=self.model.config)
        return {n: v[0] if isinstance(v, list) else v for n, v in made.items()}

    def _oriented(self, target: str, name: str) -> Tensor:
        value = self.reader.tensor(name)
        return value.transpose(-1, -2) if self._turned(target, name) else value

    def _turned(self, target: str, name: str) -> bool:
        """Packed blocks are always [.., out, in]; some expert modules hold [.., in, out]."""
        owner = self.model.get_submodule(target.rpartition(".")[0])
        return bool(getattr(owner, "is_transposed", False)) and name + "_blocks" in self.reader.places

    def lazy(self, target: str) -> LazyExperts | None:
        """A stand-in for stacked experts that reads one at a time, or None where the tensor must be read whole."""
        group, shape = self.by_target[target], torch.Size(self.wanted[target])
        owner = self.model.get_submodule(target.rpartition(".")[0])
        if len(shape) != 3 or not hasattr(owner, "is_transposed") or group.all_targets() != [target]:
            return None
        if group.converter is None:
            return self._lazy_stacked(target, shape)
        lists: dict[str, list[str]] = {}
        for pattern, name in group.sources:
            lists.setdefault(pattern, []).append(name)
        first = type(group.converter.operations[0]).__name__
        if first != "MergeModulelist" or any(len(names) != shape[0] for names in lists.values()):
            return None

        def read(expert: int) -> Tensor:
            picked = [(p, partial(self.reader.tensor, names[expert])) for p, names in lists.items()]
            return self._convert(group, picked)[target][0]

        return LazyExperts(shape, read)

    def _lazy_stacked(self, target: str, shape: torch.Size) -> LazyExperts | None:
        name = self.by_target[target].sources[0][1]
        parts, turned = self.held[name], self._turned(target, name)
        if not can_slice(self.reader, name, parts, shape[0]):
            return None

        def read(expert: int) -> Tensor:
            value = slice_tensor(self.reader, name, parts, expert)
            return value.T if turned else value

        return LazyExperts(shape, read)


class Resident:
    """Puts the tensors below one module in place, and takes them away again."""

    def __init__(self, filler: Filler, prefix: str) -> None:
        self.filler = filler
        dotted = prefix + "."
        self.targets = [n for n in filler.wanted if n == prefix or n.startswith(dotted)]
        self._empty: list[tuple[nn.Module, str, Any]] = []

    def fill(self) -> None:
        """Every tensor below the module, exactly once; ValueError naming those that stay empty."""
        left = set(self.targets)
        for target in self.targets:
            if target not in left:
                continue
            stand_in = self.filler.lazy(target)
            if stand_in is not None:
                self._put(target, stand_in)
                left.discard(target)
                continue
            group = self.filler.by_target[target]
            for name, value in self.filler.values(group).items():
                if name in left:
                    self._put(name, value)
                    left.discard(name)
        if left:
            raise ValueError(f"not filled: {', '.join(sorted(left))}")

    def drop(self) -> None:
        """Back to empty; the memory is free at once."""
        for owner, leaf, empty in self._empty:
            owner.__dict__.pop(leaf, None)
            (owner._buffers if leaf in owner._buffers else owner._parameters)[leaf] = empty
        self._empty.clear()

    def _put(self, target: str, value: Tensor | LazyExperts) -> None:
        path, _, leaf = target.rpartition(".")
        owner = self.filler.model.get_submodule(path)
        if leaf in owner._buffers:
            assert isinstance(value, Tensor)
            self._empty.append((owner, leaf, owner._buffers[leaf]))
            owner._buffers[leaf] = value.contiguous()
            return
        self._empty.append((owner, leaf, owner._parameters[leaf]))
        if isinstance(value, LazyExperts):
            del owner._parameters[leaf]
            owner.__dict__[leaf] = value
        else:
            owner._parameters[leaf] = nn.Parameter(value.contiguous(), requires_grad=False)
