"""The methods: one file each, and a line in the registry."""

from holdfast.methods.cpc import CPC
from holdfast.methods.ewc import EWC
from holdfast.methods.finetune import FineTune
from holdfast.methods.joint import Joint
from holdfast.methods.lwf import LwF
from holdfast.methods.mas import MAS
from holdfast.methods.method import Method
from holdfast.methods.npc import NPC
from holdfast.methods.separate import Separate
from holdfast.methods.si import SI
from holdfast.methods.ssl import SSL

METHODS: dict[str, type[Method]] = {
    "npc": NPC,
    "cpc": CPC,
    "ewc": EWC,
    "mas": MAS,
    "si": SI,
    "ssl": SSL,
    "lwf": LwF,
    "finetune": FineTune,
    "joint": Joint,
    "separate": Separate,
}
"""Every method by name. What is listed here is tested as an optimizer, and takes part in studies."""

__all__ = [
    "METHODS",
    "CPC",
    "EWC",
    "FineTune",
    "Joint",
    "LwF",
    "MAS",
    "Method",
    "NPC",
    "SI",
    "SSL",
    "Separate",
]
