"""The distributed sort: a master and workers that sample, sort, shuffle and merge records, each phase a state."""

import os

# gRPC reads it once, when it is imported; its errors are raised anyway. Set here, before any module imports gRPC.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
