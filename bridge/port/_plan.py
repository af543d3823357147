"""`plan`: what moving values between Linen variables and a native NNX model would do."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from flax import linen as nn
from flax import nnx

from bridge._conversion import linen_leaves
from bridge._conversion.collections import STATIC
from bridge._conversion.neutral import Address, Path
from bridge._errors import ConversionError, PortError, mapping_error
from bridge._rules.rules import table_of
from bridge._types import ModelTree

from . import _moving
from ._correspondence import Correspondence
from ._entries import Entries, Entry, problem_texts, summary, table
from ._match import correspondence
from ._optimizer import OptimizerPort
from ._rule_text import renames_of
from ._trees import LinenNode, NNXNode, linen_nodes, linen_text, nnx_nodes, nnx_text

T = TypeVar("T")
_Target = TypeVar("_Target", bound=ModelTree, covariant=True)
_Tree = TypeVar("_Tree", bound=ModelTree)

_NNX = nnx.Pytree | nnx.State


class TwoTrees(NamedTuple):
    """Linen variables and an NNX model with their trees.

    `left_alone` has the paths of what is not a weight. `to_nnx` says whether the model is the
    target.
    """

    variables: Mapping[str, Any]
    model: Any
    linen: LinenNode
    nnx: NNXNode
    left_alone: tuple[str, ...]
    to_nnx: bool


class Plan(Generic[_Target]):
    """The pairs of leaves of Linen variables and an NNX model, and the problems with them.

    Made by `plan`. A plan reads and writes nothing until `apply`.

    Attributes:
      entries: the result for each leaf, in the order of the target.
      to_nnx: whether values move from Linen to NNX.
      left_alone: the paths of leaves that are not weights: RNG state, sown values, collection
        `nnx`.
    """

    def __init__(self, correspondence: Correspondence, sides: TwoTrees):
        self._found = correspondence
        self._sides = sides
        self.left_alone: tuple[str, ...] = sides.left_alone
        self.to_nnx: bool = sides.to_nnx
        self.entries: tuple[Entry, ...] = tuple(Entries(correspondence, sides.to_nnx))

    @property
    def ok(self) -> bool:
        """Whether every leaf has its place, so that `apply` can move the values."""
        return not self.problems

    @property
    def problems(self) -> tuple[Entry, ...]:
        """The entries that keep `apply` from moving anything."""
        return tuple(entry for entry in self.entries if entry.is_problem)

    def __str__(self) -> str:
        return self.text()

    def text(self, *, whole: bool = False) -> str:
        """The plan as a table.

        Args:
          whole: whether each leaf has a row of its own. Otherwise repeated blocks are folded into
            one row, and a table of more than 150 lines is cut.
        """
        return table(self.entries, self._heading, self.left_alone, whole=whole)

    def __repr__(self) -> str:
        return f"<Plan {self.summary}>"

    @property
    def summary(self) -> str:
        """The number of entries of each kind, in one line."""
        return summary(self.entries, self._heading)

    @property
    def _heading(self) -> str:
        return "Linen -> NNX" if self.to_nnx else "NNX -> Linen"

    def to_json(self) -> str:
        """The plan as JSON text.

        Returns:
          An object with `ok`, `direction`, `left_alone`, and `entries` with the fields of `Entry`.
        """
        return json.dumps(
            {
                "ok": self.ok,
                "direction": "linen_to_nnx" if self.to_nnx else "nnx_to_linen",
                "left_alone": self.left_alone,
                "entries": [vars(entry) for entry in self.entries],
            },
            indent=2,
        )

    def renames(self) -> dict[str, str]:
        """The rules for all leaves with different paths or arrays in the two libraries.

        Returns:
          A table of rules for `checkpoint.restore` and `python -m bridge convert`. These know no
          layers, so they also need rules for leaves that `plan` pairs by structure.

        Raises:
          PortError: the plan has problems, or no rule can say where the parts of a leaf go.
        """
        if self.problems:
            raise _not_clean(self.problems)
        return renames_of(self._found)

    def inverse(self) -> Plan[Any]:
        """The plan of the other direction, from the target of this plan to its source."""
        return Plan(self._found, self._sides._replace(to_nnx=not self.to_nnx))

    def apply(self) -> _Target:
        """Moves the values: all of them, or none.

        Returns:
          The NNX model: its Variables are the same objects as before and keep dtype and sharding.
          Or new Linen variables with the target's boxes. Leaves that are not weights are the
          target's own there, and are left out if the target is abstract.

        Raises:
          PortError: the plan has problems, the source holds no values, or Variables of the model
            were replaced after the plan was made.
        """
        if self.problems:
            raise _not_clean(self.problems)
        self._check_variables()
        if self.to_nnx:
            _moving.write_nnx(self._found)
            return self._sides.model
        moved: Any = _moving.linen_variables(self._found, self._sides.variables)
        return moved

    def _check_variables(self) -> None:
        """Raises if the model has other Variables than the plan moves."""
        now = {
            node.path: node.item for node in nnx_nodes(self._sides.model)[0].walk() if node.is_leaf
        }
        replaced = [
            f"{nnx_text(path)}: the Variable of the plan is no longer there"
            for path, leaf in self._found.nnx_leaves.items()
            if leaf.is_variable and now.get(path) is not leaf.item
        ]
        if replaced:
            raise PortError("the model has changed since the plan", replaced, "Make a new plan.")

    def convert(self, tree: ModelTree) -> dict[tuple[str, Path], Any]:
        """Applies the same moves to another tree of the source's structure, such as gradients.

        Args:
          tree: for a Linen source, variables or only parameters; for an NNX source, a module, a
            State or nested dicts. It may lack leaves. Arrays of any dtype.

        Returns:
          Arrays by (collection, path) of the target. Leaves without a place there are left out;
          places without a source are zero.

        Raises:
          PortError: one of several sources of a leaf is missing.
          ConversionError: `tree` has another form.
        """
        if self.to_nnx:
            moved = _moving.to_nnx(self._found, _moving.linen_values(tree, self._collections))
            leaves = self._found.nnx_leaves
            return {leaves[path].address: value for path, value in moved.items()}
        return dict(_moving.to_linen(self._found, _moving.nnx_values(tree)))

    @property
    def sources(self) -> dict[Address, tuple[Address, ...]]:
        """The leaves that make up each leaf of the target, by (collection, path).

        None for a leaf that is zero because the source has no place for it.
        """
        leaves, found = self._found.nnx_leaves, dict[Address, tuple[Address, ...]]()
        for target, pieces in self._found.by_target(to_nnx=self.to_nnx).items():
            pairs = [(piece.linen, leaves[piece.nnx].address) for piece in pieces]
            if self.to_nnx:
                found[leaves[target].address] = tuple(dict.fromkeys(linen for linen, _ in pairs))
            else:
                found[target] = tuple(dict.fromkeys(nnx for _, nnx in pairs))
        return found if self.to_nnx else {**dict.fromkeys(self._found.zero, ()), **found}

    def apply_optimizer(self, source: object, target: T) -> T:
        """Moves optimizer state and step as the parameters are moved: all of it, or nothing.

        Args:
          source: for a Linen source, a `TrainState` or any dataclass with `opt_state` and `step`;
            for an NNX source, an `nnx.Optimizer`.
          target: the other one, made with the same optax transformation.

        Returns:
          The `nnx.Optimizer`, written in place; or the train state with new `opt_state` and `step`
          and the parameters that it had.

        Raises:
          PortError: the states have different structures, a value has no place, or the train
            state has other parameters than the plan: others by name or shape or, as the source,
            by value, such as those of a later step.
          ConversionError: source or target does not fit the direction of the plan.

        Source: flax/nnx/training/optimizer.py:Optimizer @ 0.12.8
        """
        given: tuple[Any, Any] = (source, target) if self.to_nnx else (target, source)
        state, optimizer = given
        if not hasattr(state, "opt_state") or isinstance(state, nnx.Optimizer):
            raise mapping_error(state, "a Linen train state; plan.inverse() moves back")
        if not isinstance(optimizer, nnx.Optimizer):
            raise mapping_error(optimizer, "an nnx.Optimizer")
        port = OptimizerPort(self._found, self._collections)
        moved: Any = (
            port.to_nnx(state, optimizer) if self.to_nnx else port.to_linen(optimizer, state)
        )
        return moved

    @property
    def _collections(self) -> tuple[str, ...]:
        return tuple(self._sides.variables)


def plan(source: ModelTree, target: _Tree, rules: Mapping[str, str] | None = None) -> Plan[_Tree]:
    r"""Plans how to move the values of one model into its re-implementation.

    Flax's own layers are matched by rules of their own, and everything else by name. A module with
    another name is matched if there is only one candidate. The plan never guesses between two
    candidates; a rule has to decide.

    Numbers that the program wrote count as names: `layer_0` is `layers.0`. Entries that rest on
    them have `by number` in their `rule`, because traces may contradict them; `suggest` finds that
    out. Numbers of automatic names, such as `Block_0`, count constructions and decide nothing;
    `suggest` proposes rules for them. Names such as `block_0` are taken for those of a list, as
    the name of a class begins with a capital.

    Only names, shapes and dtypes are compared. A wrong value, a transposed square kernel, or
    swapped values of two layers of one shape show only when both models run.

    Args:
      source: Linen variables (`{collection: {name: array or box}}`), or an NNX module or State.
      target: the other kind: an NNX module, or Linen variables, also abstract ones such as
        `jax.eval_shape(module.init, key, x)` returns. The variables of a `bridge.ToNNX` have their
        Linen paths, whether it is the NNX module or inside it.
      rules: NNX paths by regular expressions for Linen paths, whatever the direction:
        `{'encoder/Dense_0': 'encoder.fc1', r'block_(\d+)': r'blocks.\1'}`. Below a `ToNNX` an NNX
        path continues as the Linen path, `'encoder.Dense_0'`. `'blocks.*'` says that the leaves of
        the Linen path are stacked, `r'blocks[\1]'` that those of the NNX path are. Arrays that
        differ: `{'qkv': '{q,k,v}'}` splits, `{'{q,k,v}': 'qkv'}` joins, on the last axis or that of
        `{q,k,v@0}`, and `{12x q,k,v}` in each of 12 blocks of it; `'q reshape'` and `'q transpose'`
        are for other shapes.

    Returns:
      The plan: `print(plan)` shows it, `plan.ok` is True if it is clean, `plan.apply()` carries it
      out.

    Raises:
      ConversionError: source and target are not one of each kind.
      RulesError: `rules` is not a table.

    Example::

      >>> import jax, jax.numpy as jnp
      >>> from flax import linen as nn, nnx
      >>> from bridge import port
      >>> linen = nn.Sequential([nn.Dense(4), nn.Dense(2)])
      >>> variables = linen.init(jax.random.key(0), jnp.ones((1, 3)))
      >>> rngs = nnx.Rngs(1)
      >>> model = nnx.Sequential(nnx.Linear(3, 4, rngs=rngs), nnx.Linear(4, 2, rngs=rngs))
      >>> plan = port.plan(variables, model)
      >>> plan.ok, plan.entries[0].source, plan.entries[0].target
      (True, ('params/layers_0/bias',), ('layers.0.bias',))
      >>> x = jnp.ones((1, 3))
      >>> bool((plan.apply()(x) == linen.apply(variables, x)).all())
      True
    """
    sides = sides_of(source, target)
    known = {} if rules is None else table_of(rules)
    return Plan(correspondence(sides.linen, sides.nnx, known), sides)


def _not_clean(problems: Sequence[Entry]) -> PortError:
    return PortError(
        "the plan is not clean",
        problem_texts(problems),
        "Name the places in rules={'Linen path': 'nnx.path'}, which port.suggest proposes,"
        " or change one of the models.",
    )


def sides_of(source: Any, target: Any) -> TwoTrees:
    """The two sides of a plan.

    Raises ConversionError if source and target are not one of each kind.
    """
    to_nnx = isinstance(target, _NNX)
    if to_nnx == isinstance(source, _NNX):
        raise ConversionError(
            "plan expected Linen variables and an NNX module, in either order, found"
            f" {type(source).__name__} and {type(target).__name__}"
        )
    variables, model = (source, target) if to_nnx else (target, source)
    if isinstance(variables, nn.Module):
        raise ConversionError(
            f"plan expected Linen variables, found the module {type(variables).__name__}; give what"
            " module.init returns, or jax.eval_shape(module.init, key, x) for their shapes"
        )
    linen, linen_left = linen_nodes(linen_leaves.from_variables(variables))
    nnx_root, nnx_left = nnx_nodes(model)
    left_alone = (
        *map(linen_text, linen_left),
        *([STATIC] if STATIC in variables else []),
        *(nnx_text(path) for _, path in nnx_left),
    )
    return TwoTrees(variables, model, linen, nnx_root, left_alone, to_nnx)
