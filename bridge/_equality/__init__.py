"""What a value holds, as a key: whether two constructors, arguments or inputs are the same."""
