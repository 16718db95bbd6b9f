"""One's own runs after they were started: list, read and stop them, wherever they are."""
