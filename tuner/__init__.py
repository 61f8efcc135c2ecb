"""Search, measurement, store, dispatch and reports over the contracts of ``kernels``."""
