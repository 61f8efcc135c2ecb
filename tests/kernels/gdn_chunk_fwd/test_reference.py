"""The reference that configs are compared with."""

from __future__ import annotations

import torch
from tilescout.kernels.gdn_chunk_fwd import GdnChunkProblem
from tilescout.kernels.gdn_chunk_fwd import reference as ref
from tilescout.kernels.gdn_chunk_fwd.inputs import pack

PROBLEM = GdnChunkProblem(2, 9, 6, 1, 2, 64, 64, "float32")


def test_what_is_kept_for_inputs_follows_their_bounds() -> None:
    inputs = pack(PROBLEM, [3, 6], device="cpu", seed=0)
    outputs = ref.make_outputs(PROBLEM, inputs)

    def fill() -> None:
        for i, (first, end) in enumerate(ref._bounds(inputs)):
            out, state = ref.chunked_reference(PROBLEM, inputs, i)
            outputs.out[0, first:end] = out.transpose(0, 1)
            outputs.final_state[i] = state

    fill()
    assert ref.compare(PROBLEM, inputs, outputs).is_ok
    inputs.cu_seqlens.copy_(torch.tensor([0, 5, 9]))
    assert not ref.compare(PROBLEM, inputs, outputs).is_ok
    fill()
    assert ref.compare(PROBLEM, inputs, outputs).is_ok
