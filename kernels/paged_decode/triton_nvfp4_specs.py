"""Configs of the NVFP4 template of paged decode, and the kernels that they compile to.

A kernel differs from that of a 16-bit cache in its pools and in how tiles become operands; the
rest of its specification, and the merge, are taken over.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..base import Config
from ..fp4_attention.mma_kinds import CheckedTritonKernelSpec
from ..triton_spec import TritonKernelSpec
from .problem import PagedDecodeProblem
from .triton_specs import PagedDecodeTritonConfig, TensorTraits
from .triton_specs import kernel_specs as specs_of_16_bits

__all__ = ["DEQUANT_MODULE", "KERNEL", "KERNEL_NAME", "Nvfp4Config", "kernel_specs"]

KERNEL, DEQUANT_MODULE = "triton_kernel_nvfp4", "triton_kernel_nvfp4_dequant"
"""Modules of the device code."""
KERNEL_NAME = "paged_decode_nvfp4_kernel"
NO_REGISTER_BOUND = 255
"""As many as the instruction set can name."""
_MMA_KINDS = frozenset({"16-bit"})
"""Of every product: codes are dequantised, on every architecture."""
_SCALE_STRIDES = tuple(
    f"{pool}_stride_{axis}" for pool in ("ks", "vs") for axis in ("page", "token", "head")
)


@dataclass(frozen=True)
class Nvfp4Config(PagedDecodeTritonConfig):
    """One config, typed. Tokens are always the rows of the matrix tiles (``swap_ab``)."""

    dequant: str = "shift"
    """How codes become fp16: ``shift``, ``carry``, ``hardware`` (Blackwell), ``arithmetic``."""
    v_operand: str = "shared"
    """Where the values of V lie when they are multiplied: ``registers`` or ``shared``."""
    maxnreg: int = NO_REGISTER_BOUND
    """Most registers a thread may have: fewer let more blocks share a multiprocessor."""

    @classmethod
    def of(cls, config: Config) -> Nvfp4Config:
        """The typed form of a config of this template."""
        return cls(swap_ab=True, **config.as_dict())  # type: ignore[arg-type]


def kernel_specs(
    problem: PagedDecodeProblem, config: Nvfp4Config, traits: TensorTraits, *, batch: int
) -> tuple[TritonKernelSpec, ...]:
    """The kernels of a config, specialised for tensors of these traits and for ``batch``."""
    wide = replace(problem, kv_dtype=problem.dtype)
    attention, *merges = specs_of_16_bits(wide, config, traits, batch=batch)
    return _attention_spec(attention, config), *merges


def _attention_spec(wide: TritonKernelSpec, config: Nvfp4Config) -> TritonKernelSpec:
    """The specification for a 16-bit cache, made one for codes and scales."""
    signature: dict[str, str] = {}
    for name, kind in wide.signature.items():
        if name in ("rope_theta", "rope_scale"):
            continue
        if name == "out_stride_t":
            signature |= dict.fromkeys(_SCALE_STRIDES, "i64")
        signature[name] = "*u8" if name in ("k", "v") else kind
        if name == "v":
            signature |= dict.fromkeys(("k_scales", "v_scales"), "*fp8e4nv")
    constexprs = {
        name: value
        for name, value in wide.constexprs.items()
        if name not in ("SWAP_AB", "HAS_ROPE")
    }
    return CheckedTritonKernelSpec(
        module=f"{__package__}.{KERNEL}",
        name=KERNEL_NAME,
        signature=signature,
        constexprs={**constexprs, "DEQUANT": config.dequant, "V_OPERAND": config.v_operand},
        aligned=wide.aligned,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        maxnreg=config.maxnreg if config.maxnreg < NO_REGISTER_BOUND else None,
        launch_pdl=config.launch_pdl,
        mma_kinds=_MMA_KINDS,
    )
