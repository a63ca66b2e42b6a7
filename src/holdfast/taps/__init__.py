"""The only service that hooks a model. All access to the inside of a model goes through these taps."""

from holdfast.taps.activations import Activation, ActivationTaps
from holdfast.taps.backward import ForwardTap, ScaleTap, before_step, tapped
from holdfast.taps.calls import Call, CallTap
from holdfast.taps.hooks import Taps
from holdfast.taps.importance import ImportanceTaps
from holdfast.taps.inputs import Signal, layer_inputs, module_inputs, module_signals, product_inputs

__all__ = [
    "Activation",
    "ActivationTaps",
    "Call",
    "CallTap",
    "ForwardTap",
    "ImportanceTaps",
    "ScaleTap",
    "Signal",
    "Taps",
    "before_step",
    "layer_inputs",
    "module_inputs",
    "module_signals",
    "product_inputs",
    "tapped",
]
