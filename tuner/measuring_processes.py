"""The processes of a measured run: the compile pool, and the worker that has the GPU."""

from __future__ import annotations

from .compile_pool import COMPILE_TIMEOUT_S, CompilePool, default_num_workers
from .gpu_worker import GpuWorker

__all__ = ["MeasuringProcesses", "measuring_compile_pool"]


def measuring_compile_pool(timeout_s: float = COMPILE_TIMEOUT_S) -> CompilePool:
    """Compilers beside a GPU worker: one core is left to it."""
    return CompilePool(max(1, default_num_workers() - 1), timeout_s=timeout_s)


class MeasuringProcesses:
    """Both together, for as many problems as a run has."""

    def __init__(self) -> None:
        """Starts no process yet."""
        self.compilers = measuring_compile_pool()
        self.gpu = GpuWorker()

    def start(self) -> None:
        """Starts them now; they load side by side while the caller finds out what to measure."""
        self.compilers.start()
        self.gpu.start()

    def close(self) -> None:
        """Ends them; what is queued for the GPU ends with its worker."""
        self.gpu.close()
        self.compilers.close()

    def __enter__(self) -> MeasuringProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
