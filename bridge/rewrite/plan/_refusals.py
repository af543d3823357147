"""The table of refusals: why something stays Linen, and what the user can do about it."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Refusal:
    """Why a class or a layer stays Linen.

    Attributes:
        id: of the row of the table.
        reason: what stands in the way.
        remedy: what the user can do.
        line: where, in the class's file; None if the class as a whole is meant.
    """

    id: str
    reason: str
    remedy: str
    line: int | None = None

    def __str__(self) -> str:
        return f"{self.reason} [{self.id}]"


def refused(id: str, line: int | None = None, /, **values: Any) -> Refusal:
    """A refusal of the table.

    `values` fill the texts of the row.
    """
    reason, remedy = _TABLE[id]
    return Refusal(id, reason.format(**values), remedy.format(**values), line)


class NotRewritableError(Exception):
    """A class cannot be rewritten.

    `values` fill the texts of the row. `node` is where, None if the class as a whole is meant.
    """

    def __init__(self, id: str, node: ast.AST | None = None, /, **values: Any) -> None:
        self.refusal = refused(id, getattr(node, "lineno", None), **values)
        super().__init__(str(self.refusal))


class LayerNotRewritableError(NotRewritableError):
    """One layer has no counterpart, and can be wrapped where it is made."""


# By id: what stands in the way, and what to do. Each row has a model in the tests that it refuses.
_TABLE: Mapping[str, tuple[str, str]] = {
    # Classes.
    "not-asked-for": (
        "it is not named in only=",
        "Add its name to only=.",
    ),
    "skipped": (
        "excluded by skip=",
        "Remove its name from skip=.",
    ),
    "not-called": (
        "it was never called",
        "Add an entry point that calls it (`also=`, in the command `--model`).",
    ),
    "base-left": (
        "it derives from {base}, which stays Linen",
        "See why {base} stays Linen.",
    ),
    "base-elsewhere": (
        "it derives from {base}, which is in another package",
        "Derive from a class of this package.",
    ),
    "class-decorator": (
        "the decorator @{decorator} returns another class",
        "Return the class itself from the decorator, or apply it where the class is used.",
    ),
    "own-method": (
        "the class defines its own {name}",
        "Move its code into `setup` or a method with another name.",
    ),
    "reserved-method": (
        "{name} is already a method of every NNX module",
        "Rename the method.",
    ),
    "reserved-argument": (
        "{name} cannot be an argument of an NNX constructor",
        "Rename the field.",
    ),
    "module-default": (
        "a field has a module as its default",
        "Use None as the default, and make the module in `setup` or the method.",
    ),
    "module-outside": (
        "a module is made outside the class: {name}",
        "Make the module in the class.",
    ),
    "mixed-class": (
        "it already uses both libraries: {name} makes an NNX module",
        "Rewrite the class by hand: it can use the NNX module directly.",
    ),
    "no-attribute": (
        "NNX modules have no self.{name}",
        "Remove it, or store what it says in a field.",
    ),
    "recursive": (
        "it makes modules of its own class, directly or through others",
        "Write the recursion as a loop.",
    ),
    "not-at-top": (
        "it is not defined at the top of its file, but in a function, by exec or by a decorator",
        "Define the class at the top of its file.",
    ),
    "no-file": (
        "its source is not in a file",
        "Move the class into a file.",
    ),
    "not-utf8": (
        "its source is not UTF-8 Python ({error})",
        "Save the file as UTF-8.",
    ),
    "given-modules": (
        "it is given modules, and only a class that stays Linen makes it",
        "Make the modules in the class, or see why the class around it stays Linen.",
    ),
    "cannot-run-alone": (
        "only a class that stays Linen can run it",
        "See why the class around it stays Linen.",
    ),
    "inside-linen": (
        "it is only used inside something that stays Linen",
        "See why the class around it stays Linen.",
    ),
    "values-differ": (
        "its values differ from those of the Linen class",
        "Rewrite it by hand, and compare with `bridge.parity`.",
    ),
    "new-class-raises": (
        "the new class raised {error}",
        "Rewrite it by hand. To rewrite only the other classes, name them in only=.",
    ),
    "not-parsed": (
        "its new text does not parse: {error}",
        "Rewrite it by hand. Please report it: this is a defect of `bridge.rewrite`.",
    ),
    "rewriter-failed": (
        "the rewriter failed: {error}",
        "Rewrite it by hand. Please report it: this is a defect of `bridge.rewrite`.",
    ),
    # Layers of Flax and classes that derive from them.
    "no-counterpart": (
        "{name} has no counterpart in NNX",
        "Leave it in `bridge.ToNNX`, or write an NNX module by hand.",
    ),
    "class-left": (
        "{name} stays Linen",
        "See why {name} stays Linen.",
    ),
    "class-elsewhere": (
        "{name}, from {module}, is not one of the classes that are rewritten",
        "Leave it in `bridge.ToNNX`, or rewrite its package too.",
    ),
    "lifted-class": (
        "a lifted transform makes {name}",
        "Make the layer in a statement of its own, outside other layers.",
    ),
    "names-by-layer": (
        "nn.{name} names its variables after its layer",
        "Use the layer without nn.{name}, or write the class by hand.",
    ),
    "no-argument": (
        "nnx.{layer} has no argument {name}",
        "Remove {name} if its default will do.",
    ),
    "lacks-argument": (
        "nnx.{layer} needs the argument {name}",
        "Pass {name}.",
    ),
    "unknown-size": (
        "its {name} could not be determined",
        "Add an entry point that calls the layer (`also=`, in the command `--model`).",
    ),
    "layer-stars": (
        "a constructor is called with * arguments",
        "List the arguments.",
    ),
    "layer-rest": (
        "a layer is made with ** arguments",
        "List the arguments, or take them from a dict that is never changed.",
    ),
    "layer-rest-differs": (
        "a layer is made with ** arguments that its NNX counterpart does not take",
        "List the arguments.",
    ),
    "layer-rest-changes": (
        "the dict of a layer's ** arguments is changed before the layer is made",
        "List the arguments, or make one dict for each layer.",
    ),
    "layer-call": (
        "nnx.{layer} cannot be called in this way",
        "Pass the arguments by keyword.",
    ),
    "sequential-keywords": (
        "nnx.Sequential would pass {name} to layers after the first",
        "Call the layers one by one.",
    ),
    "named-axis-norm": (
        "a norm over a named axis",
        (
            "Under jax.jit the statistics are those of the whole batch: remove `axis_name`. "
            "Under jax.pmap that would change them to those of each device: keep the class in "
            "`bridge.ToNNX`."
        ),
    ),
    "several-kinds": (
        "one expression makes layers of different kinds",
        "Write a separate expression for each kind.",
    ),
    "partly-rewritten": (
        "one expression makes classes that are rewritten and classes that stay Linen",
        "Write a separate expression for each class, or see why the others stay Linen.",
    ),
    "layer-own-method": (
        "a subclass of a Flax layer defines its own {name}",
        "Keep the layer in an attribute instead of deriving from it.",
    ),
    "layer-param-and-call": (
        "a subclass of a Flax layer defines both param and __call__",
        "Define only one of the two methods.",
    ),
    "layer-with-parts": (
        "a subclass of a Flax layer makes modules or variables",
        "Keep the layer in an attribute instead of deriving from it.",
    ),
    "layer-parameters": (
        "a subclass of a Flax layer makes its parameters in its own way",
        "Call `super().param` once, with the name that it was given.",
    ),
    "layer-initialiser": (
        "a subclass of a Flax layer changes an initialiser",
        "Pass the initialiser to the layer's constructor.",
    ),
    "layer-factory": (
        "a subclass of a Flax layer has a field with a default_factory",
        "Write the default as a value.",
    ),
    "no-function": (
        "nn.{name} has no counterpart",
        "Avoid nn.{name}, or write the class by hand.",
    ),
    "no-method": (
        "self.{name} has no counterpart here",
        "Avoid self.{name}, or write the class by hand.",
    ),
    "method-handed-on": (
        "self.{name} is passed on instead of called",
        "Call self.{name} in the method.",
    ),
    "variables-read": (
        "variables are read in a form that cannot be rewritten",
        'Read one array at a time: `self.layer.variables["params"]["kernel"]`.',
    ),
    "applied-arguments": (
        "a layer that is applied takes values that setup computes",
        "Use only fields in its arguments.",
    ),
    "applied-and-called": (
        "a layer is both called and applied to other weights",
        "Make two layers.",
    ),
    "applied-on-call": (
        "the call decides whether a layer has weights of its own",
        "Let a field decide it.",
    ),
    "merge-param": (
        "nn.merge_param is called in another form",
        "Pass its three arguments without * or **.",
    ),
    # Sizes and conditions.
    "needs-call": (
        "a constructor needs {name}, which is only known in the call",
        "Make it a field, or compute it from the fields and the shapes of the inputs.",
    ),
    "needs-told-field": (
        "a constructor needs {name}, which is an argument of the call",
        "Pass {name} to the constructor, with one value for all calls.",
    ),
    "needs-output": (
        "a constructor needs the result of a layer",
        "Make it a field, or compute it from the fields and the shapes of the inputs.",
    ),
    "loop-of-call": (
        "a loop that makes layers depends on values that are only known in the call",
        "Loop over a field, or over a length that a field or a shape gives.",
    ),
    "call-decides": (
        "an argument of the call decides which layers exist, and it was not always the same",
        "Make the argument a field.",
    ),
    "condition-unseen": (
        "the value of a condition is not known",
        (
            "Write the condition on one line, or add an entry point that reaches it (`also=`, "
            "in the command `--model`)."
        ),
    ),
    "expression-not-run": (
        "a layer is made in code that never ran",
        "Add an entry point that reaches it (`also=`, in the command `--model`).",
    ),
    # Where layers are made.
    "while-loop": (
        "a module is made in a while loop",
        "Write a `for` loop with a known number of iterations.",
    ),
    "match-on-call": (
        "a match on an argument of the call decides which layers exist",
        "Let a field decide, or make the layers before the match.",
    ),
    "try-block": (
        "a module is made where an exception was caught",
        "Make the module before the block.",
    ),
    "method-called-twice": (
        "a method or inner function that makes layers is called more than once",
        "Let it do nothing but return one layer, or turn it into a class.",
    ),
    "inner-function": (
        "a module is made in a function inside a method",
        "Turn the function into a class, or make the module before it.",
    ),
    "inner-function-used": (
        "a function inside a method is not only called",
        "Only call the function, or turn it into a class.",
    ),
    "outside-layer": (
        "a function outside the class makes one of its layers",
        "Make the layer in a method of the class.",
    ),
    # Functions that make layers.
    "around-left": (
        "it is inside {name}, which stays Linen",
        "See why {name} stays Linen.",
    ),
    "function-elsewhere": (
        "a function in another file makes one of its layers",
        "Import the function by its name, or move it into the file of the class.",
    ),
    "function-in-function": (
        "a function inside a function makes a layer",
        "Move the function to the top of its file.",
    ),
    "function-returns-inside": (
        "a function inside a method returns layers",
        "Move the function to the top of its file.",
    ),
    "function-defaults": (
        "a function inside a method takes defaults from the method",
        "Pass these values as arguments.",
    ),
    "function-decorator": (
        "a decorated function makes a layer",
        "Remove the decorator, or turn the function into a class.",
    ),
    "function-stars": (
        "a function with * arguments makes a layer",
        "List its arguments.",
    ),
    "function-call-stars": (
        "a function that makes layers is called with * or ** arguments",
        "List the arguments.",
    ),
    "function-passes-on": (
        "a function passes on values that are only known in the call",
        "Name the argument in the function's signature.",
    ),
    "function-given-module": (
        "a function that takes the module does more with it than make layers",
        "Pass the function what it reads from the module.",
    ),
    "function-given-arrays": (
        "a function that returns layers is given what only the call knows",
        "Give it fields, dimensions of arrays, or the mode of its layers.",
    ),
    "function-given-modes": (
        "a function that returns layers computes their modes from more than it is given",
        "Pass the mode where the layer is called.",
    ),
    "function-parameters": (
        "a function that returns layers makes parameters",
        "Make the parameters in the class.",
    ),
    # Modes.
    "mode-read": (
        "self.{name} is passed in the call, and {method} reads it",
        "Make it an argument of {method}.",
    ),
    "mode-position": (
        "a mode is passed by position before other arguments",
        "Pass the mode by keyword.",
    ),
    "mode-call": (
        "the call that should take a mode was not found",
        "Call the layer in the method that makes it, or through its attribute.",
    ),
    "mode-method": (
        "a mode is passed on to another method",
        "Make the mode an argument of that method.",
    ),
    "mode-rest": (
        "a mode is passed on to a method with ** arguments",
        "Make the mode an argument of that method.",
    ),
    "mode-twice": (
        "{name} is a field and an argument of the call, and the field is also read directly",
        "Read nn.merge_param({name!r}, self.{name}, {name}) instead.",
    ),
    # Parameters, variables and streams.
    "foreign-parameter": (
        "{name}, from another package, makes one of its parameters",
        "Make the parameter with `self.param`.",
    ),
    "variable-stars": (
        "a variable is declared with * arguments",
        "List the arguments.",
    ),
    "variable-names": (
        "several variables have computed names",
        "Write each name as a string, or as an f-string of the loop's variable.",
    ),
    "parameter-tree": (
        "a parameter holds several arrays",
        "Make a parameter for each array.",
    ),
    "collection-name": (
        "the name of a collection is computed",
        "Write the collection's name as a string.",
    ),
    "variable-boxed": (
        "a variable is declared with `unbox`",
        "Remove `unbox`.",
    ),
    "variable-of-module": (
        "a parameter is declared in a module that is passed as an argument",
        "Declare the parameter in a method of that module, without `module`.",
    ),
    "perturb-collection": (
        "perturb is called with another collection",
        "Remove `collection`.",
    ),
    "sow-collection": (
        "sow is called with another collection, or with its own reduction",
        "Sow into `intermediates`, without `reduce_fn` and `init_fn`.",
    ),
    "computed-for-layer": (
        "a layer takes a value that setup computes",
        "Pass the layer a field, or compute the value where the layer is called.",
    ),
    "computed-for-parameter": (
        "a parameter's initialiser uses a value that setup computes from parameters",
        "Store the computed value in an attribute.",
    ),
    "computed-again": (
        "setup reads self.{name} before it sets it again",
        "Use another name for the first value.",
    ),
    "computed-in-block": (
        "setup computes with parameters inside a block",
        "Compute the value outside of loops, or in the method that uses it.",
    ),
    "computed-name": (
        "a variable in setup has the name of an attribute",
        "Rename the variable.",
    ),
    # Cells and decode caches.
    "carry-signature": (
        "initialize_carry takes other arguments than those of Flax's cells",
        "Take a key and a shape, as Flax's cells do.",
    ),
    "carry-call": (
        "a carry is made in another form",
        "Pass the key and the shape by position.",
    ),
    "cache-inside": (
        "a decode cache is made under a transform or inside a layer",
        "Make the attention in the class itself, outside the transform.",
    ),
    "cache-partial": (
        "a partial turns on the decode cache",
        "Pass `decode` where the layer is made.",
    ),
    "cache-absent": (
        "the decode cache was never made",
        "Add an entry point that decodes (`also=`, in the command `--model`).",
    ),
    "cache-dtypes": (
        "the decode caches have different dtypes",
        "Use one dtype for all calls of the layer.",
    ),
    "cache-shapes": (
        "the decode caches have different shapes",
        "Use one shape of inputs for all layers that are made here.",
    ),
    "cache-list": (
        "a layer with a decode cache is in a list",
        "Give the layer an attribute of its own.",
    ),
    # Lifted transforms.
    "transform-of-linen": (
        "a transform contains something that stays Linen",
        "See why it stays Linen, or move it out of the transform.",
    ),
    "transform-method-linen": (
        "a method under a transform makes a layer that stays Linen",
        "See why the layer stays Linen, or remove the decorator.",
    ),
    "transform-varies": (
        "the lifted transforms are not always the same",
        "Write a separate expression for each transform.",
    ),
    "transform-sometimes": (
        "the layers are only sometimes stacked",
        "Always stack the layers, or make a class for each case.",
    ),
    "transform-condition": (
        "the condition of a transform was not found",
        "Write the transform and its `if` in the method.",
    ),
    "transform-unseen": (
        "no run used {call}",
        "Give an entry point that uses it with `also`, or `--model`.",
    ),
    "transform-no-name": (
        "this file has no name for {name}",
        "Import {name} in this file.",
    ),
    "transform-option": (
        "nn.{kind} is called with {option}",
        "Remove {option}, or write the class by hand.",
    ),
    "transform-metadata": (
        "nn.{kind} is called with metadata besides a partition name",
        "Pass only a partition name.",
    ),
    "transform-empty": (
        "nn.{kind} is applied to layers without variables",
        "Apply nn.{kind} to layers with parameters.",
    ),
    "transform-filters": (
        "{kind} does not list the collections of {option} by name",
        "List the collections by name.",
    ),
    "transform-own-axis": (
        "{kind} uses something other than an integer as the axis of {collection}",
        "Use an integer axis for {collection}.",
    ),
    "transform-keys": (
        "{kind} gives its layers {how}",
        "Give all streams the same value in `split_rngs`.",
    ),
    "transform-turn-keys": (
        "{kind} gives a layer {how} in each iteration",
        "Flip the stream's value in `split_rngs`, or remove the draws.",
    ),
    "transform-setup-axis": (
        "an axis is not known in setup",
        "Write the axis as a number.",
    ),
    "stacked-twice": (
        "the layers are stacked twice",
        "Stack them once, or write the class by hand.",
    ),
    "stacked-call": (
        "the calls of the stacked layers were not found",
        "Call the layers in the method that makes them, or through their attribute.",
    ),
    "stacked-given-output": (
        "stacked layers are called with another layer's result",
        "Assign the result to a variable before the call.",
    ),
    "transform-call": (
        "nn.{kind} is called with keyword or * arguments",
        "Pass the arguments by position.",
    ),
    "transform-in-axes": (
        "nn.{kind} is called with in_axes={axes!r}",
        "Use one axis for each argument.",
    ),
    "transform-out-axes": (
        "nn.{kind} is called with out_axes={axes!r}",
        "Use one axis for all outputs.",
    ),
    "transform-positions": (
        "nn.{kind} takes its options by position",
        "Pass the options by keyword.",
    ),
    "transform-keywords": (
        "nn.{kind} takes its arguments by keyword",
        "Pass the arguments by position.",
    ),
    "transform-call-keywords": (
        "what nn.{kind} returns is called with keywords",
        "Pass the arguments by position.",
    ),
    "transform-counts": (
        "what nn.{kind} returns is called with different numbers of arguments",
        "Pass the same arguments in every call.",
    ),
    "transform-defaults": (
        "nn.{kind} is applied to a function with defaults",
        "Pass every argument in the call.",
    ),
    "transform-other-class": (
        "nn.{kind} is applied to a layer that another class makes",
        "Make the layer in the class that transforms it.",
    ),
    "while-names": (
        "nn.while_loop is called with arguments by name",
        "Pass the arguments by position.",
    ),
    "while-keys": (
        "nn.while_loop draws keys",
        "Draw the keys before the loop.",
    ),
    "method-decorator": (
        "a method has the decorator @{decorator}",
        "Remove the decorator, or apply it where the method is called.",
    ),
    "method-jit": (
        "a method is compiled by {decorator}",
        "Remove the decorator, or compile where the model is called.",
    ),
    # Models that are given to others.
    "given-uncalled": (
        "a module that was passed to the model was never called",
        "Do not pass the module, or call it.",
    ),
    "given-module": (
        "a {name} was passed to the model as a field",
        "Make the module in the class.",
    ),
    # Functions that train the model.
    "state-use": (
        "{text} of a TrainState cannot be rewritten",
        "Use only params, step, apply_fn, apply_gradients, replace and fields of its own.",
    ),
    "state-replace": (
        "{name} of a TrainState is replaced",
        "Let apply_gradients change {name}.",
    ),
    "state-create": (
        "a TrainState is not made from params= and tx= of this model",
        "Call TrainState.create(apply_fn=model.apply, params=..., tx=...).",
    ),
    "state-apply": (
        "apply_fn is {text}",
        "Pass the apply of the model.",
    ),
    "state-field": (
        "the field {name} of a TrainState cannot be kept",
        "Annotate each field, and keep only variables of one model in a state.",
    ),
    "state-body": (
        "{name} has more than fields",
        "Turn its methods into functions.",
    ),
    "old-state": (
        "{name} is read after its update, which NNX makes in place",
        "Read what is needed before the update, or assign the new state to the same name.",
    ),
    "statistics-use": (
        "{text}, which is now in the model, is used by itself",
        "Only pass it to the model and to the state.",
    ),
    "argument-options": (
        (
            "{name} refers to the arguments of a function that loses one, because the model "
            "holds its value now"
        ),
        "Write static_argnums and donate_argnums as numbers, and use no other option.",
    ),
    "variables-use": (
        "{text} is not only used to apply the model",
        "Write {{'params': params, ...}} where the model is applied, and use params elsewhere.",
    ),
    "params-keyword": (
        "the parameters are passed by the name {name}, which changes",
        "Pass them by position.",
    ),
    "model-passed": (
        "{name} of a Linen module is passed around",
        "Pass the module, and call its init or apply where they are needed.",
    ),
    "model-fields": (
        "{name} has fields that differ from those of the model that is trained",
        "Apply a module with the fields that it was initialised with.",
    ),
    "init-keys": (
        "init is called without a key of its own",
        "Pass the key as the first argument, or a dict of keys by stream.",
    ),
    "size-unknown": (
        "{name} has no single value in the runs of the model",
        "Make one model, or write the function by hand.",
    ),
    "mutable-names": (
        "mutable={text}",
        "Pass a list of the model's collections. NNX treats sown values separately.",
    ),
    "apply-method": (
        "method={text}",
        "Pass the method's name.",
    ),
    "gradient-option": (
        "a gradient is taken with {name}=",
        "Differentiate by the first argument, and use no option but has_aux.",
    ),
    "returns-differ": (
        "its return statements return different kinds of values",
        "Return the same kinds everywhere.",
    ),
    "return-annotation": (
        "its return annotation does not name each part",
        "Write tuple[...] with all parts, or remove it.",
    ),
    "training-decorator": (
        "a function of the state has the decorator @{text}",
        "Use only jax.jit, jax.pmap, jax.vmap, jax.checkpoint, jax.grad or jax.value_and_grad.",
    ),
    "training-target": (
        "a value of the training is assigned to {text}",
        "Assign each part to a name of its own.",
    ),
    "training-line": (
        "an update or dropout keys are part of a larger expression",
        "Write a separate statement for it.",
    ),
    "training-transform": (
        "{text} is applied to a function of the state or the model",
        (
            "Use only jax.jit, jax.pmap, jax.vmap, jax.checkpoint, jax.grad, "
            "jax.value_and_grad or jax.lax.scan."
        ),
    ),
    "training-branch": (
        "these lines did not run, so they are still Linen and raise in the new program",
        "Let the sample that train= names reach them, or rewrite them by hand.",
    ),
    "training-not-run": (
        "no step of the sample ran it",
        "Call it in the function that train= names.",
    ),
    "training-left": (
        "another function of the training stays as it is",
        "See why the others stay.",
    ),
    "training-differs": (
        "the new training differs: {error}",
        "Write the function by hand. The places are listed.",
    ),
    "training-fails": (
        "the new training raised {error}",
        "Write the function by hand. The places are listed.",
    ),
}
