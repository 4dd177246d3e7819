"""An app module that raises while it is imported."""

raise RuntimeError("no good")
