"""A worker of a sort: its state machine, the phases that it runs, and its calls to and from the master."""
