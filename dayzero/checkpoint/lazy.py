"""Parameters that are left in the files and read in parts: an expert of a stack, rows of a matrix.

They stand in a tensor's place for callers that only index them, or split them, as a tensor is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from dayzero.checkpoint.statistics import extremes
from dayzero.decl import ParamDecl

# (rows, whether to compare copies) -> these rows of a matrix; (values of it, the name they are judged under)
ReadRows = Callable[[Sequence[range], bool], list[Tensor]]
JudgeRows = Callable[[Tensor, str], None]


class ExpertStack:
    """A stacked parameter [E, …] whose experts are read and decoded when they are asked for.

    It is indexed as the tensor is: ``stack[expert]`` gives a tensor ``shape[1:]``, which the caller must not change: it
    may be given again. Errors: as ``Loader.load``.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, read: Callable[[int], Tensor]) -> None:
        self.shape, self.dtype = shape, dtype
        self._read = read

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, expert: int) -> Tensor:
        if not 0 <= expert < self.shape[0]:
            raise IndexError(f"expert {expert} of {self.shape[0]}")
        return self._read(expert)


class MatrixRows:
    """A matrix [R, C] whose rows are read when they are asked for, and not kept. Errors: as ``Loader.load``.

    ``rows[ids]`` gives rows by number [*ids.shape, C]; ``rows.split(n)`` the whole in blocks of n, as a tensor's does.
    """

    def __init__(self, decl: ParamDecl, dtype: torch.dtype, read: ReadRows, judge: JudgeRows) -> None:
        self.shape, self.dtype = decl.shape, dtype
        self._name, self._read, self._judge = decl.name, read, judge
        self._judged = False

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, ids: Tensor) -> Tensor:
        wanted, at = torch.unique(ids, return_inverse=True)
        numbers: list[int] = wanted.tolist()
        if not numbers:
            return torch.empty(*ids.shape, self.shape[1], dtype=self.dtype)
        if not 0 <= numbers[0] <= numbers[-1] < self.shape[0]:
            raise IndexError(f"rows {numbers[0]} to {numbers[-1]} of {self.shape[0]}")
        value = torch.cat(self._read([range(n, n + 1) for n in numbers], not self._judged))
        if len(numbers) > 1 and not self._judged:  # a single row may well be constant: one that no text uses
            self._judge(value, f"{self._name}[{len(numbers)} rows]")
        return value[at]

    def split(self, size: int) -> Iterator[Tensor]:
        ends, judge = [], not self._judged
        for start in range(0, self.shape[0], size):
            value = self._read([range(start, min(start + size, self.shape[0]))], judge)[0]
            ends.append(extremes(value))
            yield value
            del value  # before the next block is read
        if judge:
            self._judge(torch.stack(ends), self._name)  # a matrix is judged by its smallest and largest value alone
            self._judged = True
