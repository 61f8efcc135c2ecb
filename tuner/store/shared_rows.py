"""Configs, reasons and binaries: what many trials share is read and decoded once."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from typing import Any

from sqlalchemy import Connection, select

from ...errors import UsageError
from ...kernels.base import Config
from ..records import BinaryFacts
from .codec import decode_binary_ids, decode_binary_row, decode_config_row
from .models import BinaryRow, ConfigRow, ConfigShapeRow, KernelRow, ReasonRow

__all__ = ["SharedRows", "chunks"]

# Databases bound the number of parameters of one statement.
_CHUNK = 500


def chunks(values: Sequence[int]) -> Iterable[Sequence[int]]:
    """The values in parts that one statement takes."""
    return (values[start : start + _CHUNK] for start in range(0, len(values), _CHUNK))


class SharedRows:
    """Reads inside one transaction; what cannot be read is said where a trial asks for it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._configs: dict[int, Config] = {}
        self._bad_configs: dict[int, str] = {}
        self._reasons: dict[int | None, str] = {None: ""}
        self._binaries: dict[int, BinaryFacts] = {}
        self._bad_binaries: dict[int, str] = {}
        self._facts: dict[object, tuple[BinaryFacts, ...]] = {None: ()}
        """By the text of ``binary_ids``: most trials share theirs with others."""

    def config(self, config_id: int) -> Config:
        """The config of this id.

        Raises:
            UsageError: it is missing or makes no sense.
        """
        if config_id not in self._configs:
            missing = f"its config {config_id} is missing"
            raise UsageError(self._bad_configs.get(config_id, missing))
        return self._configs[config_id]

    def reason(self, reason_id: int | None) -> str:
        """The reason of this id; empty where there is none."""
        return self._reasons.get(reason_id, "")

    def facts(self, binary_ids: object) -> tuple[BinaryFacts, ...]:
        """The binaries of a trial by the text of its ``binary_ids``.

        Raises:
            UsageError: one is missing or makes no sense.
        """
        if binary_ids not in self._facts:
            ids = decode_binary_ids(binary_ids)
            for binary_id in ids:
                if binary_id not in self._binaries:
                    missing = f"its binary {binary_id} is missing"
                    raise UsageError(self._bad_binaries.get(binary_id, missing))
            self._facts[binary_ids] = tuple(self._binaries[binary_id] for binary_id in ids)
        return self._facts[binary_ids]

    def read_configs(self, config_ids: Collection[int]) -> None:
        """Reads those that are not known yet."""
        query = select(
            ConfigRow.id,
            ConfigRow.values_json,
            ConfigShapeRow.template,
            ConfigShapeRow.parameters_json,
        ).join(ConfigShapeRow, ConfigShapeRow.id == ConfigRow.shape_id)
        for row in self._rows(query, ConfigRow.id, set(config_ids) - self._configs.keys()):
            try:
                self._configs[row.id] = decode_config_row(f"config {row.id}", row)
            except UsageError as error:
                self._bad_configs[row.id] = str(error)

    def read_reasons(self, reason_ids: Collection[int | None]) -> None:
        """Reads those that are not known yet."""
        wanted = {i for i in set(reason_ids) - self._reasons.keys() if i is not None}
        for row in self._rows(select(ReasonRow.id, ReasonRow.reason), ReasonRow.id, wanted):
            self._reasons[row.id] = str(row.reason or "")

    def read_binaries(self, texts: Collection[object]) -> None:
        """Reads the binaries that these values of ``binary_ids`` name."""
        wanted: set[int] = set()
        for text in set(texts) - self._facts.keys():
            with suppress(UsageError):  # ``facts`` says it beside the trial
                wanted.update(decode_binary_ids(text))
        query = select(
            BinaryRow.__table__,
            KernelRow.kernel,
            KernelRow.mma_kind,
            KernelRow.instruction_classes_json,
        ).join(KernelRow, KernelRow.id == BinaryRow.kernel_id)
        for row in self._rows(query, BinaryRow.id, wanted - self._binaries.keys()):
            try:
                self._binaries[row.id] = decode_binary_row(f"binary {row.id}", row)
            except UsageError as error:
                self._bad_binaries[row.id] = str(error)

    def _rows(self, query: Any, column: Any, ids: Iterable[int]) -> Iterable[Any]:
        for chunk in chunks(sorted(ids)):
            yield from self._connection.execute(query.where(column.in_(chunk))).all()
