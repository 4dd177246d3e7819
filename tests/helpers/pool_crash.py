"""An app that cannot be imported, for a reason that nobody foresaw."""

raise RuntimeError("no good")
