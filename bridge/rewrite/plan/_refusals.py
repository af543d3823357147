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

    Args:
        id: of the row.
        line: where.
        **values: what the texts of the row name.
    """
    reason, remedy = _TABLE[id]
    return Refusal(id, reason.format(**values), remedy.format(**values), line)


class NotRewritableError(Exception):
    """A class cannot be rewritten.

    Args:
        id: of the row of the table.
        node: where, None if the class as a whole is meant.
        **values: what the texts of the row name.

    Attributes:
        refusal: why.
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
        "it is not among those that were asked for",
        "Name it with only=.",
    ),
    "skipped": (
        "excluded by skip=",
        "Do not name it with skip=.",
    ),
    "not-called": (
        "no call of it was seen",
        "Add an entry point that calls it with also=.",
    ),
    "base-left": (
        "it derives from {base}, which stays Linen",
        "See the reason of {base}.",
    ),
    "base-elsewhere": (
        "it derives from {base}, which is not of this package",
        "Derive from a class of this package.",
    ),
    "class-decorator": (
        "the decorator @{decorator} makes another class",
        "Return the class itself from the decorator, or apply it where the class is used.",
    ),
    "own-method": (
        "the class has its own {name}",
        "Move what it does into `setup` or a method of another name.",
    ),
    "reserved-method": (
        "NNX modules have a method {name} of their own",
        "Rename the method.",
    ),
    "reserved-argument": (
        "NNX constructors take no argument {name}",
        "Rename the field.",
    ),
    "module-default": (
        "the default of a field is a module",
        "Make None the default, and the module in `setup` or the method.",
    ),
    "module-outside": (
        "a module is made outside of the class: {name}",
        "Make the module in the class.",
    ),
    "mixed-class": (
        "mixed classes stay Linen: {name} makes an NNX module",
        "Rewrite the class by hand: it can use the NNX module itself.",
    ),
    "no-attribute": (
        "NNX modules have no self.{name}",
        "Do without it, or store what it tells in a field.",
    ),
    "recursive": (
        "it makes modules of its own class, directly or not",
        "Write the recursion as a loop.",
    ),
    "not-at-top": (
        (
            "it is not defined at the top of its file: it is made in a function, by exec or by a "
            "decorator"
        ),
        "Define the class at the top of its file.",
    ),
    "no-file": (
        "its source is not in a file",
        "Write the class into a file.",
    ),
    "not-utf8": (
        "its source is not UTF-8 Python ({error})",
        "Save the file as UTF-8.",
    ),
    "given-modules": (
        "only a class that stays Linen can make it: it is given modules",
        "Make the modules in the class, or see the reason of the class around it.",
    ),
    "cannot-run-alone": (
        "only a class that stays Linen can run it",
        "See the reason of the class around it.",
    ),
    "inside-linen": (
        "it is used only inside of what stays Linen",
        "See the reason of what is around it.",
    ),
    "values-differ": (
        "its values differ from those of the Linen class",
        "Rewrite it by hand, and compare with `bridge.parity`.",
    ),
    "new-class-raises": (
        "the new class raised {error}",
        "Rewrite it by hand; only= with the other classes rewrites these.",
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
        "See the reason of {name}.",
    ),
    "class-elsewhere": (
        "{name} of {module} is not among the classes that are rewritten",
        "Leave it in `bridge.ToNNX`, or rewrite its package too.",
    ),
    "lifted-class": (
        "{name} is made by a lifted transform",
        "Make the layer in a statement of its own, outside of other layers.",
    ),
    "names-by-layer": (
        "nn.{name} names its variables by its layer",
        "Write the layer without nn.{name}, or the class by hand.",
    ),
    "no-argument": (
        "nnx.{layer} has no {name}",
        "Leave {name} out if its default will do.",
    ),
    "no-layer-argument": (
        "{layer} has no {name}",
        "Leave {name} out if its default will do.",
    ),
    "lacks-argument": (
        "nnx.{layer} needs {name}",
        "Give {name}.",
    ),
    "unknown-size": (
        "nothing tells its {name}",
        "Add an entry point that calls the layer with also=.",
    ),
    "layer-stars": (
        "a constructor is given * arguments",
        "Write the arguments out.",
    ),
    "layer-rest": (
        "a layer is given ** arguments",
        "Write the arguments out, or take them from a dict that nothing changes.",
    ),
    "layer-rest-differs": (
        "a layer is given ** arguments that NNX has not",
        "Write the arguments out.",
    ),
    "layer-rest-changes": (
        "** arguments of a layer change on the way",
        "Write the arguments out, or make one dict for each layer.",
    ),
    "layer-call": (
        "nnx.{layer} is called in another way",
        "Give the arguments by keyword.",
    ),
    "sequential-keywords": (
        "nnx.Sequential gives {name} to more layers than the first",
        "Call the layers one by one.",
    ),
    "named-axis-norm": (
        "a norm over a named axis",
        "Leave `axis_name` out, or write the class by hand.",
    ),
    "several-kinds": (
        "one expression makes layers of several kinds",
        "Write an expression for each kind.",
    ),
    "partly-rewritten": (
        "one expression makes classes that are rewritten and classes that are not",
        "Write an expression for each class, or see why the others stay Linen.",
    ),
    "layer-own-method": (
        "a layer of Flax with its own {name}",
        "Hold the layer instead of deriving from it.",
    ),
    "layer-param-and-call": (
        "a layer of Flax with its own param and __call__",
        "Keep one of both methods.",
    ),
    "layer-with-parts": (
        "a layer of Flax that makes something of its own",
        "Hold the layer instead of deriving from it.",
    ),
    "layer-parameters": (
        "a layer of Flax that makes its parameters in another way",
        "Call `super().param` once, with the name that is given.",
    ),
    "layer-initialiser": (
        "a layer of Flax that changes an initialiser",
        "Give the initialiser to the layer's constructor.",
    ),
    "layer-factory": (
        "a layer of Flax with a default that a function makes",
        "Write the default as a value.",
    ),
    "no-function": (
        "nn.{name} has no counterpart",
        "Do without nn.{name}, or write the class by hand.",
    ),
    "no-method": (
        "self.{name} has no counterpart here",
        "Do without self.{name}, or write the class by hand.",
    ),
    "method-handed-on": (
        "self.{name} is handed on",
        "Call self.{name} in the method.",
    ),
    "variables-read": (
        "variables that are read in another way",
        'Read one array: `self.layer.variables["params"]["kernel"]`.',
    ),
    "applied-arguments": (
        "a layer that is applied has arguments of setup",
        "Write its arguments with fields alone.",
    ),
    "applied-and-called": (
        "a layer is called and applied to other weights",
        "Make two layers.",
    ),
    "applied-on-call": (
        "the call decides whether a layer has weights of its own",
        "Decide it by a field.",
    ),
    "merge-param": (
        "nn.merge_param in another form",
        "Give its three arguments, none of them with * or **.",
    ),
    # Sizes and conditions.
    "needs-call": (
        "a constructor needs {name}, which only the call knows",
        "Make it a field, or compute it from the fields and the shapes of the inputs.",
    ),
    "needs-told-field": (
        "a constructor needs {name}, which is told in the call",
        "Give it in the constructor, the same in every call.",
    ),
    "needs-output": (
        "a constructor needs the result of a layer",
        "Make it a field, or compute it from the fields and the shapes of the inputs.",
    ),
    "loop-of-call": (
        "a loop over what only the call knows makes layers",
        "Loop over a field, or over a length that a field or a shape gives.",
    ),
    "call-decides": (
        "an argument of the call decides which layers exist, and it was not always the same",
        "Make the argument a field.",
    ),
    "condition-unseen": (
        "a condition that was not seen",
        "Write the condition on one line, or add an entry point that reaches it with also=.",
    ),
    "expression-not-run": (
        "a layer in an expression that did not run",
        "Add an entry point that reaches it with also=.",
    ),
    "statement-not-run": (
        "a layer in a statement that did not run",
        "Add an entry point that reaches it with also=.",
    ),
    # Where layers are made.
    "while-loop": (
        "a module is made in a while loop",
        "Write a `for` loop over a known number of turns.",
    ),
    "match-on-call": (
        "an argument of the call decides which layers there are, by match",
        "Decide it by a field, or make the layers before.",
    ),
    "try-block": (
        "a module is made where an exception was caught",
        "Make the module before the block.",
    ),
    "method-called-twice": (
        "a method that makes layers is called several times",
        "Make a class of the method, or give its layers to it.",
    ),
    "inner-function": (
        "a module is made in a function inside of a method",
        "Make a class of the function, or make the module before it.",
    ),
    "inner-function-used": (
        "a function inside of a method is more than called",
        "Only call the function, or make a class of it.",
    ),
    "outside-layer": (
        "a function outside of the class makes a layer of it",
        "Make the layer in a method of the class.",
    ),
    "outside-module": (
        "a function outside of the class makes a module of it",
        "Make the module in a method of the class.",
    ),
    # Functions that make layers.
    "function-left": (
        "a function makes a layer of it: {reason}",
        "Make the layer in the class, or change the function.",
    ),
    "around-left": (
        "it is inside of {name}, which stays Linen",
        "See the reason of {name}.",
    ),
    "function-elsewhere": (
        "a function makes a layer of it: it is in another file",
        "Import the function by its name, or move it into the file of the class.",
    ),
    "function-in-function": (
        "a function inside of a function makes a layer",
        "Move the function to the top of its file.",
    ),
    "function-returns-inside": (
        "a function inside of a method returns layers",
        "Move the function to the top of its file.",
    ),
    "function-defaults": (
        "a function inside of a method has defaults of the method's",
        "Give these values as arguments.",
    ),
    "function-decorator": (
        "a function with a decorator makes a layer",
        "Remove the decorator, or make a class of the function.",
    ),
    "function-stars": (
        "a function with * arguments makes a layer",
        "Write its arguments out.",
    ),
    "function-call-stars": (
        "a function that makes layers is given * or ** arguments",
        "Write the arguments out.",
    ),
    "function-passes-on": (
        "a function passes on what only the call knows",
        "Name the argument in the function's signature.",
    ),
    "function-given-module": (
        "a function that is given the module does more with it than make layers",
        "Give the function what it reads of the module.",
    ),
    "function-given-arrays": (
        "a function that gets arrays returns layers",
        "Give the function sizes instead of arrays.",
    ),
    "function-parameters": (
        "a function that returns layers makes parameters",
        "Make the parameters in the class.",
    ),
    # Modes.
    "mode-read": (
        "self.{name} is told in the call, and {method} reads it",
        "Make it an argument of {method}.",
    ),
    "mode-position": (
        "a mode is given by position before other arguments",
        "Give the mode by keyword.",
    ),
    "mode-call": (
        "a mode moves to a call that is not found",
        "Call the layer in the method that makes it, or by its attribute.",
    ),
    "mode-method": (
        "a mode is handed on to another method",
        "Make the mode an argument of that method.",
    ),
    "mode-rest": (
        "a mode is handed on to a method with ** arguments",
        "Make the mode an argument of that method.",
    ),
    "mode-twice": (
        "{name} is a field and an argument of the call, and the field is read by itself",
        "Read nn.merge_param({name!r}, self.{name}, {name}) instead.",
    ),
    # Parameters, variables and streams.
    "foreign-parameter": (
        "{name} of another package makes a parameter of it",
        "Make the parameter with `self.param`.",
    ),
    "variable-stars": (
        "a variable with * arguments",
        "Write the arguments out.",
    ),
    "variable-names": (
        "several variables whose names are not written out",
        "Write a name for each, or an f-string with the loop's variable.",
    ),
    "parameter-tree": (
        "a parameter that holds several arrays",
        "Make a parameter for each array.",
    ),
    "collection-name": (
        "a collection whose name is not written out",
        "Write the collection as a text.",
    ),
    "variable-boxed": (
        "a variable that is not unboxed",
        "Leave `unbox` out.",
    ),
    "variable-of-module": (
        "a parameter of a module that is given as an argument",
        "Declare the parameter in a method of that module, without `module`.",
    ),
    "perturb-collection": (
        "perturb in another collection",
        "Leave the collection out.",
    ),
    "sow-collection": (
        "sow into another collection, or with its own reduction",
        "Sow into `intermediates`, without a reduction.",
    ),
    "computed-for-layer": (
        "a layer is given what setup computes",
        "Give the layer a field, or compute the value where the layer is called.",
    ),
    "computed-for-parameter": (
        "a parameter is initialised with a variable that setup computes from parameters",
        "Keep what is computed in an attribute.",
    ),
    "computed-again": (
        "setup reads self.{name} before it sets it again",
        "Give what is computed first a name of its own.",
    ),
    "computed-in-block": (
        "setup computes with parameters in a block",
        "Compute the value outside of loops, or in the method that uses it.",
    ),
    "computed-name": (
        "setup has a variable named as an attribute",
        "Rename the variable.",
    ),
    # Cells and decode caches.
    "carry-signature": (
        "an initialize_carry with other arguments",
        "Take a key and a shape, as Flax's cells do.",
    ),
    "carry-call": (
        "a carry that is made in another way",
        "Give the key and the shape by position.",
    ),
    "cache-inside": (
        "a decode cache under a transform or inside of a layer",
        "Make the attention in the class itself, outside of the transform.",
    ),
    "cache-partial": (
        "a decode cache that a partial turns on",
        "Give `decode` where the layer is made.",
    ),
    "cache-absent": (
        "a decode cache that was not made",
        "Add an entry point that decodes with also=.",
    ),
    "cache-dtypes": (
        "decode caches of several dtypes",
        "Use one dtype for all calls of the layer.",
    ),
    "cache-shapes": (
        "decode caches of several shapes",
        "Use one shape of inputs for all layers that are made here.",
    ),
    "cache-list": (
        "a decode cache in a list of setup",
        "Give the layer an attribute of its own.",
    ),
    # Lifted transforms.
    "transform-of-linen": (
        "a transform around what stays Linen",
        "See the reason of what stays Linen, or move it out of the transform.",
    ),
    "transform-method-linen": (
        "a layer that stays Linen, in a method under a transform",
        "See the reason of the layer, or remove the decorator.",
    ),
    "transform-varies": (
        "lifted transforms that are not always the same",
        "Write an expression for each transform.",
    ),
    "transform-sometimes": (
        "layers that are sometimes stacked",
        "Stack the layers always, or make a class for each case.",
    ),
    "transform-condition": (
        "a transform whose condition is not seen",
        "Write the transform and its `if` in the method.",
    ),
    "transform-no-name": (
        "{name} has no name in this file",
        "Import {name} in this file.",
    ),
    "transform-option": (
        "nn.{kind} with {option}",
        "Leave {option} out, or write the class by hand.",
    ),
    "transform-metadata": (
        "nn.{kind} with other metadata",
        "Give a partition name alone.",
    ),
    "transform-empty": (
        "nn.{kind} of layers without variables",
        "Apply nn.{kind} to layers with parameters.",
    ),
    "transform-filters": (
        "{kind} whose {option} are not written out by name",
        "Name the collections.",
    ),
    "transform-own-axis": (
        "{kind} with an axis of its own for {collection}",
        "Give an integer for {collection}.",
    ),
    "transform-keys": (
        "{kind} of layers that {how}",
        "Split all streams alike in `split_rngs`.",
    ),
    "transform-turn-keys": (
        "{kind} of one layer that draws {how} in each turn",
        "Turn the stream around in `split_rngs`, or leave the draws out.",
    ),
    "transform-setup-axis": (
        "an axis that setup does not know",
        "Write the axis as a number.",
    ),
    "stacked-twice": (
        "layers that are stacked twice",
        "Stack them once, or write the class by hand.",
    ),
    "stacked-call": (
        "stacked layers whose calls are not found",
        "Call the layers in the method that makes them, or by their attribute.",
    ),
    "stacked-given-output": (
        "stacked layers are given what another layer returns",
        "Assign it to a variable before the call.",
    ),
    "transform-call": (
        "nn.{kind} with keywords or * arguments in the call",
        "Give the arguments by position.",
    ),
    "transform-in-axes": (
        "nn.{kind} with in_axes={axes!r}",
        "Give one axis for each argument.",
    ),
    "transform-out-axes": (
        "nn.{kind} with out_axes={axes!r}",
        "Give one axis for all outputs.",
    ),
    "transform-positions": (
        "nn.{kind} with options by position",
        "Give the options by keyword.",
    ),
    "transform-keywords": (
        "nn.{kind} with keywords",
        "Give the arguments by position.",
    ),
    "transform-call-keywords": (
        "nn.{kind} with keywords in the call",
        "Give the arguments by position.",
    ),
    "transform-counts": (
        "nn.{kind} called with more and with fewer arguments",
        "Give the same arguments in every call.",
    ),
    "transform-defaults": (
        "nn.{kind} of a function with defaults",
        "Give every argument in the call.",
    ),
    "transform-other-class": (
        "nn.{kind} of a layer that another class makes",
        "Make the layer in the class that transforms it.",
    ),
    "while-names": (
        "nn.while_loop with arguments by name",
        "Give the arguments by position.",
    ),
    "while-keys": (
        "nn.while_loop with keys in it",
        "Draw the keys before the loop.",
    ),
    "method-decorator": (
        "a method under @{decorator}",
        "Remove the decorator, or apply it where the method is called.",
    ),
    "method-jit": (
        "a method under {decorator}",
        "Remove the decorator, or compile where the model is called.",
    ),
    # Models that are given to others.
    "given-uncalled": (
        "a module that the model was given was never called",
        "Do not give the module, or call it.",
    ),
    "given-module": (
        "the model was given a {name} as a field",
        "Make the module in the class.",
    ),
    # Functions that train the model.
    "state-use": (
        "{text} of a TrainState",
        "Use its params, step, apply_fn, apply_gradients, replace and fields of its own.",
    ),
    "state-replace": (
        "{name} of a TrainState is replaced",
        "Let apply_gradients change it.",
    ),
    "state-create": (
        "a TrainState is not made by params= and tx= of this model",
        "Call TrainState.create(apply_fn=model.apply, params=..., tx=...).",
    ),
    "state-apply": (
        "apply_fn is {text}",
        "Give the apply of the model.",
    ),
    "state-field": (
        "the field {name} of a TrainState",
        "Keep variables of one model in a state, each field with an annotation.",
    ),
    "state-body": (
        "{name} has more than fields",
        "Move methods into functions.",
    ),
    "old-state": (
        "{name} is read after its update, which NNX makes in place",
        "Read what is needed before, or give the new state the same name.",
    ),
    "statistics-use": (
        "{text} is read by itself, and is in the model now",
        "Give it only to the model and to the state.",
    ),
    "argument-options": (
        "{name} of a function that loses an argument, as the model has what it held",
        "Write static_argnums and donate_argnums as numbers, and use no other option.",
    ),
    "variables-use": (
        "{text} is used for more than to apply the model",
        "Write {{'params': params, ...}} where the model is applied, and use params elsewhere.",
    ),
    "params-keyword": (
        "the parameters are given by the name {name}, which becomes another",
        "Give them by position.",
    ),
    "model-passed": (
        "{name} of a Linen module is passed around",
        "Pass the module, and call its init or apply where they are needed.",
    ),
    "model-fields": (
        "{name} has other fields than the model whose variables change here",
        "Apply a module with the fields that it was initialised with.",
    ),
    "init-keys": (
        "init without a key of its own",
        "Write the key as the first argument, or a dict of keys by stream.",
    ),
    "size-unknown": (
        "the model's runs tell no single value for {name}",
        "Make one model, or write the function by hand.",
    ),
    "mutable-names": (
        "mutable={text}",
        "Give a list of the model's collections; sown values are another thing in NNX.",
    ),
    "apply-method": (
        "method={text}",
        "Give the method's name.",
    ),
    "gradient-option": (
        "a gradient with {name}=",
        "Differentiate by the first argument, with has_aux alone.",
    ),
    "returns-differ": (
        "its returns are of different kinds",
        "Return the same things everywhere.",
    ),
    "return-annotation": (
        "the annotation of what it returns does not name each part",
        "Write tuple[...] with all parts, or leave it out.",
    ),
    "training-decorator": (
        "a function of the state under @{text}",
        "Use jax.jit alone.",
    ),
    "training-target": (
        "the target {text}",
        "Give each part a name of its own.",
    ),
    "training-line": (
        "an update or dropout keys within a larger expression",
        "Give it a statement of its own.",
    ),
    "training-transform": (
        "{text} of a function of the state or the model",
        "Call the function under jax.jit, jax.grad or jax.value_and_grad alone.",
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
        "See the reasons of the others.",
    ),
    "training-differs": (
        "the new training differs: {error}",
        "Write the function by hand; the places are listed.",
    ),
    "training-fails": (
        "the new training raised {error}",
        "Write the function by hand; the places are listed.",
    ),
}
