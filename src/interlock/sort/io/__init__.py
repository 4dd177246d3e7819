"""Sorted runs, shuffle and merge on memory and disk: direct I/O, huge pages, buffer pools, spill files."""
