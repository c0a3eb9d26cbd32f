"""What a run costs on a mesh: memory, bytes moved, FLOPs, time, drops. Arithmetic, no JAX.

Letters as in `portolan.parallel`, and T tokens of a device, L layers, D width, H the width on the
wire (latent), I the inner width of an expert, Q chunks, W waves. Bytes are those of one device and,
where it is a flow, of one update. docs/planning.md explains every figure.
"""
