"""How paged decode may cut the tokens of a request into pieces: parameters that spaces share."""

from __future__ import annotations

from ..kernels.base import Config, ParameterValue
from .parameters import ActiveWhen, Parameter, categorical, ordered, powers_of_two

__all__ = ["NUM_SPLITS", "split_parameters", "split_values", "splits_have_work"]

NUM_SPLITS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


def split_parameters() -> tuple[Parameter, ...]:
    """The rule, its amounts and how pieces are merged."""
    return (
        categorical("split_rule", "none", "count", "size", "stream"),
        ordered("num_splits", *NUM_SPLITS, active_when=ActiveWhen("split_rule", ("count",))),
        powers_of_two("split_tokens", 128, 8192, active_when=ActiveWhen("split_rule", ("size",))),
        ordered("ctas_per_sm", 1, 2, 3, 4, 6, 8, active_when=ActiveWhen("split_rule", ("stream",))),
        categorical(
            "merge",
            "kernel",
            "last_block",
            active_when=ActiveWhen("split_rule", ("count", "size", "stream")),
        ),
    )


def splits_have_work(config: Config, kv_len: int) -> str | None:
    """Every run of a request should hold at least one tile."""
    block_n = int(config["block_n"])
    if config["split_rule"] == "count":
        if int(config["num_splits"]) * block_n > kv_len:
            return f"{config['num_splits']} splits of {block_n} exceed kv_len={kv_len}"
    elif config["split_rule"] == "size":
        split_tokens = int(config["split_tokens"])
        if split_tokens % block_n:
            return f"split_tokens={split_tokens} is not a multiple of block_n={block_n}"
        if split_tokens >= 2 * kv_len:
            return f"split_tokens={split_tokens} never splits kv_len={kv_len}"
    return None


def split_values(
    kv_len: int,
    block_n: int,
    *,
    splits: int = 1,
    split_tokens: int = 0,
    ctas_per_sm: int = 0,
    merge: str = "kernel",
) -> dict[str, ParameterValue]:
    """Values of these parameters: at most ``splits`` runs, as far as they fit, or another rule."""
    if split_tokens:
        return {"split_rule": "size", "split_tokens": split_tokens, "merge": merge}
    if ctas_per_sm:
        return {"split_rule": "stream", "ctas_per_sm": ctas_per_sm, "merge": merge}
    fitting = [n for n in NUM_SPLITS if n <= splits and n * block_n <= kv_len]
    if fitting:
        return {"split_rule": "count", "num_splits": fitting[-1], "merge": merge}
    return {"split_rule": "none"}
