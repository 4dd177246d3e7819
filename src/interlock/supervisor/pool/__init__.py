"""The pool of worker processes that a supervisor keeps in the state that their rows ask for."""
