"""The master of a sort: roster of workers, barriers between the phases, broadcasts to the workers."""
