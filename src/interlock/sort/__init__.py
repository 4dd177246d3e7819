"""The distributed sort: a master and workers that sample, sort, shuffle and merge records, each phase a state."""
