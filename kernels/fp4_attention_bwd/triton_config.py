"""Configs of the backward's Triton template, typed: its parts and the tiles of each."""

from __future__ import annotations

from dataclasses import dataclass

from ..base import Config
from .problem import Fp4AttentionBwdProblem

__all__ = ["DK", "DKDV", "DQ", "DV", "PREPARE", "Fp4AttentionBwdTritonConfig"]

PREPARE, DKDV, DK, DV, DQ = "prepare", "dkdv", "dk", "dv", "dq"


@dataclass(frozen=True)
class Fp4AttentionBwdTritonConfig:
    """One config for one problem."""

    problem: Fp4AttentionBwdProblem
    config: Config

    def number(self, name: str) -> int:
        """The value of a parameter that is a size."""
        value = self.config[name]
        assert isinstance(value, int)
        return value

    @property
    def is_native(self) -> bool:
        """Whether scores come from FP4 tensor cores."""
        return self.problem.products == "native"

    @property
    def parts(self) -> tuple[str, ...]:
        """In launch order. ``together``: dK and dV share scores; ``apart``: each has its own."""
        by_keys = (DKDV,) if self.config["algorithm"] == "together" else (DK, DV)
        return (PREPARE, *by_keys, DQ)

    @property
    def amax_tiles(self) -> int:
        """Tiles of one head whose largest magnitudes are found separately."""
        return -(-self.problem.query_len // self.number("prepare_block_m"))

    def num_programs(self, part: str) -> int:
        """Programs of the launch of a part that has one."""
        problem = self.problem
        if part == DQ:
            tiles = -(-problem.query_len // self.number("dq_block_m"))
            return problem.batch * problem.num_qo_heads * tiles
        tiles = -(-problem.kv_len // self.number(f"{part}_block_n"))
        return problem.batch * problem.num_kv_heads * tiles
