"""A GraphDef for a cache, without the objects that belong to a caller.

A cached GraphDef would keep the functions, configurations and classes alive that its module was
constructed with, and would give one model the objects of another that is equal now.
"""

from __future__ import annotations

import enum
import functools
import types
from typing import Any

from flax import linen as nn
from flax import nnx

from bridge._conversion.held_module import HeldModule
from bridge._fingerprint import Look, is_of_module
from bridge._flax import graphdefs
from bridge._flax.objects import ObjectState
from bridge._flax.self_references import Tie, tied, value_of

from .static_graphdef import Origin, StaticGraphDef

# What holds others and is nobody's: it may be shared if all that it holds may be.
_SHARED = (types.FunctionType, types.MethodType, functools.partial, nn.Module, HeldModule)
_SHARED += (enum.Enum, tuple, list, dict, set, frozenset, Tie, ObjectState)
_SHARED += (graphdefs.NodeDef, graphdefs.VariableDef, graphdefs.ArrayRefDef, graphdefs.NodeRef)
_SHARED += (graphdefs.NodeAttr, graphdefs.LeafAttr, graphdefs.Static)


class Template:
    """A GraphDef without the objects that its module was constructed with.

    Args:
      graphdef: the GraphDef.
      objects: what its module was constructed with (`Look.objects`).

    Raises:
      ValueError: there is anything else in it that may belong to a model.
      Exception: it refers to the objects in a way that nobody can follow; as `tied`.
    """

    def __init__(self, graphdef: StaticGraphDef, objects: list[Any]):
        parts: Any = graphdef.nodes, graphdef.attributes, graphdef.num_leaves
        own = {i: value for i, value in enumerate(objects) if not is_of_module(value)}
        self._tie = tied(parts, own)
        for held in Look(self._tie.kept).objects:
            if not (isinstance(held, _SHARED) or is_of_module(held)):
                raise ValueError(held)
        self._facts = graphdef.avals, graphdef.given
        is_whole = any(kept is parts for kept in self._tie.kept)
        self._whole: nnx.GraphDef[Any] | None = nnx.GraphDef(*parts) if is_whole else None

    @classmethod
    def of(cls, graphdef: StaticGraphDef, objects: list[Any]) -> Template | None:
        """The template of a GraphDef, None if it must not be kept."""
        try:
            return cls(graphdef, objects)
        except Exception:
            # An object that cannot be pickled may raise anything.
            return None

    def fill(self, objects: list[Any], origin: Origin | None) -> StaticGraphDef:
        """The GraphDef with these objects in the places of those that it was made with."""
        avals, given = self._facts
        made = self._whole or nnx.GraphDef(*value_of(self._tie, objects))
        return StaticGraphDef(made, avals, origin, given)
