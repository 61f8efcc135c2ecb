"""Block-scaled FP4: formats, plain-torch codecs (the definition) and Triton quantisers."""
