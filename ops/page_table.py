"""Where the tokens of each request lie: a CSR or a dense page table, checked by its shapes only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch

from ..errors import UsageError
from .checks import check_tensor, wrong

__all__ = ["PageTable", "check_table", "page_table_of"]

_EITHER = "kv_indptr, kv_indices and kv_last_page_len (CSR), or block_table and seq_lens (dense)"


@dataclass(frozen=True)
class PageTable:
    """Pages of every request, in token order; made by ``csr`` or ``dense``.

    Its tensors stay on the device and are read by the kernels: they may change between calls, and
    between replays of a CUDA graph.
    """

    indices: torch.Tensor
    """int32 page ids: CSR ``[pages]``, dense ``[batch, max_pages]``."""
    indptr: torch.Tensor | None = None
    last_page_len: torch.Tensor | None = None
    seq_lens: torch.Tensor | None = None

    @classmethod
    def csr(cls, indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor) -> Self:
        """Request b owns ``indices[indptr[b]:indptr[b + 1]]``; none of them: it has no token.

        Args:
            indptr: int32 ``[batch + 1]``; need not start at 0.
            indices: int32, page ids; may be longer than what is in use.
            last_page_len: int32 ``[batch]``: tokens in the last page of each request, from 1.
        """
        return cls(indices, indptr=indptr, last_page_len=last_page_len)

    @classmethod
    def dense(cls, block_table: torch.Tensor, seq_lens: torch.Tensor) -> Self:
        """Request b owns the first pages of ``block_table[b]`` that hold ``seq_lens[b]`` tokens.

        Args:
            block_table: int32 ``[batch, max_pages]``, page ids; any row stride.
            seq_lens: int32 ``[batch]``: tokens of each request, from 0.
        """
        return cls(block_table, seq_lens=seq_lens)

    @property
    def is_dense(self) -> bool:
        """Whether it is a row of page ids a request, with the number of tokens."""
        return self.seq_lens is not None

    @property
    def batch(self) -> int:
        """Requests."""
        lengths = self.last_page_len if self.seq_lens is None else self.seq_lens
        assert lengths is not None, "neither CSR nor dense"
        return lengths.shape[0]

    def check(self, function: str, device: torch.device, prefix: str = "") -> None:
        """Raises UsageError unless shapes, dtypes and strides are right and all is on the device.

        Args:
            function: Whose argument it is.
            device: Where q lies.
            prefix: In front of the tensors' names in messages.
        """
        check = _Check(function, prefix, device)
        if self.seq_lens is not None:
            batch = check.vector("seq_lens", self.seq_lens, None)
            check.rows("block_table", self.indices, batch)
            return
        assert self.indptr is not None, "see check_table"
        assert self.last_page_len is not None, "see check_table"
        batch = check.vector("kv_last_page_len", self.last_page_len, None)
        check.vector("kv_indptr", self.indptr, batch + 1)
        check.vector("kv_indices", self.indices, None)


def check_table(function: str, name: str, table: object) -> None:
    """Raises UsageError unless it is a page table of either kind; its tensors are not looked at."""
    what = type(table).__name__
    if isinstance(table, PageTable):
        is_csr = table.indptr is not None and table.last_page_len is not None
        if is_csr or table.is_dense:
            return
        what = "PageTable that is neither CSR nor dense"
    raise UsageError(
        f"{name} of {function} is a {what}: must be PageTable.csr(kv_indptr, kv_indices, "
        "kv_last_page_len) or PageTable.dense(block_table, seq_lens)"
    )


def page_table_of(
    function: str,
    *,
    kv_indptr: torch.Tensor | None,
    kv_indices: torch.Tensor | None,
    kv_last_page_len: torch.Tensor | None,
    block_table: torch.Tensor | None,
    seq_lens: torch.Tensor | None,
) -> PageTable:
    """The table that a call names by its tensors.

    Raises:
        UsageError: both kinds are named, neither is, or only a part of one.
    """
    csr = {"kv_indptr": kv_indptr, "kv_indices": kv_indices, "kv_last_page_len": kv_last_page_len}
    dense = {"block_table": block_table, "seq_lens": seq_lens}
    given = [name for name, tensor in {**csr, **dense}.items() if tensor is not None]
    if given == list(dense):
        assert block_table is not None
        assert seq_lens is not None
        return PageTable.dense(block_table, seq_lens)
    if given == list(csr):
        assert kv_indptr is not None
        assert kv_indices is not None
        assert kv_last_page_len is not None
        return PageTable.csr(kv_indptr, kv_indices, kv_last_page_len)
    named = ", ".join(given) or "no page table"
    raise UsageError(f"{function} got {named}: it takes {_EITHER}")


@dataclass(frozen=True)
class _Check:
    """Checks the tensors of one table."""

    function: str
    prefix: str
    device: torch.device

    def vector(self, name: str, tensor: torch.Tensor, size: int | None) -> int:
        """Checks a contiguous vector of ``size`` (None: any) and returns its size."""
        self._tensor(name, tensor)
        shape = tuple(tensor.shape)
        if len(shape) != 1 or (size is not None and shape != (size,)):
            allowed = "one dimension" if size is None else f"[{size}], by the number of requests"
            raise self._wrong("shape", name, shape, allowed)
        self._values(name, tensor)
        if not tensor.is_contiguous():
            raise self._wrong("stride", name, tensor.stride(), "(1,): call .contiguous()")
        return shape[0]

    def rows(self, name: str, tensor: torch.Tensor, size: int) -> None:
        """Checks a matrix of ``size`` rows, each of them contiguous."""
        self._tensor(name, tensor)
        if tensor.dim() != 2 or tensor.shape[0] != size:
            allowed = f"[{size}, max_pages], by the number of requests"
            raise self._wrong("shape", name, tuple(tensor.shape), allowed)
        self._values(name, tensor)
        if tensor.stride(1) != 1 and tensor.shape[1] > 1:
            raise self._wrong("last stride", name, tensor.stride(1), "1: call .contiguous()")

    def _tensor(self, name: str, value: object) -> None:
        check_tensor(self.function, f"{self.prefix}{name}", value)

    def _values(self, name: str, tensor: torch.Tensor) -> None:
        if tensor.dtype != torch.int32:
            allowed = "torch.int32: call .to(torch.int32)"
            raise self._wrong("dtype", name, tensor.dtype, allowed)
        if tensor.device != self.device:
            allowed = f"that of q, {str(self.device)!r}"
            raise self._wrong("device", name, str(tensor.device), allowed)

    def _wrong(self, what: str, name: str, value: object, allowed: str) -> UsageError:
        return wrong(self.function, f"{what} of {self.prefix}{name}", value, allowed)
