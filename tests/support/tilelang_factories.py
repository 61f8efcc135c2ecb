"""TileLang program factories: functions of sizes and parameters that return a program."""

import tilelang
import tilelang.language as T  # noqa: N812 - as every TileLang program has it


@tilelang.jit(out_idx=[-1])
def double(n, block=64, threads=128):
    @T.prim_func
    def main(X: T.Tensor((n,), "float32"), Y: T.Tensor((n,), "float32")):
        with T.Kernel(T.ceildiv(n, block), threads=threads) as bx:
            for i in T.Parallel(block):
                Y[bx * block + i] = X[bx * block + i] * 2

    return main


@tilelang.jit(out_idx=[-1])
def wrong_at_128(n, block=64, threads=128):
    @T.prim_func
    def main(X: T.Tensor((n,), "float32"), Y: T.Tensor((n,), "float32")):
        with T.Kernel(T.ceildiv(n, block), threads=threads) as bx:
            for i in T.Parallel(block):
                Y[bx * block + i] = X[bx * block + i] * (3 if block == 128 else 2)

    return main
