"""Creates the variables of wrapped Linen modules, wherever in a model they are."""
