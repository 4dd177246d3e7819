"""The public API: the app, its tasks, and the ways to enqueue them."""
