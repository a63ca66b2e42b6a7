"""The compile path on a GPU.

Small networks keep a GPU waiting: for the host, which launches hundreds of kernels per step, and for memory, which
every elementwise layer reads and writes again. `Plan(compile=True)`, or `--compile`, removes both waits in four parts:

1. *Fused modules* (`fused.py`). `fuse_modules(model)` replaces modules of an `nn.Sequential` by equivalent ones.
   Instance norm, ReLU and pooling become one module, a convolution before an instance norm drops its bias, and a
   convolution with few channels becomes a matrix product. Parameters and `state_dict` stay the same. The memory layout
   becomes channels last.
2. *A kernel* (`kernels.py`, in Triton) computes instance norm, ReLU and pooling without writing anything in between. It
   also yields the channels' importance and activity as a byproduct, so NPC and SSL need no further pass.
3. *Compiled functions* (`holdfast.compiling`). `torch.compile` fuses the loss, the preparation of a batch, and each
   method's own arithmetic into few kernels.
4. *CUDA graphs* (`graphs.py`). `GraphedStep` captures the whole step (batch, loss, gradients, update) and replays it
   with one call. It applies if the images reside on the GPU, the method repeats the same operations in every step, and
   the run need not be deterministic.

`holdfast.runs.training` and `holdfast.runs.stepping` apply all four to a run on a GPU with `compile=True`. On a CPU,
`compile=True` compiles the loss only.

This package is a leaf. Nothing imports it at module level, and without it everything works on a CPU. Other packages
know a fused module only by the protocols through which it offers its taps.
"""

from holdfast.gpu.fused import fuse_modules
from holdfast.gpu.graphs import GraphedStep

__all__ = ["GraphedStep", "fuse_modules"]
