"""Shared settings for torch.compile."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function of tensors, once per process. Operations on lists of tensors are combined into few kernels."""
    return torch.compile(function, options={"combo_kernels": True})


@contextmanager
def many_variants() -> Iterator[None]:
    """Let one process compile the models of a whole study.

    By default torch stops recompiling a function after eight variants. It also reuses compiled code without checking a
    model's hooks: a method with hooks would run the code compiled for a method without.
    """
    import torch._dynamo as dynamo

    with dynamo.config.patch(recompile_limit=1000, accumulated_recompile_limit=10000, skip_nnmodule_hook_guards=False):
        yield
