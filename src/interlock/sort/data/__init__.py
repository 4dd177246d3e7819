"""Records and their order: formats, keys, checksums, the plan of partitions, generation and validation."""
