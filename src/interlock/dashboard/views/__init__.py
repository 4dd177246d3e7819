"""The pages, one module per group; each has a router that `dashboard.app` includes."""
