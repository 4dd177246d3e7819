"""`interlock sort` and `interlock-sort`: the command line of the distributed sort."""
